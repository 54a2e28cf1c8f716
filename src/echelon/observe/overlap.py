"""How much of communication was hidden behind computation, and how far a step was from its limit.

Of one worker's step:

    communication   the time in which at least one of its buckets was in flight
    exposed         the part of it for which its trainer waited
    hidden          1 - exposed / communication, of the medians
    wire limit      the bytes it sent, divided by the rate of its slowest measured link

A faster link cannot shorten the waiting for late workers, so time in flight while the worker waited for
late ones (see arrival.py) counts in neither. Where a group does not report when buckets were in flight,
communication is unknown, and exposed is the whole wait for buckets but for late workers.

Figures of a run are medians over its last rounds that all workers reported; the first is left out as
warm-up if there are more than three. No step can be shorter than its limit: the largest of all workers'
(median) compute times and wire limits. A worker's distance is its (median) step divided by the limit; that
of the run is the largest. The limit is set by one worker's compute time or by one link.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal, TypeAlias

import msgspec

from echelon.observe.arrival import Basis, ObservedRound, late_at_round
from echelon.observe.events import BucketReduced, LinkMeasured, StepEnded
from echelon.observe.spans import length_s

Interval: TypeAlias = tuple[float, float]

_LAST_ROUNDS = 1000  # bounds the memory of a long run
_WARM_UP_ABOVE = 3
_SHORTEST_S = 1e-9


class WorkerCommunication(msgspec.Struct, frozen=True, kw_only=True):
    """One worker's median step; None means unknown. Its slowest link leads to `peer`."""

    rank: int
    communication_s: float | None
    exposed_s: float
    late_s: float
    hidden: float | None
    sent_bytes: int
    compute_s: float
    wire_limit_s: float | None
    distance: float | None
    peer: int | None
    bytes_per_s: float | None
    step_s: float = 0.0


