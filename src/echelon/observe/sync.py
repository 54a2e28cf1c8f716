"""What a sync policy other than `full` did with the workers' steps: pushes applied, dropped, delayed.

With parameter servers, the first server records every arrival and every decision:

    age         of an applied push: the number of updates between the weights it was computed on and the
                update that contains it; 0 where workers step together
    held        the time from a worker's arrival to its release, as the server saw it
    held up     how long a worker kept the others waiting: the workers that one arrival releases are judged
                like those of a round (arrival.py). A worker that leaves counts as arriving then
    took part   of all updates made while the worker was in the run, the share that contains its push
    alone       how often a worker was released with its own weights

With `levels`, the server's record has the numbers of groups. A group's figures are shown here for its first
rank, which pushes for the whole group; the other ranks have none.

A script with several optimizers has a table at the server for each; these figures are of the first table.

If workers average weights without a server, no decisions are recorded; only the steps after which a worker
exchanged something are known. Every push that arrived was applied, was dropped, or is pending.

Figures over time are kept in at most `_MOST_CELLS` stretches; if there would be more, pairs are merged.
This bounds the memory of a long run.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from echelon.observe.arrival import charge
from echelon.observe.events import Arrived, Decided
from echelon.observe.run_folder import RunFolder

FULL = "full"
_REDUCE = "reduce"
_MOST_CELLS = 120
_FEW_STRETCHES = 20
_FIRST_WIDTH_S = 0.01
_Key = TypeVar("_Key", int, str)
_NUMBER = re.compile(r"\s*\d+")


class WorkerSync(msgspec.Struct, frozen=True, kw_only=True):
    """One worker's figures. `ages` maps an age to the number of pushes; `exchanges` counts steps."""

    rank: int
    pushed: int
    applied: int
    dropped: int
    dropped_for: dict[str, int]
    alone: int
    updates: int
    took_part: float
    age_mean: float
    age_most: int
    ages: dict[int, int]
    held_s: float
    exchanges: int
    held_up_s: float = 0.0


class Stretch(msgspec.Struct, frozen=True, kw_only=True):
    """A part of the run; `begin_s` counts from the first arrival, tuples are indexed by worker."""

    begin_s: float
    seconds: float
    updates: int
    parts: float
    age_mean: float
    age_most: int
    applied: tuple[int, ...]
    dropped: tuple[int, ...]
    alone: tuple[int, ...]


class SyncFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The whole run's figures. `parts` maps a number of pushes to the number of updates made from so many.

    `served` tells whether there was a parameter server; without one, figures about pushes and updates are
    0. `began` is the time of the first arrival. `family` is that of the policy, empty if unknown.
    """

    policy: str
    served: bool
    began: float
    updates: int
    parts: dict[int, int]
    pushed: int
    applied: int
    dropped: int
    dropped_for: dict[str, int]
    age_mean: float
    age_most: int
    held_s: float
    workers: tuple[WorkerSync, ...]
    course: tuple[Stretch, ...]
    family: str = ""


def policy_of(folder: RunFolder) -> str:
    """The sync policy in the run's plan; empty without a readable plan."""
    sync = plan_values(folder).get("sync", "")
    return sync if isinstance(sync, str) else ""


def plan_values(folder: RunFolder) -> dict[str, Any]:
    """The values of the run's plan; none without a readable plan."""
    try:
        plan: dict[str, Any] = msgspec.toml.decode(folder.plan.read_bytes())
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return {}
    return plan


def steps_together(policy: str, family: str = "") -> bool:
    """Whether all workers take every step together: the family says so; in old records, only `full`."""
    return family == _REDUCE if family else policy in ("", FULL)


@dataclass(slots=True)
class _Part:
    """One worker's sums."""

    pushed: int = 0
    applied: int = 0
    dropped_for: dict[str, int] = field(default_factory=dict)
    alone: int = 0
    updates: int = 0
    ages: dict[int, int] = field(default_factory=dict)
    held_s: float = 0.0
    missed: int = 0  # updates made while it was not in the run
    gone_at: int | None = None  # the version at which it left

    def share_of(self, updates: int) -> float:
        gone = self.missed + (updates - self.gone_at if self.gone_at is not None else 0)
        return min(1.0, self.updates / (updates - gone)) if updates > gone else 0.0


