"""Who sends how much to whom in a collective? Phases of flows that go on at the same time.

A phase is repeated some times; in each repetition every flow moves a fraction of the buffer. Rings,
direct exchange, halving-doubling, butterfly, servers and hierarchies of rings have closed forms, for any
number of workers; other collectives are read from their schedules. Closed forms ignore that parts differ
by an element.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from echelon.comm.schedule.collective import COLLECTIVES, Collective, Schedule
from echelon.comm.schedule.collectives.hierarchical import Hierarchical
from echelon.comm.schedule.collectives.ps import PsCollective
from echelon.comm.schedule.fold import hosts
from echelon.errors import ConfigError

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

_READ_LENGTH = 720720  # elements: divisible by all numbers of workers up to 16


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowPhase:
    """Flows that go on at the same time, and how often: each moves a fraction of the buffer."""

    repeats: int
    senders: Ints
    receivers: Ints
    fractions: Floats
    adds: bool  # what is received is added

    def reversed(self) -> FlowPhase:
        """Results go back."""
        return FlowPhase(
            repeats=self.repeats,
            senders=self.receivers,
            receivers=self.senders,
            fractions=self.fractions,
            adds=False,
        )


Phases = tuple[FlowPhase, ...]


@lru_cache(maxsize=512)
def phases_of(collective: str, size: int) -> Phases:
    """The phases of a collective among `size` workers."""
    if size == 1:
        return ()
    built = COLLECTIVES.build(collective, where="strategy, collective")
    built.check(size)
    match built.name:
        case "ring":
            return _there_and_back([_ring(np.arange(size), 1.0)])
        case "direct":
            return _there_and_back([_to_owners(np.arange(size), np.arange(size), 1.0)])
        case "ps":
            assert isinstance(built, PsCollective)
            return _there_and_back([_to_owners(np.arange(size), np.arange(built.servers), 1.0)])
        case "halving-doubling":
            return _there_and_back(_halving(size))
        case "butterfly":
            return _butterfly(size)
    if isinstance(built, Hierarchical) and built.inner == built.outer == "ring":
        closed = _hierarchy(built, size)
        if closed is not None:
            return closed
    return _read(built, size)


def served_phases(size: int, servers: int) -> Phases:
    """Servers beside the first workers sum for all; ranks of servers follow those of the workers."""
    up = FlowPhase(
        repeats=1,
        senders=np.repeat(np.arange(size), servers),
        receivers=np.tile(np.arange(servers) + size, size),
        fractions=np.full(size * servers, 1 / servers),
        adds=True,
    )
    return up, up.reversed()


def gathered_phases(fractions: Sequence[float]) -> Phases:
    """Every worker sends its block to all others; `fractions` are the blocks' parts of all blocks."""
    size = len(fractions)
    senders = np.repeat(np.arange(size), size)
    receivers = np.tile(np.arange(size), size)
    other = senders != receivers
    return (
        FlowPhase(
            repeats=1,
            senders=senders[other],
            receivers=receivers[other],
            fractions=np.asarray(fractions, dtype=float)[senders[other]],
            adds=False,
        ),
    )


def on_members(phases: Phases, members: Sequence[int]) -> Phases:
    """The phases of some workers: positions become ranks."""
    ranks = np.asarray(members)
    return tuple(
        FlowPhase(
            repeats=phase.repeats,
            senders=ranks[phase.senders],
            receivers=ranks[phase.receivers],
            fractions=phase.fractions,
            adds=phase.adds,
        )
        for phase in phases
    )


def at_once(parts: Sequence[Phases]) -> Phases:
    """Several groups that go on at the same time, step by step."""
    most = max((sum(phase.repeats for phase in part) for part in parts), default=0)
    cuts = sorted(
        {int(cut) for part in parts for cut in np.cumsum([phase.repeats for phase in part])} | {0, most}
    )
    out = []
    for start, stop in pairwise(cuts):
        active = [found for part in parts if (found := _at(part, start)) is not None]
        out.append(
            FlowPhase(
                repeats=stop - start,
                senders=np.concatenate([phase.senders for phase in active]),
                receivers=np.concatenate([phase.receivers for phase in active]),
                fractions=np.concatenate([phase.fractions for phase in active]),
                adds=any(phase.adds for phase in active),
            )
        )
    return tuple(out)


def _at(part: Phases, step: int) -> FlowPhase | None:
    for phase in part:
        if step < phase.repeats:
            return phase
        step -= phase.repeats
    return None


def _there_and_back(there: Sequence[FlowPhase]) -> Phases:
    return (*there, *(phase.reversed() for phase in reversed(there)))


def _ring(members: Ints, whole: float) -> FlowPhase:
    """A reduce-scatter of `whole` of the buffer; reversed, the same links carry the same bytes."""
    count = len(members)
    return FlowPhase(
        repeats=count - 1,
        senders=members,
        receivers=np.roll(members, -1),
        fractions=np.full(count, whole / count),
        adds=True,
    )


def _to_owners(members: Ints, owners: Ints, whole: float) -> FlowPhase:
    senders = np.repeat(members, len(owners))
    receivers = np.tile(owners, len(members))
    other = senders != receivers
    return FlowPhase(
        repeats=1,
        senders=senders[other],
        receivers=receivers[other],
        fractions=np.full(int(other.sum()), whole / len(owners)),
        adds=True,
    )


