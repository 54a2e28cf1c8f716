"""Teams of threads as machines, with real connections: right sums, and bounded waits."""

from __future__ import annotations

import os
import threading
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.comm.meet.place import Place
from echelon.comm.meet.rendezvous import Member, Rendezvous
from echelon.comm.memory.rails import TAGS, RailLayout, RailReduction, Rails, machines
from echelon.comm.memory.shm import DONE, READY, Board, SharedMemoryTeam
from echelon.comm.open import open_group
from echelon.comm.schedule.collective import COLLECTIVES
from echelon.comm.wire.exchange import Exchange
from echelon.comm.wire.loop import CHANNEL_BITS
from echelon.errors import ConfigError, PeerLost, RoundTimeout, WorkerError
from wires import Wires, values

FIVE = [[0, 1], [2], [3, 4]]


class Yard:
    """Threads as workers: connected loops, and a team for each machine."""

    def __init__(self, layout, *, collective="ring", deadline_s=90.0):
        self.layout = layout
        self.size = sum(len(ranks) for ranks in layout)
        self.wires = Wires(self.size)
        self._collective = COLLECTIVES.build(collective)
        self._deadline_s = deadline_s
        self._barrier = threading.Barrier(self.size, timeout=90)
        self._said = [None] * self.size
        self.workers = [None] * self.size

    def __enter__(self):
        self.workers = self.run(lambda rank: Worker(self, rank))
        return self

    def __exit__(self, *story):
        self.wires.__exit__(*story)
        for worker in self.workers:
            if isinstance(worker, Worker):
                worker.rails.close()

    def rails(self, rank, team, view):
        loop = self.wires.loops[rank]
        return Rails(team, view, self._collective, loop, rank=rank, deadline_s=self._deadline_s)

    def gather(self, rank, mine, order):
        self._said[rank] = mine
        self._barrier.wait()
        said = list(self._said)
        self._barrier.wait()
        return [said[other] for other in order]

    def run(self, act):
        """What `act(rank)` returned or raised, by rank."""
        found = [None] * self.size

        def work(rank):
            try:
                found[rank] = act(rank)
            except WorkerError as error:
                found[rank] = error

        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return found

    def reduce(self, act):
        """`act(worker)` on every worker."""
        return self.run(lambda rank: act(self.workers[rank]))


class Worker:
    def __init__(self, yard, rank):
        self.rank = rank
        view = RailLayout(yard.layout, rank)
        order = [*view.mates, *(other for other in range(yard.size) if other not in view.mates)]
        self.team = SharedMemoryTeam(
            view.position,
            [yard.wires.names[mate] for mate in view.mates],
            [os.getpid()] * len(view.mates),
            gather=lambda mine: yard.gather(rank, mine, order),
            check=yard.wires.loops[rank].check,
        )
        self.rails = yard.rails(rank, self.team, view)
        self._tag = (1 << CHANNEL_BITS) + 1

    def buffer(self, length, dtype=torch.float32):
        return self.team.buffer(length, dtype)

    def start(self, buffer, op="sum", priority=0):
        tag, self._tag = self._tag, self._tag + TAGS
        return self.rails.start(tag, self.team.buffers_of(buffer), op, priority)


# Who carries what --------------------------------------------------------------------------------


def member(rank, node, host="h"):
    return Member(rank=rank, node=node, host=host, pid=rank)


def test_workers_of_one_node_and_host_are_on_one_machine():
    members = [member(0, "a"), member(1, "b"), member(2, "a"), member(3, "a", "other")]
    assert machines(members) == [[0, 2], [1], [3]]


@settings(max_examples=30)
@given(sizes=st.lists(st.integers(1, 5), min_size=2, max_size=4), length=st.integers(0, 40))
def test_each_machine_carries_every_element_once_and_rails_have_one_worker_of_each(sizes, length):
    ranks = iter(range(sum(sizes)))
    layout = [[next(ranks) for _ in range(size)] for size in sizes]
    for mates in layout:
        views = [RailLayout(layout, rank) for rank in mates]
        carried = [n for view in views if view.carries for n in range(*view.slice(length))]
        assert carried == list(range(length))
        for view in views:
            assert not view.carries or [sum(r in m for r in view.rail) for m in layout] == [1] * len(layout)
            assert view.carries or view.schedule(COLLECTIVES.build("ring"), length) == []
    first = [RailLayout(layout, mates[0]) for mates in layout]
    assert len({(view.rail, view.slice(length)) for view in first}) == 1