@dataclass(slots=True)
class _Cell:
    """Counts of one stretch of time; the dictionaries are by worker."""

    updates: int = 0
    parts: int = 0
    age_sum: int = 0
    age_most: int = 0
    applied: dict[int, int] = field(default_factory=dict)
    dropped: dict[int, int] = field(default_factory=dict)
    alone: dict[int, int] = field(default_factory=dict)

    def add(self, other: _Cell) -> None:
        self.updates += other.updates
        self.parts += other.parts
        self.age_sum += other.age_sum
        self.age_most = max(self.age_most, other.age_most)
        for mine, theirs in (
            (self.applied, other.applied),
            (self.dropped, other.dropped),
            (self.alone, other.alone),
        ):
            for worker, count in theirs.items():
                mine[worker] = mine.get(worker, 0) + count


class _Timeline:
    """Cells of equal width; the width doubles when there are too many."""

    def __init__(self) -> None:
        self.began: float | None = None
        self._width_s = _FIRST_WIDTH_S
        self._cells: dict[int, _Cell] = {}

    def at(self, t: float) -> _Cell:
        if self.began is None:
            self.began = t
        place = max(0, int((t - self.began) / self._width_s))
        while place >= _MOST_CELLS:
            self._width_s *= 2
            self._cells = _merged(self._cells, 2)
            place = max(0, int((t - self.began) / self._width_s))
        cell = self._cells.get(place)
        if cell is None:
            cell = self._cells[place] = _Cell()
        return cell

    def stretches(self, workers: int, most: int) -> tuple[Stretch, ...]:
        """All stretches from the start to the last cell that is not empty, empty ones included."""
        if not self._cells:
            return ()
        each = -(-(max(self._cells) + 1) // most)
        cells, width_s = _merged(self._cells, each), self._width_s * each
        return tuple(
            _stretch(cells.get(place, _Cell()), place * width_s, width_s, workers)
            for place in range(max(cells) + 1)
        )


def _merged(cells: Mapping[int, _Cell], each: int) -> dict[int, _Cell]:
    merged: dict[int, _Cell] = {}
    for place, cell in cells.items():
        merged.setdefault(place // each, _Cell()).add(cell)
    return merged


def _stretch(cell: _Cell, begin_s: float, width_s: float, workers: int) -> Stretch:
    def listed(counts: Mapping[int, int]) -> tuple[int, ...]:
        return tuple(counts.get(worker, 0) for worker in range(workers))

    return Stretch(
        begin_s=begin_s,
        seconds=width_s,
        updates=cell.updates,
        parts=_ratio(cell.parts, cell.updates),
        age_mean=_ratio(cell.age_sum, cell.parts),
        age_most=cell.age_most,
        applied=listed(cell.applied),
        dropped=listed(cell.dropped),
        alone=listed(cell.alone),
    )


class SyncTally:
    """Takes a server's events one by one, in order; `figures` gives the figures so far."""

    def __init__(self) -> None:
        self._firsts: tuple[int, ...] = ()
        self._workers: dict[int, _Part] = {}
        self._read: dict[tuple[int, int], int] = {}  # version read by each pending push
        self._since: dict[int, float] = {}  # arrival time of each waiting worker
        self._released: dict[int, float] = {}  # arrival times of those released since the last arrival
        self._held_up_s: dict[int, float] = {}
        self._parts: dict[int, int] = {}
        self._course = _Timeline()
        self._updates = 0

    def know_groups(self, groups: Sequence[Sequence[int]]) -> None:
        """With `levels`: call it before the server's events; only each group's first rank has figures."""
        self._firsts = tuple(group[0] for group in groups)

    @property
    def served(self) -> bool:
        """Whether a server has recorded anything."""
        return bool(self._workers)

    @property
    def updates(self) -> int:
        """How many updates were made."""
        return self._updates

    def _part(self, worker: int) -> _Part:
        part = self._workers.get(worker)
        if part is None:
            part = self._workers[worker] = _Part()
        return part

    def _rank(self, worker: int) -> int:
        """The rank of a worker or group in the server's record."""
        return self._firsts[worker] if 0 <= worker < len(self._firsts) else worker

    def arrived(self, event: Arrived) -> None:
        """Record an arrival."""
        if event.table:
            return
        self._held_up_s, self._released = self._charged(), {}
        if event.worker < 0:
            return
        if self._firsts:
            event = msgspec.structs.replace(event, worker=self._rank(event.worker))
        part = self._part(event.worker)
        if event.kind == "leave":
            part.gone_at = self._updates
            self._since.pop(event.worker, None)
            self._released[event.worker] = event.t
            return
        if event.kind == "join":
            if part.gone_at is not None:
                part.missed += self._updates - part.gone_at
                part.gone_at = None
            return
        self._since[event.worker] = event.t
        if event.kind != "ask":
            part.pushed += 1
            self._read[event.worker, event.step] = event.read

    def decided(self, event: Decided) -> None:
        """Record a decision."""
        if event.table:
            return
        if self._firsts:
            parts = [(self._rank(worker), step, weight) for worker, step, weight in event.parts]
            event = msgspec.structs.replace(event, worker=self._rank(event.worker), parts=parts)
        if event.what == "apply":
            self._applied(event)
        elif event.what == "drop":
            self._dropped(event)
        elif event.what in ("release", "invite"):
            part = self._part(event.worker)
            since = self._since.pop(event.worker, None)
            if since is not None:
                part.held_s += max(0.0, event.t - since)
                self._released[event.worker] = since
            if event.what == "release" and not event.fresh:
                part.alone += 1
                _count(self._course.at(event.t).alone, event.worker)

    def _charged(self) -> dict[int, float]:
        """How long each worker kept others waiting, with those that were released last."""
        charges = charge(self._released)
        ranks = {*self._held_up_s, *charges}
        return {rank: self._held_up_s.get(rank, 0.0) + charges.get(rank, 0.0) for rank in ranks}

    def _applied(self, event: Decided) -> None:
        self._updates += 1
        self._parts[len(event.parts)] = self._parts.get(len(event.parts), 0) + 1
        cell = self._course.at(event.t)
        cell.updates += 1
        cell.parts += len(event.parts)
        seen = set()
        for worker, step, _ in event.parts:
            part = self._part(worker)
            # The version is that after the update; the weights before it are one older.
            age = max(0, event.version - 1 - self._read.pop((worker, step), event.version - 1))
            part.applied += 1
            _count(part.ages, age)
            _count(cell.applied, worker)
            cell.age_sum += age
            cell.age_most = max(cell.age_most, age)
            seen.add(worker)
        for worker in seen:
            self._workers[worker].updates += 1

    def _dropped(self, event: Decided) -> None:
        self._read.pop((event.worker, event.step), None)
        # Without numbers, "left out of round 12" and "left out of round 13" are one reason.
        reason = _NUMBER.sub("", event.reason.partition(":")[0]) or "no reason given"
        _count(self._part(event.worker).dropped_for, reason)
        _count(self._course.at(event.t).dropped, event.worker)

    def course(self, most: int = _MOST_CELLS, *, workers: int = 0) -> tuple[Stretch, ...]:
        """Figures over time, in at most `most` stretches, for at least `workers` workers."""
        return self._course.stretches(max(workers, max(self._workers, default=-1) + 1), most)

    def figures(self, policy: str, exchanges: Mapping[int, int], family: str = "") -> SyncFigures:
        """The figures so far; `exchanges` counts the steps in which each worker sent something."""
        ranks = sorted({*self._workers, *exchanges})
        if self._firsts and self.served:
            ranks = [rank for rank in ranks if rank in self._workers or rank in self._firsts]
        held_up_s = self._charged()
        workers = tuple(
            self._worker(rank, exchanges.get(rank, 0), held_up_s.get(rank, 0.0)) for rank in ranks
        )
        reasons: dict[str, int] = {}
        for worker in workers:
            for reason, count in worker.dropped_for.items():
                reasons[reason] = reasons.get(reason, 0) + count
        applied = sum(worker.applied for worker in workers)
        return SyncFigures(
            policy=policy,
            family=family,
            served=self.served,
            began=self._course.began or 0.0,
            updates=self._updates,
            parts=dict(sorted(self._parts.items())),
            pushed=sum(worker.pushed for worker in workers),
            applied=applied,
            dropped=sum(worker.dropped for worker in workers),
            dropped_for=reasons,
            age_mean=_ratio(sum(worker.age_mean * worker.applied for worker in workers), applied),
            age_most=max((worker.age_most for worker in workers), default=0),
            held_s=sum(worker.held_s for worker in workers),
            workers=workers,
            course=self.course(_FEW_STRETCHES, workers=max(ranks, default=-1) + 1),
        )

    def _worker(self, rank: int, exchanges: int, held_up_s: float) -> WorkerSync:
        part = self._workers.get(rank, _Part())
        return WorkerSync(
            rank=rank,
            pushed=part.pushed,
            applied=part.applied,
            dropped=sum(part.dropped_for.values()),
            dropped_for=dict(part.dropped_for),
            alone=part.alone,
            updates=part.updates,
            took_part=part.share_of(self._updates),
            age_mean=_ratio(sum(age * count for age, count in part.ages.items()), part.applied),
            age_most=max(part.ages, default=0),
            ages=dict(sorted(part.ages.items())),
            held_s=part.held_s,
            exchanges=exchanges,
            held_up_s=held_up_s,
        )


def _count(counts: dict[_Key, int], key: _Key) -> None:
    counts[key] = counts.get(key, 0) + 1


def _ratio(value: float, by: float) -> float:
    return value / by if by > 0 else 0.0