class Communication(msgspec.Struct, frozen=True, kw_only=True):
    """The whole run's figures; `rank` sets the limit, by its compute time or by its slowest link."""

    rounds: int
    hidden: float | None
    limit_s: float
    distance: float | None
    limited_by: Literal["compute", "link"]
    rank: int
    workers: tuple[WorkerCommunication, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """The buckets of one worker's step: how long the trainer waited, and when they were in flight.

    `flights` is None if unknown.
    """

    flights: tuple[Interval, ...] | None = None
    waited_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class StepFigures:
    """One worker's step, by the module's definitions."""

    communication_s: float | None
    exposed_s: float
    late_s: float
    sent_bytes: int
    compute_s: float
    wire_limit_s: float | None
    length_s: float


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """The union of the intervals, in order, as disjoint intervals."""
    apart: list[Interval] = []
    for begin, end in sorted(intervals):
        if apart and begin <= apart[-1][1]:
            apart[-1] = (apart[-1][0], max(apart[-1][1], end))
        else:
            apart.append((begin, end))
    return apart


def in_flight(buckets: Iterable[BucketReduced]) -> list[Interval]:
    """When at least one of these buckets was in flight, as far as is known."""
    return merged((b.begun, b.ended) for b in buckets if 0 < b.begun < b.ended)


def traffic(buckets: Sequence[BucketReduced]) -> Traffic:
    """Sum these buckets, which are of one worker's step."""
    known = any(bucket.begun for bucket in buckets)
    return Traffic(
        flights=tuple(in_flight(buckets)) if known else None,
        waited_s=sum(bucket.wait_s for bucket in buckets),
    )


def hidden_share(exposed_s: float, communication_s: float | None) -> float | None:
    """From 0 to 1; None without communication."""
    return min(1.0, max(0.0, 1 - exposed_s / communication_s)) if communication_s else None


def _length_s(intervals: Iterable[Interval]) -> float:
    return sum(end - begin for begin, end in intervals)


def _within_s(intervals: Iterable[Interval], begin: float, end: float) -> float:
    """How much of these disjoint intervals is between two instants."""
    return sum(max(0.0, min(until, end) - max(since, begin)) for since, until in intervals)


def slowest_links(links: Iterable[LinkMeasured]) -> dict[int, LinkMeasured]:
    """Each worker's slowest link, by the latest measurement of each link."""
    latest = {(link.rank, link.peer): link for link in links}
    slowest: dict[int, LinkMeasured] = {}
    for (rank, _), link in sorted(latest.items()):
        if not 0 < link.bytes_per_s < math.inf:
            continue
        if rank not in slowest or link.bytes_per_s < slowest[rank].bytes_per_s:
            slowest[rank] = link
    return slowest


def figures(
    round_: ObservedRound,
    traffics: Mapping[int, Traffic],
    links: Mapping[int, LinkMeasured],
    by: Basis = "arrival",
) -> dict[int, StepFigures]:
    """Each worker's step of this round, by rank; `links` has each worker's slowest link, if known."""
    late = late_at_round(round_, by)
    of_rank = {}
    for rank, step in round_.workers.items():
        went = traffics.get(rank, Traffic())
        link = links.get(rank)
        late_s = min(late[rank], went.waited_s)
        exposed_s = went.waited_s - late_s
        communication_s = None
        if went.flights is not None:
            # Buckets may have been in flight, or not, while it waited for late workers. If they were
            # deferred, it is not known when it waited.
            flown_s = _length_s(went.flights)
            in_vain_s = _within_s(went.flights, step.arrival, step.arrival + late_s)
            communication_s = flown_s - (min(late_s, flown_s) if round_.deferred else in_vain_s)
            exposed_s = min(exposed_s, communication_s)
        of_rank[rank] = StepFigures(
            communication_s=communication_s,
            exposed_s=exposed_s,
            late_s=late_s,
            sent_bytes=step.sent_bytes,
            compute_s=step.compute_s,
            wire_limit_s=step.sent_bytes / link.bytes_per_s if link is not None else None,
            length_s=length_s(step),
        )
    return of_rank


def overall(
    rounds: Sequence[Mapping[int, StepFigures]], links: Mapping[int, LinkMeasured]
) -> Communication | None:
    """The medians of these rounds, which must be in order; None without rounds."""
    if len(rounds) > _WARM_UP_ABOVE:
        rounds = rounds[1:]
    if not rounds:
        return None
    ranks = sorted({rank for round_ in rounds for rank in round_})
    workers = [_worker(rank, rounds, links.get(rank)) for rank in ranks]
    slowest = max(workers, key=lambda worker: worker.compute_s)
    narrowest = max(workers, key=lambda worker: worker.wire_limit_s or 0.0)
    by_link = (narrowest.wire_limit_s or 0.0) > slowest.compute_s
    limit_s = max(slowest.compute_s, narrowest.wire_limit_s or 0.0)
    placed = tuple(
        msgspec.structs.replace(worker, distance=_ratio(worker.step_s, limit_s)) for worker in workers
    )
    return Communication(
        rounds=len(rounds),
        hidden=_hidden_by_all(workers),
        limit_s=limit_s,
        distance=max((worker.distance for worker in placed if worker.distance is not None), default=None),
        limited_by="link" if by_link else "compute",
        rank=narrowest.rank if by_link else slowest.rank,
        workers=placed,
    )


def _worker(
    rank: int, rounds: Sequence[Mapping[int, StepFigures]], link: LinkMeasured | None
) -> WorkerCommunication:
    """One worker's medians; its distance follows when the limit is known."""
    steps = [round_[rank] for round_ in rounds if rank in round_]
    communication_s = _middle([step.communication_s for step in steps])
    exposed_s = median(
        step.exposed_s for step in steps if (step.communication_s is None) == (communication_s is None)
    )
    return WorkerCommunication(
        rank=rank,
        communication_s=communication_s,
        exposed_s=exposed_s,
        late_s=median(step.late_s for step in steps),
        hidden=hidden_share(exposed_s, communication_s),
        sent_bytes=round(median(step.sent_bytes for step in steps)),
        compute_s=median(step.compute_s for step in steps),
        wire_limit_s=_middle([step.wire_limit_s for step in steps]),
        distance=None,
        peer=link.peer if link is not None else None,
        bytes_per_s=link.bytes_per_s if link is not None else None,
        step_s=median(step.length_s for step in steps),
    )


def _hidden_by_all(workers: Iterable[WorkerCommunication]) -> float | None:
    known = [(w.exposed_s, w.communication_s) for w in workers if w.communication_s]
    return hidden_share(sum(exposed_s for exposed_s, _ in known), sum(s for _, s in known))


def _middle(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def _ratio(value: float, by: float) -> float | None:
    """The quotient; None if the divisor is too short to be measured."""
    return value / by if by > _SHORTEST_S else None


class TrafficTally:
    """Takes the events of a run one by one, each worker's in order; `communication` gives the figures."""

    def __init__(self) -> None:
        self._links: dict[tuple[int, int], LinkMeasured] = {}
        self._buckets: dict[int, list[BucketReduced]] = {}
        self._steps: dict[int, dict[int, Traffic]] = {}
        self._rounds: deque[tuple[ObservedRound, dict[int, Traffic]]] = deque(maxlen=_LAST_ROUNDS)

    def link(self, event: LinkMeasured) -> None:
        """Record a measured link."""
        self._links[event.rank, event.peer] = event

    def bucket(self, event: BucketReduced) -> None:
        """Record a bucket of a step that has not ended."""
        self._buckets.setdefault(event.rank, []).append(event)

    def step(self, event: StepEnded) -> None:
        """Record the end of a worker's step; sums its buckets."""
        own = [bucket for bucket in self._buckets.pop(event.rank, []) if bucket.step == event.step]
        if own:
            self._steps.setdefault(event.step, {})[event.rank] = traffic(own)

    def round(self, round_: ObservedRound) -> None:
        """Record a step that all workers have reported."""
        traffics = self._steps.pop(round_.step, None)
        if traffics:
            self._rounds.append((round_, traffics))

    def communication(self, by: Basis, more: Sequence[ObservedRound] = ()) -> Communication | None:
        """The figures so far, including the rounds in `more`; None without buckets."""
        late = [(round_, self._steps[round_.step]) for round_ in more if round_.step in self._steps]
        rounds = sorted([*self._rounds, *late], key=lambda known: known[0].step)
        links = slowest_links(self._links.values())
        return overall([figures(round_, went, links, by) for round_, went in rounds], links)
