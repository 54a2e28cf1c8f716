"""Schedules carried out by loops in one process: right sums, the same bits in any order of arrival."""

from __future__ import annotations

import random
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.comm.schedule.collective import COLLECTIVES, Move, ScheduleStep
from echelon.comm.schedule.spread import broadcast, gather_all
from echelon.comm.wire.connection import Sink
from echelon.comm.wire.exchange import Exchange, as_bytes
from wires import Wires, values

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.int8,
]
COMBINED = {"sum": torch.sum, "max": torch.amax, "min": torch.amin}
EVERY = [*COLLECTIVES.names(), "ps(servers=2)", "hierarchical(inner=butterfly, rails=false)"]


def reduced(wires, collective, inputs, *, op="sum", order=None, **options):
    """Every worker's result."""
    flats = [tensor.clone() for tensor in inputs]
    exchanges = {
        rank: wires.start(rank, flats[rank], collective, op=op, **options)
        for rank in order or range(wires.size)
    }
    for exchange in exchanges.values():
        exchange.future.wait()
    return flats


def bits(tensor):
    return tensor.view(torch.uint8).tolist()


@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_every_collective_sums_every_type_on_every_member(size):
    with Wires(size, frame_bytes=64) as wires:
        number = 0
        for collective in EVERY:
            for dtype in DTYPES if size == 4 else DTYPES[:1]:
                for op in COMBINED if size == 4 else ["sum"]:
                    number += 1
                    inputs = [values(rank, 101, dtype, number) for rank in range(size)]
                    results = reduced(wires, collective, inputs, op=op, number=number)
                    expected = COMBINED[op](torch.stack(inputs).to(torch.float64), 0).to(dtype)
                    for result in results:
                        assert torch.equal(result, expected), (collective, dtype, op)


@settings(max_examples=40, deadline=None)
@given(
    size=st.integers(2, 5),
    length=st.integers(0, 70),
    collective=st.sampled_from(EVERY),
    dtype=st.sampled_from(DTYPES),
    frame_bytes=st.sampled_from([8, 16, 64]),
    data=st.data(),
)
def test_any_length_over_tiny_frames_and_buffers_sums_up(
    size, length, collective, dtype, frame_bytes, data
):
    order = data.draw(st.permutations(range(size)), label="who submits first")
    with Wires(size, frame_bytes=frame_bytes, buffer_bytes=1) as wires:
        inputs = [values(rank, length, dtype) for rank in range(size)]
        results = reduced(wires, collective, inputs, order=order)
        expected = torch.stack(inputs).to(torch.float64).sum(0).to(dtype)
        assert all(torch.equal(result, expected) for result in results)


@pytest.mark.parametrize("collective", EVERY)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_are_the_same_on_all_members_and_in_every_run(collective, dtype):
    """Numbers whose sum depends on the order of adding; workers begin in another order each time."""
    size = 4
    found = set()
    for seed in range(4):
        with Wires(size, frame_bytes=256) as wires:
            inputs = [
                torch.randn(300, generator=torch.Generator().manual_seed(rank)).mul(10.0**rank).to(dtype)
                for rank in range(size)
            ]
            order = random.Random(seed).sample(range(size), size)
            found |= {tuple(bits(r)) for r in reduced(wires, collective, inputs, order=order)}
    assert len(found) == 1


@pytest.mark.parametrize("op", ["max", "min"])
def test_zeros_of_either_sign_and_nan_leave_the_same_bits_on_all(op):
    inputs = [torch.tensor([0.0, -0.0, float("nan"), 1.0]), torch.tensor([-0.0, 0.0, 2.0, float("nan")])]
    with Wires(2) as wires:
        for number, collective in enumerate(("butterfly", "direct"), start=1):
            one, other = reduced(wires, collective, inputs, op=op, number=number)
            assert bits(one) == bits(other)
            assert one[2:].isnan().all()


def test_overlapping_messages_are_added_in_the_listed_order_for_any_order_of_arrival():
    """Rank 0 adds three workers' elements; the last listed arrives first, in pieces."""
    step = ScheduleStep(adds=(Move(1, 0, 40), Move(2, 0, 40), Move(3, 0, 40)))
    own = torch.full((40,), 1e8)
    parts = {1: torch.full((40,), 1.0), 2: torch.full((40,), -1e8), 3: torch.full((40,), 3.0)}
    expected = ((own + parts[1]) + parts[2]) + parts[3]
    assert not torch.equal(expected, ((own + parts[3]) + parts[2]) + parts[1])
    for order in ((3, 2, 1), (2, 3, 1), (1, 2, 3), (3, 1, 2)):
        peers = {rank: _Peer() for rank in parts}
        flat = own.clone()
        exchange = Exchange(1, flat, [step], rank=0, op="sum", deadline_s=9, priority=0)
        exchange.begin(peers)
        for offset in range(0, 160, 32):
            for rank in order:
                peers[rank].give(offset, as_bytes(parts[rank])[offset : offset + 32])
        assert exchange.ended, order
        assert torch.equal(flat, expected), order


