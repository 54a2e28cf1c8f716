"""Measures the links between the members of a group; all members take part together.

For shifts d = 1, 2, 4, ... below the number of members, every member talks to the member d ranks further,
all at the same time. Flows that share an uplink therefore show the bandwidth that each of them gets.

Latency is half of the shortest of a few round trips of one byte, including the software cost of a step.

The receiver measures bandwidth. It asks for two messages, one right behind the other, and times the second,
from the end of the first: by then the first has emptied token buckets and opened TCP windows, and it does
not matter who began when. Each link has its own operation, so that a slow outgoing link does not look like
a slow incoming one. The second message doubles from 256 KiB until it takes 20 ms on all links, or reaches 8
MiB; the result is the median of the last three rates. The measurement stops after a message that takes 0.1
s on any link. Links much faster than the slowest one are then known only roughly, and are overestimated.

Duration: about 0.3 s for 8 workers at 1 Gb/s (1 s where 2 cores emulate all of them). At 10 Mb/s, 0.4 s per
shift times the number of flows that share a link; no shift starts after 1 s. That is less than 2 s for 8
workers with such links, or for two sites on one such uplink. The result omits pairs whose shift was
skipped; it always contains neighbours.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from echelon.comm.future import Future
from echelon.comm.group import Op
from echelon.comm.schedule.collective import Move, Schedule, ScheduleStep
from echelon.comm.schedule.cost import LinkCost

Pair = tuple[int, int]  # sender's rank, receiver's rank

_ROUND_TRIPS = 8
_OPENING_BYTES = 256 << 10  # more than token buckets usually hold
_FIRST_BYTES = 256 << 10
_MOST_BYTES = 8 << 20
_LONG_ENOUGH_S = 20e-3
_LONG_S = 100e-3
_COUNTED = 3
_LAST_BEGIN_S = 1.0
_SHORTEST_S = 1e-6  # clock resolution; avoids a division by zero


class Wired(Protocol):
    """A group that can run any schedule; all members call `exchange` in the same order."""

    rank: int
    size: int

    def exchange(self, flat: Tensor, schedule: Schedule, *, priority: int = 0) -> Future[Tensor]:
        """Run this member's schedule on a flat buffer, in the background. An empty one ends at once."""

    def all_reduce(self, tensor: Tensor, op: Op = "sum", *, priority: int = 0) -> Future[Tensor]:
        """As `Group.all_reduce`."""

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """As `Group.all_gather`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """Measured latencies and bandwidths, identical on all members."""

    size: int
    latency_s: Mapping[Pair, float]
    bytes_per_s: Mapping[Pair, float]

    @property
    def slowest(self) -> LinkCost:
        """The longest latency and the lowest bandwidth between neighbours, whose links a ring uses."""
        ring = [(rank, (rank + 1) % self.size) for rank in range(self.size)] if self.size > 1 else []
        return LinkCost(
            latency_s=max((self.latency_s[pair] for pair in ring), default=0.0),
            seconds_per_byte=max((1 / self.bytes_per_s[pair] for pair in ring), default=0.0),
        )


def measure(group: Wired, *, last_begin_s: float = _LAST_BEGIN_S) -> Links:
    """Measure the links of a group. All members call this together, and end with identical numbers.

    No shift starts after `last_begin_s`.
    """
    begun = time.perf_counter()
    shifts: list[int] = []
    found: list[float] = []
    spent_s = 0.0
    while 1 << len(shifts) < group.size and spent_s < last_begin_s:
        shifts.append(1 << len(shifts))
        found += [_latency_s(group, shifts[-1]), _bytes_per_s(group, shifts[-1])]
        spent_s, _ = _extremes(group, time.perf_counter() - begun)
    if not shifts:
        return Links(size=group.size, latency_s={}, bytes_per_s={})
    rows = [row.tolist() for row in group.all_gather(torch.tensor(found, dtype=torch.float64))]
    return gathered(shifts, rows)


def gathered(shifts: list[int], rows: list[list[float]]) -> Links:
    """Combine the rows that the members measured, by rank.

    Per shift, a row holds the latency to the member `shift` ranks further and the rate from the member
    `shift` ranks before. A latency is half a round trip, so it holds for both directions.
    """
    size = len(rows)
    latency_s: dict[Pair, float] = {}
    bytes_per_s: dict[Pair, float] = {}
    for at, shift in enumerate(shifts):
        for rank, row in enumerate(rows):
            after, before = (rank + shift) % size, (rank - shift) % size
            for pair in ((rank, after), (after, rank)):
                latency_s[pair] = min(row[2 * at], latency_s.get(pair, row[2 * at]))
            bytes_per_s[before, rank] = row[2 * at + 1]
    return Links(size=size, latency_s=latency_s, bytes_per_s=bytes_per_s)


def _latency_s(group: Wired, shift: int) -> float:
    """Send one byte to the member `shift` ranks further and get one back, while answering another member.

    A late start does not distort the result: the reply is sent only after the request has arrived.
    """
    after, before = (group.rank + shift) % group.size, (group.rank - shift) % group.size
    there = ScheduleStep(sends=(Move(after, 0, 1),), takes=(Move(before, 1, 2),))
    back = ScheduleStep(sends=(Move(before, 1, 2),), takes=(Move(after, 2, 3),))
    round_trips_s = []
    for _ in range(_ROUND_TRIPS):
        pending = group.exchange(torch.zeros(3, dtype=torch.uint8), [there, back])
        pending.wait()
        timing = pending.timing
        round_trips_s.append(timing.ended - timing.begun)
    return max(_SHORTEST_S, min(round_trips_s) / 2)


def _bytes_per_s(group: Wired, shift: int) -> float:
    """The rate of the link from the member `shift` ranks before."""
    length = _FIRST_BYTES
    rates: list[float] = []
    while True:
        taken_s = _receive_s(group, shift, length)
        rates.append(length / taken_s)
        longest_s, shortest_s = _extremes(group, taken_s)
        enough = shortest_s >= _LONG_ENOUGH_S and len(rates) >= _COUNTED
        if enough or longest_s >= _LONG_S or length >= _MOST_BYTES:
            return statistics.median(rates[-_COUNTED:])
        length *= 2


def _receive_s(group: Wired, shift: int, length: int) -> float:
    """Time to receive a message of that length right behind another one."""
    # One buffer serves all: it holds only ones, so incoming data does not change outgoing data.
    ones = torch.ones(max(length, _OPENING_BYTES), dtype=torch.uint8)
    pending: dict[tuple[int, bool], Future[Tensor]] = {}
    for senders in _at_once(group.size, shift):
        for opening, count in ((True, _OPENING_BYTES), (False, length)):
            for sender in senders:
                steps = asked_for(group.rank, sender, (sender + shift) % group.size, count)
                pending[sender, opening] = group.exchange(ones, steps, priority=0 if opening else 1)
        for each in pending.values():
            each.wait()
    mine = (group.rank - shift) % group.size
    taken_s = pending[mine, False].timing.ended - pending[mine, True].timing.ended
    return max(_SHORTEST_S, taken_s)


def _at_once(size: int, shift: int) -> list[range]:
    """The groups of senders that send at the same time: all, unless pairs would send to each other.

    Such pairs take turns, so that one member's request does not wait behind the other's reply.
    """
    return [range(shift), range(shift, size)] if 2 * shift == size else [range(size)]


def asked_for(rank: int, sender: int, receiver: int, length: int) -> Schedule:
    """The receiver requests `length` bytes with one byte; all other members do nothing."""
    if rank == receiver:
        return [ScheduleStep(sends=(Move(sender, 0, 1),)), ScheduleStep(takes=(Move(sender, 0, length),))]
    if rank == sender:
        return [
            ScheduleStep(takes=(Move(receiver, 0, 1),)),
            ScheduleStep(sends=(Move(receiver, 0, length),)),
        ]
    return []


def _extremes(group: Wired, seconds: float) -> tuple[float, float]:
    """The largest and the smallest number over all members, so that all of them decide alike."""
    both = torch.tensor([seconds, -seconds], dtype=torch.float64)
    longest, shortest = group.all_reduce(both, "max").wait().tolist()
    return longest, -shortest
