"""How a batch is cut into one share per worker, and an epoch into batches.

Shares are integers of at least one that sum to the batch. They differ from exact proportion by less
than one sample, except where the minimum of one forces more (largest remainder method).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

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
    shares = dict.fromkeys(_less_than_one(total, weights), 1)
    large = [rank for rank in range(len(weights)) if rank not in shares]
    wanted = _proportion(total - len(shares), {rank: weights[rank] for rank in large})
    shares |= {rank: int(want) for rank, want in wanted.items()}
    by_remainder = sorted(large, key=lambda rank: (shares[rank] - wanted[rank], rank))
    for rank in by_remainder[: total - sum(shares.values())]:
        shares[rank] += 1
    return tuple(shares[rank] for rank in range(len(weights)))


def _proportion(total: int, weights: Mapping[int, float]) -> dict[int, float]:
    whole = sum(weights.values())
    return {rank: total * weight / whole for rank, weight in weights.items()}


def _less_than_one(total: int, weights: Sequence[float]) -> set[int]:
    """The ranks whose part would be less than one sample; repeated on the rest once each has one."""
    small: set[int] = set()
    while True:
        rest = {rank: weight for rank, weight in enumerate(weights) if rank not in small}
        wanted = _proportion(total - len(small), rest)
        more = {rank for rank, want in wanted.items() if want < 1}
        if not more or len(more) == len(rest):
            return small
        small |= more


@dataclass(frozen=True, slots=True)
class Slice:
    """One worker's part of one global batch: samples `start` to `stop` of the epoch's order.

    `parts` are the shares of all workers. `positions` are those of the whole batch, where workers may be
    lost.
    """

    start: int
    stop: int
    batch: int
    parts: tuple[int, ...] = ()
    positions: Sequence[int] | None = None

    @property
    def share(self) -> int:
        """How many samples the slice has."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class BatchSizes:
    """The sizes of an epoch's global batches: `count` of them, all of `batch` samples except the last."""

    count: int
    batch: int
    last: int

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        if not 0 <= index < self.count:
            raise IndexError(index)
        return self.last if index == self.count - 1 else self.batch

    def __iter__(self) -> Iterator[int]:
        return (self[index] for index in range(self.count))

    def start(self, index: int) -> int:
        """The position of a batch's first sample; that of number `count` is the end of the epoch."""
        return index * self.batch + (self.last - self.batch if 0 < self.count == index else 0)


def batch_sizes(samples: int, batch: int, workers: int, *, drop_last: bool) -> BatchSizes:
    """The sizes of an epoch's global batches.

    The last batch holds the remaining samples. If they are fewer than the workers, they join the batch
    before, so that every worker has a sample and none is repeated. Only in this case does the number of
    workers change the batches.
    """
    full, rest = divmod(samples, batch)
    if not rest or drop_last:
        return BatchSizes(full, batch, batch)
    if full and rest < workers:
        return BatchSizes(full, batch, batch + rest)
    return BatchSizes(full + 1, batch, rest)


def slice_of(size: int, weights: Sequence[float], rank: int, *, start: int = 0) -> Slice:
    """One worker's part of a batch of `size` samples that begins at `start`."""
    parts = split(size, weights)
    before = start + sum(parts[:rank])
    return Slice(before, before + parts[rank], size, parts)


