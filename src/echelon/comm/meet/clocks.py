"""By how much do the clocks of the members differ? Asked as NTP does; all members take part together.

The leader sends a byte and gets one back: it left at a0 and was back at a3 by the leader's clock, arrived
at b1 and was answered at b2 by the other's. If both ways take equally long, the other clock is ahead by
((b1 - a0) + (b2 - a3)) / 2. What is not equal between the ways is an error of at most half of the round
trip, so the shortest of several counts.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from echelon.comm.meet.links import Wired
from echelon.comm.schedule.collective import Move, Schedule, ScheduleStep

_EXCHANGES = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockOffset:
    """How far a clock is ahead of the leader's, and half of the round trip that it was found by."""

    offset_s: float = 0.0
    within_s: float = 0.0


def offset_of(stamps: Sequence[tuple[float, float, float, float]]) -> ClockOffset:
    """From (a0, b1, b2, a3) of several exchanges: the one with the shortest round trip counts."""
    best = min(stamps, key=lambda each: _round_trip_s(*each))
    a0, b1, b2, a3 = best
    return ClockOffset(offset_s=((b1 - a0) + (b2 - a3)) / 2, within_s=max(0.0, _round_trip_s(*best)) / 2)


def _round_trip_s(a0: float, b1: float, b2: float, a3: float) -> float:
    return (a3 - a0) - (b2 - b1)


def measure_clocks(group: Wired, *, wall_s: float | None = None) -> list[ClockOffset]:
    """Every member's clock against the leader's, by rank; identical on all members.

    `wall_s` is the clock minus the performance counter; default: as it is now.
    """
    if group.size == 1:
        return [ClockOffset()]
    wall_s = time.time() - time.perf_counter() if wall_s is None else wall_s
    mine = torch.zeros(group.size, _EXCHANGES, 4, dtype=torch.float64)
    for peer in range(1, group.size):
        for at in range(_EXCHANGES):
            there = group.exchange(torch.zeros(1, dtype=torch.uint8), _one_way(group.rank, 0, peer))
            if group.rank == peer:
                there.wait()
            back = group.exchange(torch.zeros(1, dtype=torch.uint8), _one_way(group.rank, peer, 0))
            if group.rank in (0, peer):
                there.wait()
                back.wait()
            if group.rank == 0:
                mine[peer, at, 0] = there.timing.begun + wall_s
                mine[peer, at, 3] = back.timing.ended + wall_s
            elif group.rank == peer:
                mine[peer, at, 1] = there.timing.ended + wall_s
                mine[peer, at, 2] = back.timing.begun + wall_s
    stamps = torch.stack(group.all_gather(mine.view(-1))).sum(0)  # each has filled its own
    rows: list[list[list[float]]] = stamps.view(mine.shape).tolist()
    return [
        ClockOffset(),
        *(offset_of([(s[0], s[1], s[2], s[3]) for s in each]) for each in rows[1:]),
    ]


def _one_way(rank: int, sender: int, receiver: int) -> Schedule:
    if rank == sender:
        return [ScheduleStep(sends=(Move(receiver, 0, 1),))]
    return [ScheduleStep(takes=(Move(sender, 0, 1),))] if rank == receiver else []
