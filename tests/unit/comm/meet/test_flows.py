"""Flows are measured alone and together, identically on all members; clocks against the leader's."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import combinations, pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from echelon.comm.meet import flows
from echelon.comm.meet.clocks import ClockOffset, measure_clocks, offset_of
from echelon.comm.meet.flows import (
    disjoint_rounds,
    disjoint_sets,
    measure_flows,
    shifted,
    shifts,
    typical_s,
)
from wires import Wires


class OnSockets:
    """A member of a group of threads with real sockets between them."""

    def __init__(self, wires: Wires, rank: int) -> None:
        self.rank = rank
        self.size = wires.size
        self._wires = wires
        self._count = 0

    def exchange(self, flat, schedule, *, priority=0):
        self._count += 1
        exchange = self._wires.make(self.rank, flat, schedule, number=self._count, priority=priority)
        self._wires.loops[self.rank].submit(exchange)
        return exchange.future

    def all_reduce(self, tensor, op="sum", *, priority=0):
        self._count += 1
        return self._wires.start(self.rank, tensor, number=self._count, op=op).future

    def all_gather(self, tensor):
        rows = torch.zeros(self.size, len(tensor), dtype=tensor.dtype)
        rows[self.rank] = tensor
        self.all_reduce(rows.view(-1)).wait()
        return list(rows)


def _on_all(size, function):
    with Wires(size) as wires, ThreadPoolExecutor(size) as pool:
        members = [OnSockets(wires, rank) for rank in range(size)]
        return [future.result(60) for future in [pool.submit(function, member) for member in members]]


@given(st.integers(2, 40))
def test_rounds_hold_every_pair_once_and_nobody_twice(size: int) -> None:
    rounds = disjoint_rounds(size)
    assert sorted(pair for pairs in rounds for pair in pairs) == list(combinations(range(size), 2))
    for pairs in rounds:
        members = [rank for pair in pairs for rank in pair]
        assert len(members) == len(set(members))


@given(st.integers(2, 300))
def test_all_pairs_up_to_sixteen_and_fifteen_shifts_beyond(size: int) -> None:
    found = shifts(size)
    assert len(set(found)) == len(found) <= 15
    assert all(1 <= shift < size for shift in found)
    assert found[0] == 1
    measured = {flow for shift in found for flow in shifted(size, shift)}
    if size <= 16:
        assert len(measured) == size * (size - 1)
    else:
        assert len(found) >= 14


@pytest.mark.parametrize("size", [2, 3, 5])
def test_all_members_end_with_the_same_figures_of_all_pairs(size: int) -> None:
    found = _on_all(size, lambda member: measure_flows(member, limit_s=20.0))
    first = found[0]
    assert first.complete
    assert set(first.latency_s) == {(a, b) for a in range(size) for b in range(size) if a != b}
    assert all(rate > 0 for rate in first.bytes_per_s.values())
    for other in found[1:]:
        assert (other.latency_s, other.bytes_per_s, other.together) == (
            first.latency_s,
            first.bytes_per_s,
            first.together,
        )
    assert bool(first.together) == (size > 3)  # two disjoint pairs need four members


def test_flows_that_the_caller_proposes_are_measured_together() -> None:
    def propose(latency_s, bytes_per_s):
        assert bytes_per_s.keys() == latency_s.keys()
        return [[(0, 1), (2, 1)], [(1, 0), (2, 0)]]

    found = _on_all(3, lambda member: measure_flows(member, limit_s=20.0, propose=propose))
    assert [each.flows for each in found[0].together] == [((0, 1), (2, 1)), ((1, 0), (2, 0))]
    assert all(rate > 0 for each in found[0].together for rate in each.bytes_per_s)


def test_nothing_begins_after_the_limit_but_the_first_shift() -> None:
    found = _on_all(4, lambda member: measure_flows(member, limit_s=0.0))[0]
    assert set(found.bytes_per_s) == set(shifted(4, 1))
    assert not found.complete
    assert not found.together


def test_further_pairs_are_asked_for_until_none_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flows, "shifts", lambda size: [1])
    asked = []

    def further(latency_s, bytes_per_s):
        asked.append(len(bytes_per_s))
        return [(0, 2), (1, 0)] if (0, 2) not in bytes_per_s else []

    found = _on_all(4, lambda member: measure_flows(member, limit_s=20.0, further=further))
    assert set(found[0].bytes_per_s) == {*shifted(4, 1), (0, 2), (1, 0)}
    assert found[0].bytes_per_s == found[3].bytes_per_s
    assert sorted(set(asked)) == [4, 6]


def test_one_member_has_nothing_to_measure() -> None:
    assert _on_all(1, measure_flows)[0].complete
    assert _on_all(1, measure_clocks)[0] == [ClockOffset()]


def test_flows_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """No receiver asks before the one in front of it has everything."""
    spans = []
    message_s = flows._message_s

    def noted(messages):
        found = message_s(messages)
        spans.append((messages[0].timing.begun, messages[-1].timing.ended))
        return found

    monkeypatch.setattr(flows, "_message_s", noted)
    _on_all(4, lambda member: measure_flows(member, limit_s=0.0))
    spans.sort()
    assert len(spans) == 4
    for (_, ended), (begun, _) in pairwise(spans):
        assert begun >= ended


@given(st.floats(1e-4, 1.0), st.integers(0, 4), st.floats(0, 1.0))
def test_one_end_that_is_seen_late_does_not_change_the_rate(each_s, late, by_s) -> None:
    ends = [at * each_s for at in range(5)]
    ends[late] += min(by_s, each_s) if late < 4 else by_s
    assert typical_s(ends) == pytest.approx(each_s, rel=0.01) or late in (0, 4)
    assert 0.5 * each_s <= typical_s(ends) <= 1.5 * each_s or late == 4


def test_sets_leave_out_what_was_not_measured() -> None:
    latency_s = dict.fromkeys(((a, b) for a in range(4) for b in range(4) if a != b), 1e-3)
    assert disjoint_sets(latency_s, {}) == []
    assert disjoint_sets(latency_s, dict.fromkeys(latency_s, 1.0), most=2) != []


@given(
    st.floats(-1e3, 1e3),
    st.lists(st.tuples(st.floats(1e-4, 1), st.floats(1e-4, 1), st.floats(0, 1)), min_size=1),
)
def test_offset_is_within_half_of_the_shortest_round_trip(offset, trips) -> None:
    stamps = []
    for at, (there_s, back_s, between_s) in enumerate(trips):
        a0 = 100.0 * at
        b1 = a0 + there_s + offset
        stamps.append((a0, b1, b1 + between_s, a0 + there_s + between_s + back_s))
    found = offset_of(stamps)
    shortest_s = min(there_s + back_s for there_s, back_s, _ in trips)
    assert found.within_s == pytest.approx(shortest_s / 2, abs=1e-9)
    assert abs(found.offset_s - offset) <= found.within_s + 1e-9


def test_clock_that_is_ahead_is_found() -> None:
    ahead_s = {0: 0.0, 1: 5.0, 2: -3.0}
    found = _on_all(3, lambda member: measure_clocks(member, wall_s=ahead_s[member.rank]))
    assert found[0] == found[1] == found[2]
    for rank, each in enumerate(found[0]):
        assert abs(each.offset_s - ahead_s[rank]) <= each.within_s + 1e-6