def _halving(size: int) -> list[FlowPhase]:
    """Fold the surplus workers in, then exchange a half, a quarter, ..."""
    members = np.array(hosts(size))
    guests = np.setdiff1d(np.arange(size), members)
    found = []
    if len(guests):
        found.append(
            FlowPhase(
                repeats=1,
                senders=guests,
                receivers=guests - 1,
                fractions=np.ones(len(guests)),
                adds=True,
            )
        )
    bit = 1
    while bit < len(members):
        partners = members[np.arange(len(members)) ^ bit]
        fractions = np.full(len(members), 1 / (2 * bit))
        found.append(
            FlowPhase(repeats=1, senders=members, receivers=partners, fractions=fractions, adds=True)
        )
        bit *= 2
    return found


def _butterfly(size: int) -> Phases:
    members = np.array(hosts(size))
    halving = _halving(size)
    folding = halving[:1] if len(members) < size else []
    whole = [
        FlowPhase(
            repeats=1,
            senders=members,
            receivers=members[np.arange(len(members)) ^ (1 << bit)],
            fractions=np.ones(len(members)),
            adds=True,
        )
        for bit in range((len(members) - 1).bit_length())
    ]
    return (*folding, *whole, *(phase.reversed() for phase in folding))


def _hierarchy(built: Hierarchical, size: int) -> Phases | None:
    """Rings inside groups, then along the rails, then inside; None if groups are unequal."""
    sizes = built.group_sizes(size)
    if len(sizes) == 1:
        return _there_and_back([_ring(np.arange(size), 1.0)])
    if not built.rails or len(set(sizes)) > 1:
        return None
    count, members = len(sizes), sizes[0]
    ranks = np.arange(size).reshape(count, members)
    down: list[FlowPhase] = []
    if members > 1:
        rings = [_ring(group, 1.0) for group in ranks]
        down = list(at_once([(ring,) for ring in rings]))
    rails = [_ring(ranks[:, rail], 1 / members) for rail in range(members)]
    across = list(at_once([(rail,) for rail in rails]))
    return _there_and_back([*down, *across])


@dataclass(slots=True)
class _Level:
    senders: list[int]
    receivers: list[int]
    fractions: list[float]
    adds: bool = False


def _read(collective: Collective, size: int) -> Phases:
    """From the schedules: steps that depend on as many steps before are one phase."""
    length = _READ_LENGTH
    schedules = [collective.schedule(rank, size, length) for rank in range(size)]
    levels: dict[int, _Level] = {}
    for rank, at, level in _levels(schedules):
        step = schedules[rank][at]
        held = levels.setdefault(level, _Level([], [], []))
        for move in step.sends:
            held.senders.append(rank)
            held.receivers.append(move.peer)
            held.fractions.append(move.length / length)
        held.adds = held.adds or bool(step.adds)
    return tuple(
        FlowPhase(
            repeats=1,
            senders=np.array(held.senders, dtype=np.int64),
            receivers=np.array(held.receivers, dtype=np.int64),
            fractions=np.array(held.fractions),
            adds=held.adds,
        )
        for _, held in sorted(levels.items())
        if held.senders
    )


def _levels(schedules: Sequence[Schedule]) -> list[tuple[int, int, int]]:
    """Rank, step and level: one more than the step before, and no less than its senders' steps."""
    sent: dict[tuple[int, int], deque[int]] = {}
    for rank, schedule in enumerate(schedules):
        for at, step in enumerate(schedule):
            for move in step.sends:
                sent.setdefault((rank, move.peer), deque()).append(at)
    awaited = [
        [[(m.peer, sent[m.peer, rank].popleft()) for m in (*step.adds, *step.takes)] for step in schedule]
        for rank, schedule in enumerate(schedules)
    ]
    level: dict[tuple[int, int], int] = {}
    waiting = {rank: 0 for rank, schedule in enumerate(schedules) if schedule}
    # Steps may wait for each other's sends: a step has begun before its receives have arrived.
    while waiting:
        for rank, at in waiting.items():
            before = level[rank, at - 1] + 1 if at else 0
            level[rank, at] = max(level.get((rank, at), 0), before)
        moved = _settled(waiting, awaited, level, schedules)
        if not moved:
            raise ConfigError("the schedules deadlock", where="collective", fix="repair the collective")
    return [(rank, at, found) for (rank, at), found in level.items()]


def _settled(
    waiting: dict[int, int],
    awaited: Sequence[Sequence[Sequence[tuple[int, int]]]],
    level: dict[tuple[int, int], int],
    schedules: Sequence[Schedule],
) -> bool:
    """Let every step whose senders have begun end; says whether any did."""
    ready = [rank for rank, at in waiting.items() if all(sender in level for sender in awaited[rank][at])]
    for rank in ready:
        at = waiting[rank]
        level[rank, at] = max([level[rank, at], *(level[sender] for sender in awaited[rank][at])])
        if at + 1 < len(schedules[rank]):
            waiting[rank] = at + 1
        else:
            del waiting[rank]
    return bool(ready)