class ShareTable:
    """Every worker's part of each batch of each loader, by rank; it may change from some batch on."""

    def __init__(self, weights: Sequence[float]) -> None:
        self.weights = tuple(weights)
        self.workers = len(self.weights)  # for how many a pass' last batch must be enough
        self.goes_back = False  # whether batches that were drawn are drawn again, with the same weights
        self._before: dict[int, list[tuple[int, tuple[float, ...]]]] = {}  # until which batch, oldest first
        self._gone: frozenset[int] = frozenset()  # who has no samples, since it was lost
        self._gone_before: dict[int, list[tuple[int, frozenset[int]]]] = {}
        self._parts: dict[tuple[int, tuple[float, ...]], tuple[int, ...]] = {}

    def change(self, weights: Sequence[float], first: Mapping[int, int]) -> None:
        """Use other weights, in each loader from the batch with this number on, and from 0 in new ones."""
        for loader, number in first.items():
            earlier = [(min(until, number), before) for until, before in self._before.get(loader, ())]
            self._before[loader] = [*earlier, (number, self.weights)]
        self._parts.clear()
        self.weights = tuple(weights)

    def keep(self, ranks: Collection[int], first: Mapping[int, int]) -> None:
        """From these batches on only these ranks have samples; their weights stay as they are.

        A rank that had none so far gets the mean of the others' weights.
        """
        known = len(self.weights)
        further = frozenset(range(known, max(ranks) + 1))
        if further:
            self.weights += (sum(self.weights) / known,) * len(further)
            self._gone |= further
            self._gone_before = {
                loader: [(until, gone | further) for until, gone in entries]
                for loader, entries in self._gone_before.items()
            }
            self._parts.clear()
        for loader, number in first.items():
            self._gone_before.setdefault(loader, []).append((number, self._gone))
        self._gone = frozenset(range(len(self.weights))) - set(ranks)

    @property
    def now(self) -> tuple[float, ...]:
        """The weights of later batches; 0 for who was lost."""
        return self._without(self.weights, self._gone)

    def _without(self, weights: tuple[float, ...], gone: frozenset[int]) -> tuple[float, ...]:
        if not gone:
            return weights
        return tuple(0.0 if rank in gone else weight for rank, weight in enumerate(weights))

    def state(self, handed: Mapping[int, int]) -> dict[str, object]:
        """The weights, and the batches that still have earlier ones: counted from those handed out."""
        before = {
            str(loader): [[until - handed[loader], list(weights)] for until, weights in entries]
            for loader, entries in self._before.items()
            if loader in handed
        }
        return {"weights": list(self.weights), "before": before}

    def restore(self, state: Mapping[str, Any], drawn: Mapping[int, int]) -> None:
        """Go on with the weights of a state; `drawn` counts each loader's batches in this run."""
        self.weights = tuple(float(weight) for weight in state["weights"])
        self._parts.clear()
        self._before = {
            loader: [
                (number + ahead, tuple(float(weight) for weight in weights))
                for ahead, weights in state["before"].get(str(loader), ())
                if ahead > 0
            ]
            for loader, number in drawn.items()
        }

    def table(self) -> dict[str, Any]:
        """All of it, with the numbers of batches as they are; for a worker that comes back to the run."""
        before = {
            str(loader): [[until, list(weights)] for until, weights in entries]
            for loader, entries in self._before.items()
        }
        gone = {
            str(loader): [[until, sorted(ranks)] for until, ranks in entries]
            for loader, entries in self._gone_before.items()
        }
        return {
            "weights": list(self.weights),
            "before": before,
            "gone": gone,
            "now": sorted(self._gone),
            "workers": self.workers,
        }

    def adopt(self, table: Mapping[str, Any]) -> None:
        """Go on with another worker's table."""
        self.workers = int(table["workers"])
        self.weights = tuple(float(weight) for weight in table["weights"])
        self._parts.clear()
        self._before = {
            int(loader): [(int(until), tuple(map(float, weights))) for until, weights in entries]
            for loader, entries in table["before"].items()
        }
        self._gone_before = {
            int(loader): [(int(until), frozenset(map(int, ranks))) for until, ranks in entries]
            for loader, entries in table["gone"].items()
        }
        self._gone = frozenset(map(int, table["now"]))

    def at(self, loader: int, number: int) -> tuple[float, ...]:
        """The weights of a loader's batch; `number` counts all batches that were drawn from it."""
        before = self._before.get(loader, [])
        if self.goes_back:
            gone = self._gone_before.get(loader, ())
            return self._without(
                next((weights for until, weights in before if number < until), self.weights),
                next((ranks for until, ranks in gone if number < until), self._gone),
            )
        while before and before[0][0] <= number:  # batches are drawn in ascending order
            del before[0]
        return before[0][1] if before else self.weights

    def parts(self, loader: int, number: int, size: int) -> tuple[int, ...]:
        """Every worker's number of samples of a batch; a worker with weight 0 is lost and has none."""
        weights = self.at(loader, number)
        parts = self._parts.get((size, weights))
        if parts is None:
            shares = iter(split(size, [weight for weight in weights if weight]))
            parts = tuple(next(shares) if weight else 0 for weight in weights)
            self._parts[size, weights] = parts
        return parts

    def slice_of(self, loader: int, number: int, size: int, rank: int, *, start: int = 0) -> Slice:
        """One worker's part of a batch of `size` samples that begins at `start`."""
        parts = self.parts(loader, number, size)
        before = start + sum(parts[:rank])
        return Slice(before, before + parts[rank], size, parts)