def test_shared_memory_alone_is_refused_on_several_machines():
    members = (member(0, "a"), member(1, "b"))
    with pytest.raises(ConfigError, match="needs all workers on one machine"):
        open_group(
            Rendezvous(None, members[0], members),
            Place(world_size=2),
            transport="shm",
            collective="auto",
            deadline_s=1,
            timeout_s=1,
        )


# Sums --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("collective", ["ring", "auto", "butterfly"])
@pytest.mark.parametrize("layout", [FIVE, [[0, 2, 4], [1, 3]], [[0, 1, 2, 3], [4]]], ids=str)
def test_sums_are_right_and_the_same_to_the_bit_on_every_machine(layout, collective):
    dtypes = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64]
    cases = [(length, dtype) for length in (1, 2, 5, 1000) for dtype in dtypes]

    def work(worker):
        out = []
        for length, dtype in cases:
            buffer = worker.buffer(length, dtype).copy_(values(worker.rank, length, dtype))
            worker.start(buffer).wait()
            out.append(buffer.clone())
        rough = worker.buffer(200_000)
        made = torch.Generator().manual_seed(worker.rank)
        rough.copy_(torch.randn(200_000, generator=made) * 10.0**worker.rank)
        worker.start(rough).wait()
        return out, rough.view(torch.int32)

    with Yard(layout, collective=collective) as yard:
        results = yard.reduce(work)
        sent = [worker.rails.sent_elements(1200) for worker in yard.workers]
    for n, (length, dtype) in enumerate(cases):
        expected = sum(values(rank, length, torch.float64) for rank in range(5)).to(dtype)
        for out, _ in results:
            assert torch.equal(out[n], expected), (length, dtype)
    assert all(torch.equal(bits, results[0][1]) for _, bits in results)
    carriers = sorted(rank for mates in layout for rank in mates[: min(map(len, layout))])
    assert [rank for rank in range(5) if sent[rank]] == carriers


def test_reductions_follow_each_other_on_the_same_buffers():
    def work(worker):
        buffers = [worker.buffer(300, torch.int64) for _ in range(3)]
        for turn in range(40):
            for n, buffer in enumerate(buffers):
                buffer.fill_((turn + n) * (worker.rank + 1))
            begun = [worker.start(buffer) for buffer in buffers]
            for n in torch.randperm(
                3, generator=torch.Generator().manual_seed(worker.rank + turn)
            ).tolist():
                begun[n].wait()
                if not bool((buffers[n] == (turn + n) * 15).all()):
                    return turn, n
        return None

    with Yard(FIVE) as yard:
        assert yard.reduce(work) == [None] * 5


def test_reduction_that_overtakes_another_on_the_wire_is_not_confused_with_it():
    """A number on the board holds for all reductions before it, too."""

    def work(worker):
        large, small = worker.buffer(3_000_000).fill_(1), worker.buffer(10).fill_(1)
        begun = [worker.start(large), worker.start(small, priority=-1)]
        begun[0].wait()
        found = large.unique().tolist()
        begun[1].wait()
        return found, small.unique().tolist()

    with Yard([[0, 1], [2]]) as yard:
        assert yard.reduce(work) == [([3.0], [3.0])] * 3


def test_reduction_completes_in_the_background():
    def work(worker):
        pending = worker.start(worker.buffer(1000).fill_(1))
        deadline = time.monotonic() + 90
        while not pending.done() and time.monotonic() < deadline:
            time.sleep(0.001)
        return pending.done()

    with Yard(FIVE) as yard:
        assert yard.reduce(work) == [True] * 5


# Workers that die, leave or are late -------------------------------------------------------------


