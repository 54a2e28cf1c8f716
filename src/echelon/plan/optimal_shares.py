"""Which whole shares of a batch let the last worker arrive soonest, within every node's memory? Exact.

A worker with s samples arrives after f + p s + a seconds: what a step costs apart from its samples, what
each sample costs, and what its link needs after computing. Samples are given out one by one, each to the
worker that would arrive first with it. That order makes the last arrival as early as any shares can,
because a worker's samples end one after the other: all that end before some time are given out before any
that ends later. A level is found by bisection, so that only the last few samples are given out singly.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from echelon.config.units import show_memory
from echelon.errors import PlanError
from echelon.plan.job import JobProfile
from echelon.plan.topology import Node

_BISECTIONS = 60


class LinearCost(Protocol):
    """What a share costs: `fixed_s + share * per_sample_s`."""

    @property
    def fixed_s(self) -> float:
        """What a step costs apart from its samples."""

    @property
    def per_sample_s(self) -> float:
        """What each sample costs."""


def best_shares(
    costs: Sequence[LinearCost],
    batch: int,
    *,
    most: Sequence[int] | None = None,
    least: int = 1,
    after_s: Sequence[float] | None = None,
) -> tuple[int, ...]:
    """The shares of a batch, by rank, with which the last worker arrives soonest.

    `most` is what each worker's memory holds, `least` the smallest share of each, and `after_s` what each
    needs between computing and arriving, such as its last gradients on a slow link.
    """
    workers = len(costs)
    limits = [batch] * workers if most is None else [min(batch, limit) for limit in most]
    _check(batch, limits, least)
    fixed = np.array([cost.fixed_s for cost in costs]) + (0.0 if after_s is None else np.array(after_s))
    slope = np.array([cost.per_sample_s for cost in costs])
    top = np.array(limits)
    shares = _below_level(fixed, slope, np.full(workers, least), top, batch)
    waiting = [
        (fixed[rank] + slope[rank] * (shares[rank] + 1), rank)
        for rank in range(workers)
        if shares[rank] < limits[rank]
    ]
    heapq.heapify(waiting)
    for _ in range(batch - int(shares.sum())):
        _, rank = heapq.heappop(waiting)
        shares[rank] += 1
        if shares[rank] < limits[rank]:
            heapq.heappush(waiting, (fixed[rank] + slope[rank] * (shares[rank] + 1), rank))
    return tuple(int(share) for share in shares)


def _below_level(
    fixed: NDArray[np.float64],
    slope: NDArray[np.float64],
    least: NDArray[np.int64],
    most: NDArray[np.int64],
    batch: int,
) -> NDArray[np.int64]:
    """The samples that end before a level just below the best one; never more than the batch."""
    safe = np.where(slope > 0, slope, 1.0)

    def ended(level_s: float) -> NDArray[np.int64]:
        # A sample without cost ends at once.
        whole = np.where(slope > 0, np.floor((level_s - fixed) / safe), np.where(level_s > fixed, most, 0))
        return np.clip(whole, least, most).astype(np.int64)

    low, high = float(fixed.min()), float((fixed + slope * most).max())
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        if ended(middle).sum() > batch:
            high = middle
        else:
            low = middle
    found = ended(low)
    return found if found.sum() <= batch else least.copy()


def _check(batch: int, limits: Sequence[int], least: int) -> None:
    """Refuse a batch that is too small for the workers, or too large for their memory."""
    workers = len(limits)
    if batch < workers * least:
        raise PlanError(
            f"a batch of {batch} cannot be shared by {workers} workers",
            where="batch",
            fix=f"use a batch of at least {workers * least}, or at most {max(1, batch // least)} workers",
        )
    without = [rank for rank, limit in enumerate(limits) if limit < least]
    if without:
        raise PlanError(
            f"the memory of rank {without[0]} does not hold the model with a share of {least}",
            where=f"rank {without[0]}",
            fix="leave it out, or give it more memory",
        )
    if sum(limits) < batch:
        raise PlanError(
            f"a batch of {batch} does not fit: the workers' memory holds {sum(limits)} samples",
            where="batch",
            fix=f"lower the batch to {sum(limits)}, or add workers",
        )


def most_share(job: JobProfile, node: Node) -> int:
    """The largest share whose memory the node has; 0 if it does not hold the model with one sample."""
    if job.memory_bytes(job.batch) <= node.memory_bytes:
        return job.batch
    if job.memory_bytes(1) > node.memory_bytes:
        return 0
    share = int((node.memory_bytes - job.base_bytes) / job.sample_bytes)
    while share and job.memory_bytes(share) > node.memory_bytes:  # rounding
        share -= 1
    return share


def check_memory(job: JobProfile, nodes: Sequence[Node]) -> None:
    """Raise PlanError, with what is missing where, if the nodes together cannot hold the job."""
    limits = [most_share(job, node) for node in nodes]
    one = job.memory_bytes(1)
    if not any(limits):
        there = _some([f"{node.name} has {show_memory(node.memory_bytes)}" for node in nodes])
        largest = max(nodes, key=lambda node: node.memory_bytes)
        missing = show_memory(one - largest.memory_bytes)
        raise PlanError(
            f"a worker needs {show_memory(one)} for one sample, {there}",
            where=f"memory: {missing} are missing on {largest.name}, which has most",
            fix=f"use a smaller model, or a node with at least {show_memory(one)}",
        )
    if sum(limits) < job.batch:
        parts = [f"{node.name} holds {limit}" for node, limit in zip(nodes, limits, strict=True) if limit]
        missing = show_memory((job.batch - sum(limits)) * job.sample_bytes)
        raise PlanError(
            f"a batch of {job.batch} does not fit: {_some(parts)}",
            where=f"memory: {missing} are missing in all",
            fix=f"lower the batch to {sum(limits)}, or add a node",
        )


def _some(parts: Sequence[str]) -> str:
    return ", ".join(parts[:8]) + (", ..." if len(parts) > 8 else "")
