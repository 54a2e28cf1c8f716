"""Links are measured correctly under any shaping, identically on all members, and in bounded time."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from echelon.comm.future import CallerFuture, Future, Timing
from echelon.comm.meet import links
from echelon.comm.meet.links import Links, gathered, measure
from echelon.comm.schedule.cost import LinkCost
from wires import Wires

BURST = 128 << 10


class OnWires:
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
        exchange = self._wires.start(self.rank, tensor, number=self._count, op=op)
        return exchange.future

    def all_gather(self, tensor):
        rows = torch.zeros(self.size, len(tensor), dtype=tensor.dtype)
        rows[self.rank] = tensor
        self.all_reduce(rows.view(-1)).wait()
        return list(rows)


class Emulated:
    """One of many equal members, on a virtual clock: each of its links is a token bucket.

    A flow of shift d shares its link with d - 1 others, if links are `shared`.
    """

    rank = 0

    def __init__(self, size, *, latency_s, bytes_per_s, shared=False):
        self.size = size
        self.now = 0.0
        self.sent_bytes = 0
        self._latency_s = latency_s
        self._rate = bytes_per_s
        self._shared = shared
        self._tokens = BURST
        self._filled_at = 0.0

    def exchange(self, flat, schedule, *, priority=0):
        begun = self.now
        for step in schedule:
            for move in step.takes:
                if move.length == 1:
                    self.now += self._latency_s
                else:
                    self._carry(move)
        timing = Timing(begun=begun, sent=self.now, ended=self.now)
        return CallerFuture(lambda _: flat, lambda: True, lambda: timing)

    def _carry(self, move):
        self.sent_bytes += move.length
        flows = (self.rank - move.peer) % self.size if self._shared else 1
        idle = self.now - self._filled_at
        tokens = min(BURST, self._tokens + idle * self._rate)
        free = min(move.length, tokens / flows)
        self.now += (move.length - free) * flows / self._rate
        self._tokens = tokens - free * flows
        self._filled_at = self.now

    def all_reduce(self, tensor, op="sum", *, priority=0):
        return Future.completed(tensor)

    def all_gather(self, tensor):
        return [tensor] * self.size


@pytest.fixture
def emulated(monkeypatch):
    def make(size, **options):
        group = Emulated(size, **options)
        monkeypatch.setattr(links, "time", SimpleNamespace(perf_counter=lambda: group.now))
        return group

    return make


@pytest.mark.parametrize("bytes_per_s", [1.25e6, 1.25e7, 1.25e8, 1.25e9])
def test_the_burst_of_a_token_bucket_does_not_affect_the_rate(emulated, bytes_per_s):
    found = measure(emulated(4, latency_s=1e-4, bytes_per_s=bytes_per_s))
    for rate in found.bytes_per_s.values():
        assert rate == pytest.approx(bytes_per_s, rel=0.01)


def test_latency_is_one_way(emulated):
    found = measure(emulated(4, latency_s=3e-4, bytes_per_s=1e8))
    for latency_s in found.latency_s.values():
        assert latency_s == pytest.approx(3e-4)


def test_eight_workers_at_a_gigabit_are_measured_in_less_than_half_a_virtual_second(emulated):
    group = emulated(8, latency_s=1e-4, bytes_per_s=1.19e8)
    measure(group)
    assert group.now < 0.5


def test_slow_links_are_measured_with_few_bytes_and_for_a_bounded_time(emulated):
    group = emulated(8, latency_s=1e-4, bytes_per_s=1.25e6)
    found = measure(group)
    assert group.now < 2
    assert group.sent_bytes == 3 * 2 * (256 << 10)
    assert set(found.bytes_per_s) == {(r, (r + d) % 8) for r in range(8) for d in (1, 2, 4)}


def test_slow_shifts_are_skipped_but_never_the_neighbours(emulated):
    group = emulated(64, latency_s=1e-4, bytes_per_s=1.25e6, shared=True)
    found = measure(group)
    assert group.now < 2
    assert {(peer - rank) % 64 for rank, peer in found.bytes_per_s} == {1, 2}
    assert found.slowest.seconds_per_byte == pytest.approx(1 / 1.25e6, rel=0.01)


def test_flows_that_share_a_link_show_their_part_of_it(emulated):
    found = measure(emulated(8, latency_s=1e-4, bytes_per_s=1.25e7, shared=True))
    for (rank, peer), rate in found.bytes_per_s.items():
        assert rate == pytest.approx(1.25e7 / ((peer - rank) % 8), rel=0.02)


def test_a_fast_link_is_measured_with_eight_mebibytes_at_most(emulated):
    group = emulated(2, latency_s=1e-5, bytes_per_s=1e11)
    measure(group)
    assert group.sent_bytes == sum(n << 10 for n in (256, 512, 1024, 2048, 4096, 8192)) + 6 * (256 << 10)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_over_real_sockets_all_members_end_with_identical_numbers(size):
    with Wires(size, tcp=True) as wires, ThreadPoolExecutor(size) as threads:
        found = list(threads.map(lambda rank: measure(OnWires(wires, rank), last_begin_s=60), range(size)))
    assert all(one == found[0] for one in found)
    shifts = [1] if size == 2 else [1, 2]
    pairs = {(rank, (rank + shift) % size) for rank in range(size) for shift in shifts}
    assert set(found[0].bytes_per_s) == pairs
    assert set(found[0].latency_s) == pairs | {(peer, rank) for rank, peer in pairs}
    assert min(found[0].bytes_per_s.values()) > 0
    assert min(found[0].latency_s.values()) > 0


def test_single_worker_has_no_links():
    found = measure(Emulated(1, latency_s=1, bytes_per_s=1))
    assert found == Links(size=1, latency_s={}, bytes_per_s={})
    assert found.slowest == LinkCost(latency_s=0.0, seconds_per_byte=0.0)


def test_results_are_assigned_to_the_measured_link():
    found = gathered([1, 2], [[1.0, 10.0, 5.0, 50.0], [2.0, 20.0, 6.0, 60.0], [3.0, 30.0, 7.0, 70.0]])
    # Rank r measures the round trip to the next member, and the rate from the previous one.
    # With three members, shift 2 reaches the previous member, so those round trips count as well.
    assert found.latency_s == {
        (0, 1): 1.0, (1, 0): 1.0, (1, 2): 2.0, (2, 1): 2.0, (2, 0): 3.0, (0, 2): 3.0,
    }  # fmt: skip
    assert found.bytes_per_s == {
        (2, 0): 10.0, (0, 1): 20.0, (1, 2): 30.0, (1, 0): 50.0, (2, 1): 60.0, (0, 2): 70.0,
    }  # fmt: skip


def test_slowest_is_the_worst_link_between_neighbours():
    rows = [[1e-4, 1e8, 9e-4, 1e6], [3e-4, 2e8, 9e-4, 1e6], [2e-4, 5e7, 9e-4, 1e6], [1e-4, 1e8, 9e-4, 1e6]]
    slowest = gathered([1, 2], rows).slowest
    assert slowest == LinkCost(latency_s=3e-4, seconds_per_byte=1 / 5e7)
