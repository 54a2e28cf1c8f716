"""What each stage of a pipeline did with its time, and for whom it waited.

The bubble of a stage is the share of a batch's time, from its first pass to the result, in which it waits
for another stage. A forward pass waits for the worker before it, a backward pass for the one after it, and
the result for the last one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import msgspec

from echelon.config.units import show_seconds
from echelon.observe.events import PassesTimed, StageAssigned


class StageFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One worker's stage.

    It has layers `begin` to `end`, the latter excluded; with several chunks, those of `chunks`. `busy_s`
    and `wait_s` are sums over all batches, `waits_s` are the waits by awaited rank. `micro_s` is the mean
    time of all passes of a micro-batch.
    `predicted_s` and `predicted_bytes` are 0 if nothing was predicted; `memory_bytes` is the largest
    resident memory above that of the process without the model.
    """

    rank: int
    replica: int
    stage: int
    begin: int
    end: int
    first: str
    last: str
    busy_s: float = 0.0
    wait_s: float = 0.0
    waits_s: Mapping[int, float] = {}
    micro_s: float = 0.0
    predicted_s: float = 0.0
    predicted_bytes: float = 0.0
    memory_bytes: int = 0
    chunks: tuple[tuple[int, int], ...] = ()

    @property
    def layers(self) -> str:
        """Which layers it has, in words."""
        return " and ".join(
            f"{begin} to {end - 1}" for begin, end in self.chunks or ((self.begin, self.end),)
        )

    @property
    def bubble(self) -> float:
        """The share of a batch's time in which the stage waits."""
        total_s = self.busy_s + self.wait_s
        return self.wait_s / total_s if total_s > 0 else 0.0

    @property
    def awaited(self) -> int | None:
        """The worker for which it waited longest; None if it did not wait."""
        return max(self.waits_s, key=lambda rank: self.waits_s[rank]) if self.waits_s else None


class _StageSums:
    """One worker's sums so far."""

    def __init__(self) -> None:
        self.busy_us = 0
        self.micro = 0
        self.memory_bytes = 0
        self.waits_us: defaultdict[str, int] = defaultdict(int)


class StageTally:
    """Takes events one by one, workers in any order."""

    def __init__(self) -> None:
        self._assigned: dict[int, StageAssigned] = {}
        self._sums: defaultdict[int, _StageSums] = defaultdict(_StageSums)

    def add(self, event: StageAssigned | PassesTimed) -> None:
        """Take one event into account."""
        if isinstance(event, StageAssigned):
            self._assigned[event.rank] = event
            return
        sums = self._sums[event.rank]
        sums.memory_bytes = max(sums.memory_bytes, event.memory_bytes)
        chunks = event.chunks or [0] * len(event.passes)
        for (kind, _, _, wait_us, took_us), chunk in zip(event.passes, chunks, strict=True):
            sums.busy_us += took_us
            sums.waits_us[kind] += wait_us
            sums.micro += kind == "forward" and chunk == 0

    def figures(self) -> tuple[StageFigures, ...]:
        """The stages by rank; none without a pipeline."""
        return tuple(
            _figures(self._assigned[rank], self._sums[rank])
            for rank in sorted(self._assigned)
            if rank in self._sums
        )


def awaited_rank(kind: str, stage: int, ranks: Sequence[int]) -> int | None:
    """The worker for which a pass of this kind waits; None if for nobody.

    With several chunks the first worker waits for the last one's chunk before, and the last for the first.
    """
    if kind == "result":
        return ranks[-1] if ranks else None
    step = {"forward": -1, "backward": 1}.get(kind)
    return ranks[(stage + step) % len(ranks)] if step is not None and len(ranks) > 1 else None


def _figures(assigned: StageAssigned, sums: _StageSums) -> StageFigures:
    waits_s: defaultdict[int, float] = defaultdict(float)
    for kind, wait_us in sums.waits_us.items():
        rank = awaited_rank(kind, assigned.stage, assigned.ranks)
        if rank is not None and wait_us:
            waits_s[rank] += wait_us / 1e6
    return StageFigures(
        rank=assigned.rank,
        replica=assigned.replica,
        stage=assigned.stage,
        begin=assigned.begin,
        end=assigned.end,
        first=assigned.first,
        last=assigned.last,
        busy_s=sums.busy_us / 1e6,
        wait_s=sum(waits_s.values()),
        waits_s=dict(waits_s),
        micro_s=sums.busy_us / 1e6 / sums.micro if sums.micro else 0.0,
        predicted_s=assigned.predicted_s,
        predicted_bytes=assigned.predicted_bytes,
        memory_bytes=sums.memory_bytes,
        chunks=tuple(assigned.chunks),
    )


def stages_verdict(stages: Sequence[StageFigures]) -> str:
    """What the figures mean, in a sentence; empty if there are fewer than two stages."""
    if len(stages) < 2:
        return ""
    most = max(stages, key=lambda one: one.bubble)
    slowest = max(stages, key=lambda one: one.micro_s)
    waited = sum(one.wait_s for one in stages)
    total = waited + sum(one.busy_s for one in stages)
    share = waited / total if total > 0 else 0.0
    text = (
        f"stages waited {100 * share:.0f} % of their time; the slowest is rank {slowest.rank} "
        f"(layers {slowest.layers}), {show_seconds(slowest.micro_s)} a micro-batch"
    )
    if most.awaited is not None:
        text += f"; rank {most.rank} waited most, {100 * most.bubble:.0f} %, for rank {most.awaited}"
    return text
