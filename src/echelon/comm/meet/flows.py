"""How fast do bytes flow between the members of a group: one flow alone, and several at the same time?

All members call `measure_flows` together, and end with identical figures.

latency  All pairs in rounds of disjoint pairs: half of the shortest of a few round trips of one byte.
alone    One flow after the other: two that cross the same uplink would each show half of its rate,
         whoever they belong to. The receiver asks for five messages, one right behind the other. The first
         empties token buckets and opens TCP windows, as in links.py; the rate is the median of those
         between any two of the five ends, because a process that waits for a core sees one end late. When
         it has them, it passes the turn to the next receiver. Flows go by shifts, from every member to the
         member d ranks further; after each shift all members learn all rates, and agree on the lengths of
         the next messages: 7 ms at a rate between the lowest and the highest that are known of either end.
         Then doubtful ones are measured again, for 20 ms at their own rate: those that were too short, or
         slower than back; then, as long as there is time, all others.
together Sets of flows that the caller proposes, at the same time: what they share shows.

Up to 16 members all pairs are measured both ways. Beyond, 15 shifts are: 1, 2, 4, ... and further ones,
evenly spread, and then the pairs that `further` asks for. No shift and no set begins after its part of
`limit_s`, so that links below about 10 Mb/s, or very many members, leave pairs out. A shift that has begun
is finished.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from statistics import median, median_high

import torch
from torch import Tensor

from echelon.comm.future import Future
from echelon.comm.meet.links import Pair, Wired, asked_for
from echelon.comm.schedule.collective import Move, Schedule, ScheduleStep

ALL_PAIRS = 16
_ROUND_TRIPS = 6
_MOST_ROUNDS = 63  # of latencies, beyond 64 members
_FIRST = (64 << 10, *(32 << 10,) * 4)  # bytes of the messages while nothing is known
_OPENING_S = 4e-3
_MESSAGES = 4
_MESSAGE_S = 1.75e-3
_REPEATED_S = 5e-3
_TOGETHER_S = 40e-3
_ATTEMPTS = 4
_DOUBTFUL_FIRST = 2  # attempts at what is doubtful, before the others
_BACK = 0.8  # of the rate back: a lower one is doubtful
_OPENING_BYTES = (16 << 10, 1 << 20)  # at least and at most
_MESSAGE_BYTES = (16 << 10, 8 << 20)
_SHORTEST_S = 1e-6  # clock resolution; avoids a division by zero
# When the last shift, repetition and set begins, as parts of the limit. All pairs once come first.
_ALONE, _AGAIN, _TOGETHER = 0.8, 0.8, 1.0

Propose = Callable[[Mapping[Pair, float], Mapping[Pair, float]], Iterable[Sequence[Pair]]]
Further = Callable[[Mapping[Pair, float], Mapping[Pair, float]], Sequence[Pair]]
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Together:
    """Flows at the same time, and the rate that each of them got."""

    flows: tuple[Pair, ...]
    bytes_per_s: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowRates:
    """What was measured, identical on all members. Pairs that are missing were not measured."""

    size: int
    latency_s: Mapping[Pair, float] = field(default_factory=dict)
    bytes_per_s: Mapping[Pair, float] = field(default_factory=dict)
    together: tuple[Together, ...] = ()
    took_s: float = 0.0

    @property
    def complete(self) -> bool:
        """Whether every member was measured with every other one, both ways."""
        return len(self.bytes_per_s) == self.size * (self.size - 1)


def measure_flows(
    group: Wired,
    *,
    limit_s: float = 4.0,
    further: Further | None = None,
    propose: Propose | None = None,
    say: Say | None = None,
) -> FlowRates:
    """Measure the links of a group.

    limit_s  when the last measurement begins, in seconds
    further  which flows to measure alone next, if not all pairs were; none: enough is known
    propose  which flows to measure at the same time, from the latencies and the rates of pairs; default:
             some rounds of disjoint pairs
    say      is told what is measured now
    """
    begun = time.perf_counter()
    if group.size == 1:
        return FlowRates(size=1)
    say = say or _silent
    say(f"latency between {group.size} workers")
    latency_s = _latencies(group)
    table = _Table(group.size)
    order = shifts(group.size)
    spent_s = _agreed_s(group, begun)
    for at, shift in enumerate(order):
        if at and spent_s > _ALONE * limit_s:
            break
        say(f"rates of one flow at a time, {at + 1} of {len(order)} shifts")
        _measure_shift(group, table, shifted(group.size, shift))
        spent_s = _agreed_s(group, begun)
    while further is not None and len(table.bytes_per_s) < group.size * (group.size - 1):
        flows = [] if spent_s > _ALONE * limit_s else further(latency_s, table.bytes_per_s)
        unknown = [flow for flow in flows if flow not in table.bytes_per_s]
        if not unknown:
            break
        say(f"rates of one flow at a time, {len(unknown)} further pairs")
        _measure_shift(group, table, unknown)
        spent_s = _agreed_s(group, begun)
    for attempt in range(_ATTEMPTS):
        for again in table.again(order, attempt):
            if again and spent_s <= _AGAIN * limit_s:
                say(f"rates again, with several messages: {len(again)} flows")
                _measure_shift(group, table, again)
                spent_s = _agreed_s(group, begun)
    sets: list[Together] = []
    wanted = (propose or disjoint_sets)(latency_s, table.bytes_per_s)
    for flows in wanted:
        if spent_s > _TOGETHER * limit_s:
            break
        say(f"{len(flows)} flows at the same time, set {len(sets) + 1}")
        sets.append(_measure_together(group, table, flows))
        spent_s = _agreed_s(group, begun)
    return FlowRates(
        size=group.size,
        latency_s=latency_s,
        bytes_per_s=dict(table.bytes_per_s),
        together=tuple(sets),
        took_s=_agreed_s(group, begun),
    )


# Which pairs, in which order: pure.


def shifts(size: int) -> list[int]:
    """The shifts to measure, powers of two first: all up to 16 members, else 15."""
    powers = [1 << bit for bit in range(size.bit_length()) if 1 << bit < size]
    others = [shift for shift in range(1, size) if shift not in powers]
    room = max(0, ALL_PAIRS - 1 - len(powers))
    if size > ALL_PAIRS and others:
        others = sorted({others[(2 * at + 1) * len(others) // (2 * room)] for at in range(room)})
    return powers + others


def shifted(size: int, shift: int) -> list[Pair]:
    """The flows from every member to the one `shift` ranks further, by receiver."""
    return [((receiver - shift) % size, receiver) for receiver in range(size)]


def disjoint_rounds(size: int) -> list[list[Pair]]:
    """All pairs in rounds in which nobody has two partners: the circle method."""
    places = [*range(size), *([-1] if size % 2 else [])]
    count = len(places)
    out = []
    for _ in range(count - 1):
        pairs = [(places[at], places[count - 1 - at]) for at in range(count // 2)]
        out.append([(min(pair), max(pair)) for pair in pairs if -1 not in pair])
        places = [places[0], places[-1], *places[1:-1]]
    return out


def disjoint_sets(
    latency_s: Mapping[Pair, float], bytes_per_s: Mapping[Pair, float], most: int = 6
) -> list[list[Pair]]:
    """Rounds of disjoint pairs, as far as their pairs were measured; of many, some, evenly spread."""
    size = 1 + max(max(pair) for pair in latency_s)
    found = [
        [pair for pair in pairs if pair in bytes_per_s] for pairs in disjoint_rounds(size) if len(pairs) > 1
    ]
    found = [pairs for pairs in found if len(pairs) > 1]
    if len(found) <= most:
        return found
    return [found[at * len(found) // most] for at in range(most)]


class _Table:
    """What is known of every flow, alike on all members."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.bytes_per_s: dict[Pair, float] = {}
        self._short: dict[Pair, bool] = {}
        self._rates: dict[Pair, list[float]] = {}

    def lengths(self, flow: Pair) -> list[int]:
        """The bytes of the messages of a flow alone: the opening one, and those that are timed."""
        rate = self.bytes_per_s.get(flow)
        seconds = _MESSAGE_S if rate is None else _REPEATED_S
        if rate is None:
            known = [rate for pair, rate in self.bytes_per_s.items() if set(pair) & set(flow)]
            if not known:
                return [*_FIRST]
            rate = math.sqrt(min(known) * max(known))  # neither too long nor too short, whichever it is
        opening = _clamped(rate * _OPENING_S, _OPENING_BYTES)
        return [opening, *[_clamped(rate * seconds, _MESSAGE_BYTES)] * _MESSAGES]

    def learn(self, flow: Pair, lengths: Sequence[int], seconds: float) -> None:
        """From the typical seconds of a message; of several measurements, the median."""
        rate = lengths[1] / max(_SHORTEST_S, seconds)
        again = flow in self.bytes_per_s
        expected_s = _REPEATED_S if again else _MESSAGE_S
        self._short[flow] = seconds < expected_s / 2 and lengths[1] < _MESSAGE_BYTES[1]
        if again and not self._short[flow]:
            self._rates.setdefault(flow, []).append(rate)
        self.bytes_per_s[flow] = median_high(self._rates.get(flow, [rate]))

    def again(self, order: Sequence[int], attempt: int) -> Iterable[list[Pair]]:
        """What to measure again, shift by shift, and then what is in none of them."""
        by_shift = [shifted(self.size, shift) for shift in order]
        inside = {flow for flows in by_shift for flow in flows}
        for flows in (*by_shift, [flow for flow in self.bytes_per_s if flow not in inside]):
            yield [flow for flow in flows if self.wants(flow, attempt)]

    def wants(self, flow: Pair, attempt: int) -> bool:
        """Whether to measure it again: what is doubtful, twice; then what was measured only once."""
        if flow not in self.bytes_per_s:
            return False
        if attempt == _DOUBTFUL_FIRST:
            return flow not in self._rates
        back = self.bytes_per_s.get((flow[1], flow[0]), 0.0)
        return self._short[flow] or self.bytes_per_s[flow] < _BACK * back


