"""Where is a chain of layers cut into stages, so that unequal workers finish together? Pure.

With micro-batches the slowest stage, or the slowest link between two, sets the pace: a batch of M
micro-batches takes about

    T = sum of all stages and links, there and back + (M - 1) * slowest stage or link

The sum depends on the cut too, because workers are unequal, and because layers hand over more or less. Both
are minimised exactly: for every possible pace (the time of some run of layers on some worker, or of some
cut's values on some link) a dynamic program finds the least sum with nothing slower than the pace.
Stages are in the order of the workers; each has at least one layer. A stage that does not fit its
worker's memory is not considered.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, combinations, pairwise

from echelon.errors import PlanError

_MOST_PACES = 64  # that are tried exactly; more are thinned out
_FEW = 5000  # cuts that are all compared


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainCost:
    """What the layers cost.

    times_s       forward and backward of a micro-batch: of each layer, on each worker
    sizes_bytes   what a stage with the layer keeps in memory
    limits_bytes  each worker's memory; empty: not limited
    wires_s       what a cut before each layer hands over for a micro-batch takes on each link, the first
                  stage's first; empty: no time
    closed        layers before which no cut is possible
    """

    times_s: Sequence[Sequence[float]]
    sizes_bytes: Sequence[float]
    limits_bytes: Sequence[float] = ()
    wires_s: Sequence[Sequence[float]] = ()
    closed: frozenset[int] = field(default_factory=frozenset)

    @property
    def layers(self) -> int:
        """How many there are."""
        return len(self.sizes_bytes)

    def wire_s(self, stage: int, begin: int) -> float:
        """How long what this stage receives is on its way, if it begins with this layer."""
        return self.wires_s[stage - 1][begin] if stage and self.wires_s else 0.0


def wires_s(bytes_per_s: Sequence[float], passed_bytes: Sequence[float]) -> list[list[float]]:
    """How long each cut takes on each link; `passed_bytes` is what each layer hands over."""
    return [[0.0, *(count / rate for count in passed_bytes[:-1])] for rate in bytes_per_s]


def best_cuts(cost: ChainCost, micro: int) -> tuple[int, ...]:
    """The layers at which the second and later stages begin; PlanError if no cut fits into memory."""
    stages = len(cost.times_s)
    found: tuple[float, tuple[int, ...]] | None = None
    for pace in _paces(cost):
        if found is not None and micro * pace >= found[0] and pace > 0:
            break  # paces ascend: the sum is at least the slowest one, so nothing later is better
        within = _least_sum(cost, pace)
        if within is None:
            continue
        total, cuts = within
        took = total + (micro - 1) * _slowest(cost, cuts)
        if found is None or took < found[0]:
            found = took, cuts
    if found is None:
        raise _misfit(cost, stages)
    return found[1]


def best_chunk_cuts(cost: ChainCost, micro: int, workers: int) -> tuple[int, ...]:
    """The same for parts that go over the workers in turn; `cost` has a row for each part.

    The pace is set by all parts of a worker together, and its memory holds all of them. Of few layers all
    cuts are compared. Of many, cuts as if all parts had different workers come first; then they move, one
    or two neighbours alike, to where they help most, until nothing helps.
    """
    sums = _SumsOfLayers.of(cost)
    if math.comb(cost.layers - 1, len(cost.times_s) - 1) <= _FEW:
        cuts = min(_every(cost), key=lambda one: sums.took(one, micro, workers), default=[])
        best = sums.took(cuts, micro, workers) if cuts else (math.inf, math.inf)
    else:
        cuts = list(best_cuts(cost, micro))
        best, cuts = _improved(cost, sums, cuts, micro, workers)
    if best[0] > 0:
        limits = cost.limits_bytes[:workers]
        raise _misfit(replace(cost, times_s=cost.times_s[:workers], limits_bytes=limits), workers)
    return tuple(cuts)


def _every(cost: ChainCost) -> Iterator[list[int]]:
    """All cuts that there are."""
    for found in combinations(range(1, cost.layers), len(cost.times_s) - 1):
        if not cost.closed.intersection(found):
            yield list(found)


def _improved(
    cost: ChainCost, sums: _SumsOfLayers, cuts: list[int], micro: int, workers: int
) -> tuple[tuple[float, float], list[int]]:
    """Cuts moved until nothing helps, with the memory that is missing and the time."""
    best = sums.took(cuts, micro, workers)
    while True:
        moved = min(_moved(cost, cuts), key=lambda one: sums.took(one, micro, workers), default=cuts)
        took = sums.took(moved, micro, workers)
        if took >= best or (took[0] == best[0] and took[1] > best[1] * (1 - 1e-12)):
            return best, cuts
        best, cuts = took, moved


def _moved(cost: ChainCost, cuts: list[int]) -> Iterator[list[int]]:
    """All cuts with one, or two neighbours alike, at another place."""
    for count in (1, 2):
        for at in range(len(cuts) - count + 1):
            low = cuts[at - 1] if at else 0
            high = cuts[at + count] if at + count < len(cuts) else cost.layers
            for by in range(low + 1 - cuts[at], high - cuts[at + count - 1]):
                found = [cut + by if at <= index < at + count else cut for index, cut in enumerate(cuts)]
                if by and not cost.closed.intersection(found):
                    yield found


@dataclass(frozen=True, slots=True)
class _SumsOfLayers:
    """Times and sizes of the layers before each, by part, so that those of a run are a difference."""

    cost: ChainCost
    times_s: list[list[float]]
    sizes_bytes: list[float]

    @staticmethod
    def of(cost: ChainCost) -> _SumsOfLayers:
        """Those of a chain."""
        times_s = [list(accumulate(times, initial=0.0)) for times in cost.times_s]
        return _SumsOfLayers(cost, times_s, list(accumulate(cost.sizes_bytes, initial=0.0)))

    def took(self, cuts: Sequence[int], micro: int, workers: int) -> tuple[float, float]:
        """The memory that is missing, and how long a batch takes, if parts go over workers in turn."""
        loads, sizes, links = [0.0] * workers, [0.0] * workers, [0.0] * workers
        for part, (begin, end) in enumerate(pairwise([0, *cuts, self.cost.layers])):
            loads[part % workers] += self.times_s[part][end] - self.times_s[part][begin]
            sizes[part % workers] += self.sizes_bytes[end] - self.sizes_bytes[begin]
            links[part % workers] += self.cost.wire_s(part, begin)
        rooms = [_limit(self.cost, worker) for worker in range(workers)]
        missing = sum(max(0.0, size - room) for size, room in zip(sizes, rooms, strict=True))
        return missing, sum(loads) + 2 * sum(links) + (micro - 1) * max(*loads, *links)


def _slowest(cost: ChainCost, cuts: Sequence[int]) -> float:
    edges = [0, *cuts, cost.layers]
    stages = zip(cost.times_s, edges[:-1], edges[1:], strict=True)
    slowest = max(sum(times[begin:end]) for times, begin, end in stages)
    return max(slowest, *(cost.wire_s(stage, begin) for stage, begin in enumerate(edges[:-1])))


def _paces(cost: ChainCost) -> list[float]:
    """The times of all runs of layers and of all cuts, ascending; thinned out evenly if they are many."""
    runs: set[float] = {one for link in cost.wires_s for one in link[1:]}
    for times in cost.times_s:
        sums = [0.0, *accumulate(times)]
        for begin in range(cost.layers):
            runs.update(sums[end] - sums[begin] for end in range(begin + 1, cost.layers + 1))
    ordered = sorted(runs)
    if len(ordered) <= _MOST_PACES * 8:
        return ordered
    every = len(ordered) / (_MOST_PACES * 8)
    return [ordered[int(at * every)] for at in range(_MOST_PACES * 8)] + [ordered[-1]]


def _least_sum(cost: ChainCost, pace: float) -> tuple[float, tuple[int, ...]] | None:
    """The least sum of all stages with none slower than `pace`, and its cuts; None if there is none."""
    layers, stages = cost.layers, len(cost.times_s)
    best: list[tuple[float, tuple[int, ...]] | None] = [None] * (layers + 1)
    best[0] = 0.0, ()
    for stage in range(stages):
        times, limit = cost.times_s[stage], _limit(cost, stage)
        following: list[tuple[float, tuple[int, ...]] | None] = [None] * (layers + 1)
        for begin, before in enumerate(best):
            if before is None or begin in cost.closed or begin == layers:
                continue
            wire_s = cost.wire_s(stage, begin)
            if wire_s > pace * (1 + 1e-12):
                continue
            took = size = 0.0
            for end in range(begin + 1, layers - (stages - 1 - stage) + 1):
                took, size = took + times[end - 1], size + cost.sizes_bytes[end - 1]
                if took > pace * (1 + 1e-12) or size > limit:
                    break
                total, known = before[0] + 2 * wire_s + took, following[end]
                if known is None or total < known[0]:
                    following[end] = total, (*before[1], begin) if stage else ()
        best = following
    return best[layers]


def _limit(cost: ChainCost, stage: int) -> float:
    return cost.limits_bytes[stage] if cost.limits_bytes else math.inf


def _misfit(cost: ChainCost, stages: int) -> PlanError:
    need, have = sum(cost.sizes_bytes), sum(cost.limits_bytes) if cost.limits_bytes else math.inf
    if need > have:
        return PlanError(
            f"the model needs {need / 2**20:.1f} MiB, the {stages} stages have {have / 2**20:.1f} MiB: "
            f"{(need - have) / 2**20:.1f} MiB are missing",
            where="pipeline",
            fix="use more stages, more micro-batches, or workers with more memory",
        )
    return PlanError(
        f"no cut of {cost.layers} layers into {stages} stages fits"
        + (" into the workers' memory" if cost.limits_bytes else ""),
        where="pipeline",
        fix="use fewer stages, or a model with smaller layers",
    )