@pytest.mark.parametrize("who", [1, 2, 4])
def test_all_workers_name_a_dead_worker_and_later_reductions_fail(who):
    def work(worker):
        buffer = worker.buffer(1000)
        if worker.rank == who:
            yard.wires.kill(who)
            return None
        errors = []
        for pending in [worker.start(buffer) for _ in range(2)] + [worker.start(buffer)]:
            with pytest.raises(PeerLost) as caught:
                pending.wait()
            errors.append(caught.value.ranks)
        return errors

    with Yard(FIVE) as yard:
        results = yard.reduce(work)
    assert results.pop(who) is None
    assert results == [[(who,)] * 3] * 4


@pytest.mark.parametrize("who", [1, 2, 3])
def test_all_workers_name_a_late_worker_at_the_deadline(who):
    over = threading.Barrier(5, timeout=90)

    def work(worker):
        buffer = worker.buffer(1000)
        try:
            if worker.rank != who:
                worker.start(buffer).wait()
        finally:
            over.wait()
        if worker.rank == who:
            worker.start(buffer).wait()

    with Yard(FIVE, deadline_s=1) as yard:
        results = yard.reduce(work)
    late = results.pop(who)
    assert isinstance(late, PeerLost)
    assert "gave up on this worker" in late.message
    for error in results:
        assert type(error) is RoundTimeout
        assert error.ranks == (who,)
        assert f"rank {who} on n{who} did not arrive within 1 s" in error.message


@pytest.mark.parametrize("who", [0, 1])
def test_worker_that_left_after_its_part_was_done_is_not_needed(who):
    """Rank 1 carries nothing, rank 0 does."""

    def work(worker):
        buffer = worker.buffer(100_000).fill_(1)
        worker.start(buffer).wait()
        if worker.rank == who:
            yard.wires.loops[who].close()
        return buffer.unique().tolist()

    with Yard([[0, 1, 2], [3]]) as yard:
        assert yard.reduce(work) == [[4.0]] * 4


def test_member_is_needed_until_it_is_ready_and_a_rail_until_it_is_done():
    layout = [[0, 1, 2], [3]]
    memory = torch.zeros(Board.size_bytes(3), dtype=torch.uint8)
    boards = [Board(position, 3, memory) for position in range(3)]
    crossing = Exchange(1, torch.zeros(0), [], rank=2, op="sum", deadline_s=1.0, priority=0)
    reduction = RailReduction(1, [torch.zeros(8)] * 3, "sum", crossing, RailLayout(layout, 2), boards[2])
    needed = [[reduction.needs(rank) for rank in (0, 1, 3)]]
    for board in boards:
        board.publish(READY, 1)
    needed.append([reduction.needs(rank) for rank in (0, 1, 3)])
    boards[0].publish(DONE, 1)
    needed.append([reduction.needs(rank) for rank in (0, 1, 3)])
    assert needed == [[True, True, False], [True, False, False], [False, False, False]]


def test_a_worker_that_leaves_instead_of_taking_part_is_named():
    def work(worker):
        buffer = worker.buffer(100)
        if worker.rank == 1:
            yard.wires.loops[1].close()
            return
        worker.start(buffer).wait()

    with Yard([[0, 1, 2], [3]]) as yard:
        results = yard.reduce(work)
    assert results.pop(1) is None
    for error in results:
        assert type(error) is PeerLost
        assert error.ranks == (1,)
        assert "ended while the others were still training" in error.message


def test_closing_ends_the_thread_and_all_waits():
    def work(worker):
        buffer = worker.buffer(100)
        if worker.rank == 0:
            return None
        before = worker.start(buffer)
        worker.rails.close()
        after = worker.start(buffer)
        for pending in (before, after):
            with pytest.raises(PeerLost, match="has left"):
                pending.wait()
        return worker.rails._thread.is_alive()

    with Yard(FIVE) as yard:
        assert yard.reduce(work) == [None, False, False, False, False]


def test_a_defect_in_the_thread_reaches_waiting_threads(monkeypatch, caplog):
    def fail(*_):
        raise MemoryError("no room")

    monkeypatch.setattr("echelon.comm.memory.rails.sum_into", fail)

    def work(worker):
        worker.start(worker.buffer(100)).wait()

    with Yard([[0, 1], [2]], deadline_s=2) as yard:
        results = yard.reduce(work)
    assert "MemoryError: no room" in results[0].message
    assert all(isinstance(error, WorkerError) for error in results)
    assert "reduces across machines failed" in caplog.text