def _clamped(count: float, limits: tuple[int, int]) -> int:
    return int(min(max(count, limits[0]), limits[1]))


# Measuring.


def _latencies(group: Wired) -> dict[Pair, float]:
    """Half of the shortest round trip of every pair. The one with the lower rank measures."""
    rounds = disjoint_rounds(group.size)
    step = -(-len(rounds) // _MOST_ROUNDS)
    pairs = [pair for each in rounds[::step] for pair in each]
    partners = {pair[0] + pair[1] - group.rank: at for at, pair in enumerate(pairs) if group.rank in pair}
    found = torch.zeros(len(pairs), dtype=torch.float64)
    pending: list[Future[Tensor]] = []
    for each in rounds[::step]:
        mine = next((pair for pair in each if group.rank in pair), None)
        for _ in range(_ROUND_TRIPS):
            future = group.exchange(torch.zeros(2, dtype=torch.uint8), _ping(group.rank, mine))
            if mine is None or group.rank != mine[0]:
                pending.append(future)
                continue
            future.wait()
            at = partners[mine[1]]
            trip_s = future.timing.ended - future.timing.begun
            found[at] = min(trip_s, float(found[at]) or trip_s)
    for future in pending:
        future.wait()
    group.all_reduce(found, "max").wait()
    out: dict[Pair, float] = {}
    for (one, other), trip_s in zip(pairs, found.tolist(), strict=True):
        out[one, other] = out[other, one] = max(_SHORTEST_S, trip_s / 2)
    return out


def _ping(rank: int, pair: Pair | None) -> Schedule:
    if pair is None:
        return []
    first, second = pair
    if rank == first:
        return [ScheduleStep(sends=(Move(second, 0, 1),)), ScheduleStep(takes=(Move(second, 1, 2),))]
    return [ScheduleStep(takes=(Move(first, 0, 1),)), ScheduleStep(sends=(Move(first, 0, 1),))]


def _measure_shift(group: Wired, table: _Table, flows: Sequence[Pair]) -> None:
    """One flow after the other; afterwards all members know all of them."""
    lengths = {flow: table.lengths(flow) for flow in flows}
    took_s = torch.zeros(len(flows), dtype=torch.float64)
    pending: list[Future[Tensor]] = []
    for at, flow in enumerate(flows):
        receiver = flow[1]
        if at and flows[at - 1][1] != receiver:
            turn = group.exchange(
                torch.zeros(1, dtype=torch.uint8), _pass_on(group.rank, flows[at - 1][1], receiver)
            )
            if group.rank == receiver:
                turn.wait()
            else:
                pending.append(turn)
        messages = _messages(group, flow, lengths[flow])
        if group.rank == receiver:
            took_s[at] = _message_s(messages)
        else:
            pending += messages
    for future in pending:
        future.wait()
    group.all_reduce(took_s, "max").wait()
    for flow, seconds in zip(flows, took_s.tolist(), strict=True):
        table.learn(flow, lengths[flow], seconds)


def _measure_together(group: Wired, table: _Table, flows: Sequence[Pair]) -> Together:
    """All at once: they begin behind a barrier, with messages that would take equally long alone."""
    took_s = torch.zeros(len(flows), dtype=torch.float64)
    lengths = []
    _agreed_s(group, time.perf_counter())
    started = []
    for flow in flows:
        alone = table.bytes_per_s.get(flow, 0.0)
        lengths.append(_clamped(alone * _TOGETHER_S, _MESSAGE_BYTES))
        started.append(_messages(group, flow, [table.lengths(flow)[0], lengths[-1]]))
    for at, (flow, messages) in enumerate(zip(flows, started, strict=True)):
        seconds = _message_s(messages)
        if group.rank == flow[1]:
            took_s[at] = seconds
    group.all_reduce(took_s, "max").wait()
    rates = [length / max(_SHORTEST_S, s) for length, s in zip(lengths, took_s.tolist(), strict=True)]
    return Together(flows=tuple(flows), bytes_per_s=tuple(rates))


def _messages(group: Wired, flow: Pair, lengths: Sequence[int]) -> list[Future[Tensor]]:
    """The receiver asks for all of them at once; all others but the sender do nothing."""
    # One buffer serves all: it holds only ones, so incoming data does not change outgoing data.
    ones = torch.ones(max(lengths) if group.rank in flow else 1, dtype=torch.uint8)
    return [
        group.exchange(ones, asked_for(group.rank, *flow, length), priority=at)
        for at, length in enumerate(lengths)
    ]


def _message_s(messages: Sequence[Future[Tensor]]) -> float:
    """The seconds of one message, of those behind the first, which all have the same length."""
    for future in messages:
        future.wait()
    return typical_s([future.timing.ended for future in messages])


def typical_s(ends: Sequence[float]) -> float:
    """The seconds between two ends in a row: the median over any two (the estimator of Theil and Sen)."""
    between = [(ends[b] - ends[a]) / (b - a) for a, b in combinations(range(len(ends)), 2)]
    return max(_SHORTEST_S, median(between))


def _pass_on(rank: int, before: int, now: int) -> Schedule:
    """One byte from the receiver before to the receiver now: it is its turn."""
    if rank == before:
        return [ScheduleStep(sends=(Move(now, 0, 1),))]
    return [ScheduleStep(takes=(Move(before, 0, 1),))] if rank == now else []


def _agreed_s(group: Wired, begun: float) -> float:
    """The seconds since the beginning, of the member that is furthest: all decide alike."""
    spent = torch.tensor([time.perf_counter() - begun], dtype=torch.float64)
    return float(group.all_reduce(spent, "max").wait())


def _silent(text: str) -> None:
    """Tells nobody."""
