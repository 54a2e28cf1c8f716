"""How a batch is cut into one share per worker, and an epoch into batches.

Shares are whole numbers that sum to the batch, are at least one, and differ from exact proportion
by less than one sample wherever that minimum allows it (largest remainder).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite

from echelon.errors import ConfigError


def split(total: int, weights: Sequence[float]) -> tuple[int, ...]:
    """Cut `total` samples in proportion to `weights`; every worker gets at least one."""
    if not weights or any(not isfinite(w) or w <= 0 for w in weights):
        raise ConfigError(
            f"shares {list(weights)} do not work: each must be a positive number",
            fix="give every worker a positive weight, or leave a worker out of the run",
        )
    if total < len(weights):
        raise ConfigError(
            f"a batch of {total} cannot be shared by {len(weights)} workers",
            fix=f"use a batch of at least {len(weights)}, or fewer workers",
        )
    shares = [1] * len(weights)
    _deal(shares, total - len(weights), _wanted(total, weights))
    return tuple(shares)


def _wanted(total: int, weights: Sequence[float]) -> list[float]:
    whole = sum(weights)
    return [total * weight / whole for weight in weights]


def _deal(shares: list[int], rest: int, wanted: Sequence[float]) -> None:
    """Hand out the rest: whole samples of what is wanted first, then by largest remainder."""
    for rank, want in enumerate(wanted):
        take = min(rest, max(0, int(want) - shares[rank]))
        shares[rank] += take
        rest -= take
    by_remainder = sorted(range(len(shares)), key=lambda rank: (shares[rank] - wanted[rank], rank))
    for rank in by_remainder[:rest]:
        shares[rank] += 1


@dataclass(frozen=True, slots=True)
class Slice:
    """One worker's part of one global batch: samples `start` to `stop` of the epoch's order."""

    start: int
    stop: int
    batch: int

    @property
    def share(self) -> int:
        """How many samples that is."""
        return self.stop - self.start


def batch_sizes(samples: int, batch: int, workers: int, *, drop_last: bool) -> list[int]:
    """The sizes of an epoch's global batches.

    The last one holds what is left. If that is fewer samples than there are workers it joins the
    batch before it, so that nobody is without a sample and none is repeated; this is the only case in
    which the number of workers changes what a batch is.
    """
    full, rest = divmod(samples, batch)
    sizes = [batch] * full
    if rest and not drop_last:
        if sizes and rest < workers:
            sizes[-1] += rest
        else:
            sizes.append(rest)
    return sizes


def slices(sizes: Sequence[int], weights: Sequence[float], rank: int, *, start: int = 0) -> list[Slice]:
    """One worker's part of each batch; all workers' parts together are every sample once."""
    out = []
    known: dict[int, tuple[int, ...]] = {}
    at = start
    for size in sizes:
        if size not in known:
            known[size] = split(size, weights)
        before = at + sum(known[size][:rank])
        out.append(Slice(before, before + known[size][rank], size))
        at += size
    return out
