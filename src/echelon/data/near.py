"""An order in which every worker draws rows that its own machine wrote, as far as there are any. Pure.

A worker's quota is the number of rows it draws in a pass, which follows from its share. A machine whose
chunks have more rows than its workers draw lends the surplus, out of its last chunks; workers whose machine
has too few draw those. So as many rows are near as quotas allow: the sum, over machines, of the smaller of
rows and quotas. The order holds every row once; which rows form a batch depends on the workers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from echelon.plan.shares import BatchSizes, split


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where rows and workers are: rows and machine of each chunk, machine and weight of each worker."""

    chunk_rows: Sequence[int]
    chunk_hosts: Sequence[str]
    worker_hosts: Sequence[str]
    weights: Sequence[float]
    sizes: BatchSizes

    def quotas(self) -> list[int]:
        """How many rows each worker draws in a pass."""
        total = [0] * len(self.weights)
        for size, times in ((self.sizes.batch, len(self.sizes) - 1), (self.sizes.last, 1)):
            if times > 0:
                total = [had + times * n for had, n in zip(total, split(size, self.weights), strict=True)]
        return total

    def rows_of(self, host: str) -> int:
        """How many rows a machine wrote."""
        return sum(rows for rows, at in zip(self.chunk_rows, self.chunk_hosts, strict=True) if at == host)

    def quota_of(self, host: str) -> int:
        """How many rows a machine's workers draw."""
        return sum(n for n, at in zip(self.quotas(), self.worker_hosts, strict=True) if at == host)

    def lent(self, host: str) -> list[int]:
        """The machine's last chunks, as many as hold its surplus."""
        surplus = self.rows_of(host) - self.quota_of(host)
        found: list[int] = []
        for number in range(len(self.chunk_rows) - 1, -1, -1):
            if self.chunk_hosts[number] == host and surplus > 0:
                found.append(number)
                surplus -= self.chunk_rows[number]
        return sorted(found)

    def needed(self) -> list[set[int]]:
        """The chunks that each worker may have to read: its machine's, and lent ones if those do not do."""
        lent = {number for host in set(self.chunk_hosts) for number in self.lent(host)}
        found = []
        for host in self.worker_hosts:
            own = {number for number, at in enumerate(self.chunk_hosts) if at == host}
            found.append(own | lent if self.rows_of(host) < self.quota_of(host) else own)
        return found


def near_order(placement: Placement, *, seed: int, shuffle: bool) -> Tensor:
    """All rows in the order of one pass; every worker's part of every batch is near if it can be."""
    generator = torch.Generator().manual_seed(seed)

    def mixed(rows: Tensor) -> Tensor:
        return rows[torch.randperm(len(rows), generator=generator)] if shuffle else rows

    kept: dict[str, Tensor] = {}
    pool: list[Tensor] = []
    for host in sorted({*placement.chunk_hosts, *placement.worker_hosts}):
        kept[host], surplus = _parted(placement, host, mixed)
        pool.append(surplus)
    lent = mixed(torch.cat(pool))
    streams: list[Tensor] = [torch.empty(0, dtype=torch.int64)] * len(placement.worker_hosts)
    quotas = placement.quotas()
    for host in sorted(set(placement.worker_hosts)):
        wanted = placement.quota_of(host) - len(kept[host])
        drawn, lent = lent[:wanted], lent[wanted:]
        ranks = [rank for rank, at in enumerate(placement.worker_hosts) if at == host]
        rows = mixed(torch.cat([kept[host], drawn]))
        for rank, part in zip(ranks, rows.split([quotas[rank] for rank in ranks]), strict=True):
            streams[rank] = part
    return torch.cat([_dealt(streams, placement), lent])


def _parted(placement: Placement, host: str, mixed: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """The rows that a machine's workers draw, and those that it lends, drawn from the lent chunks."""
    starts = [0, *accumulate(placement.chunk_rows)]
    lent = placement.lent(host)
    own = [number for number, at in enumerate(placement.chunk_hosts) if at == host and number not in lent]
    candidates = mixed(_rows(lent, starts))
    stays = len(candidates) - max(0, placement.rows_of(host) - placement.quota_of(host))
    return torch.cat([_rows(own, starts), candidates[:stays]]), candidates[stays:]


def _rows(chunks: Sequence[int], starts: Sequence[int]) -> Tensor:
    """The numbers of the chunks' rows."""
    parts = [torch.arange(starts[number], starts[number + 1]) for number in chunks]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)


def _dealt(streams: Sequence[Tensor], placement: Placement) -> Tensor:
    """The workers' rows, batch after batch; in a batch by rank."""
    sizes, weights = placement.sizes, placement.weights
    if not len(sizes):
        return torch.empty(0, dtype=torch.int64)
    full = len(sizes) - 1
    shares = split(sizes.batch, weights) if full else (0,) * len(weights)
    parts = [
        stream[: full * share].reshape(full, share) for stream, share in zip(streams, shares, strict=True)
    ]
    last = [stream[full * share :] for stream, share in zip(streams, shares, strict=True)]
    return torch.cat([torch.cat(parts, dim=1).reshape(-1), *last])