def test_the_next_message_in_order_is_added_at_once_and_later_ones_are_kept():
    step = ScheduleStep(adds=(Move(1, 0, 8), Move(2, 0, 8)))
    peers = {1: _Peer(), 2: _Peer()}
    flat = torch.zeros(8)
    Exchange(1, flat, [step], rank=0, op="sum", deadline_s=9, priority=0).begin(peers)
    peers[2].give(0, as_bytes(torch.full((4,), 2.0)))
    assert flat.tolist() == [0] * 8
    peers[1].give(0, as_bytes(torch.full((4,), 1.0)))
    assert flat.tolist() == [3] * 4 + [0] * 4
    peers[1].give(16, as_bytes(torch.full((4,), 1.0)))
    peers[2].give(16, as_bytes(torch.full((4,), 2.0)))
    assert flat.tolist() == [3] * 8


def test_elements_that_a_step_still_sends_are_not_changed_before_they_are_sent():
    """As in a butterfly: both send the whole buffer, and add what they get."""
    step = ScheduleStep(sends=(Move(1, 0, 4),), adds=(Move(1, 0, 4),))
    peer = _Peer()
    flat = torch.ones(4)
    exchange = Exchange(1, flat, [step], rank=0, op="sum", deadline_s=9, priority=0)
    exchange.begin({1: peer})
    peer.give(0, as_bytes(torch.full((4,), 2.0)))
    assert flat.tolist() == [1] * 4
    assert not exchange.ended
    peer.sent[0]()
    assert flat.tolist() == [3] * 4
    assert exchange.ended


def test_message_that_overwrites_elements_in_flight_waits_until_they_are_sent():
    step = ScheduleStep(sends=(Move(1, 0, 4),), takes=(Move(1, 2, 6),))
    peer = _Peer()
    flat = torch.zeros(6)
    exchange = Exchange(1, flat, [step], rank=0, op="sum", deadline_s=9, priority=0)
    exchange.begin({1: peer})
    peer.give(0, as_bytes(torch.full((4,), 2.0)))
    assert flat.tolist() == [0] * 6
    peer.sent[0]()
    assert flat.tolist() == [0, 0, 2, 2, 2, 2]
    assert exchange.ended


def test_a_long_schedule_that_finds_all_messages_there_needs_no_deep_stack():
    steps = [ScheduleStep(takes=(Move(1, 0, 1),)) for _ in range(5000)]
    exchange = Exchange(1, torch.zeros(1), steps, rank=0, op="sum", deadline_s=9, priority=0)
    assert len(steps) > sys.getrecursionlimit()
    exchange.begin({1: _Early()})
    assert exchange.ended


@pytest.mark.parametrize("large", [True, False])
def test_broadcast_and_all_gather_give_all_members_the_right_values(large):
    size = 4
    with Wires(size, frame_bytes=64) as wires:
        number = 0
        for source in range(size):
            number += 1
            flats = [values(rank, 50) for rank in range(size)]
            schedules = [broadcast(rank, size, 50, source, large=large) for rank in range(size)]
            _carry_out(wires, flats, schedules, number)
            assert all(torch.equal(flat, values(source, 50)) for flat in flats)
        whole = torch.stack([values(rank, 50) for rank in range(size)])
        flats = []
        for rank in range(size):
            flats.append(torch.zeros(size * 50))
            flats[rank][rank * 50 : rank * 50 + 50] = whole[rank]
        schedules = [gather_all(rank, size, 50, large=large) for rank in range(size)]
        _carry_out(wires, flats, schedules, number + 1)
        assert all(torch.equal(flat, whole.view(-1)) for flat in flats)


@pytest.mark.parametrize("collective", ["ring", "direct", "butterfly"])
def test_concurrent_operations_submitted_in_different_orders_give_right_results(collective):
    """Of several channels, with different priorities, through small kernel buffers."""
    size, count = 3, 6
    with Wires(size, frame_bytes=512, buffer_bytes=4096) as wires:
        flats = {}
        exchanges = []
        for rank in range(size):
            for n in random.Random(rank).sample(range(count), count):
                flats[rank, n] = values(rank, 3000 + n, seed=n)
                exchanges.append(
                    wires.start(
                        rank, flats[rank, n], collective, channel=n + 1, priority=(n * 7 + rank) % 4
                    )
                )
        for exchange in exchanges:
            exchange.future.wait()
        for n in range(count):
            expected = torch.stack([values(rank, 3000 + n, seed=n) for rank in range(size)]).sum(0)
            for rank in range(size):
                assert torch.equal(flats[rank, n], expected)


def _carry_out(wires, flats, schedules, number):
    parts = [wires.make(r, flats[r], schedules[r], number=number) for r in range(wires.size)]
    for rank, part in enumerate(parts):
        wires.loops[rank].submit(part)
    for part in parts:
        part.future.wait()


class _Peer:
    """Replaces a connection: delivers what the test gives it."""

    def __init__(self):
        self.sent = []
        self.sinks: list[Sink] = []

    def send(self, key, data, priority, sent):
        self.sent.append(sent)

    def expect(self, key, sink):
        self.sinks.append(sink)

    def give(self, offset, data):
        sink = self.sinks[-1]
        target = sink.place(offset, len(data))
        if target is None:
            sink.take(offset, data)
        else:
            target[:] = data
        if offset + len(data) == sink.size_bytes:
            sink.finished()


class _Early:
    """A connection on which all messages arrive before they are expected."""

    def expect(self, key, sink):
        sink.finished()
