"""Waits that last long: what peers are asked, what they answer, and when that is an error.

Every worker has a thread of its own here, as it has a process in a run.
"""

from __future__ import annotations

import contextlib
import threading
import time

import pytest
import torch

from echelon.comm.inbox import Inbox
from echelon.comm.schedule.collective import Move, ScheduleStep
from echelon.comm.wire import watch as module
from echelon.errors import MismatchedCalls, PeerLost, RoundTimeout
from wires import Wires

PATIENCE_S = 90.0


class Workers:
    """Runs `act(rank)` in a thread per rank; `outcomes` are results or errors, by rank."""

    def __init__(self, act, ranks):
        self.outcomes = {}
        self._act = act
        self._threads = [threading.Thread(target=self._work, args=(rank,)) for rank in ranks]
        for thread in self._threads:
            thread.start()

    def _work(self, rank):
        try:
            self.outcomes[rank] = self._act(rank)
        except Exception as error:  # noqa: BLE001 - the test looks at it
            self.outcomes[rank] = error

    def end(self):
        for thread in self._threads:
            thread.join(PATIENCE_S)
            assert not thread.is_alive(), "it still waits"
        return self.outcomes


def everyone(wires, rank, channel, *, deadline_s=600, number=1):
    """A reduction that cannot end without anybody, as a group begins it."""
    exchange = wires.start(
        rank, torch.ones(10), "ring", channel=channel, deadline_s=deadline_s, number=number
    )
    exchange.parties = tuple(range(wires.size))
    return exchange.future


@pytest.mark.parametrize("size", [2, 4])
def test_workers_in_different_operations_all_raise_the_same_error(size):
    with Wires(size) as wires:
        waiting = Workers(lambda rank: everyone(wires, rank, 1 if rank else 2).wait(), range(size))
        for error in waiting.end().values():
            assert type(error) is MismatchedCalls
            assert "workers make different calls: " in error.message
            assert 0 in error.ranks
            assert len(error.ranks) > 1


def test_all_later_operations_fail_at_once_and_say_why():
    with Wires(2) as wires:
        Workers(lambda rank: everyone(wires, rank, 1 + rank).wait(), range(2)).end()
        for rank in range(2):
            with pytest.raises(MismatchedCalls):
                everyone(wires, rank, 3).wait()
            with pytest.raises(MismatchedCalls):
                wires.loops[rank].check()


def test_a_worker_that_has_begun_the_others_operation_is_not_accused():
    """It waits for them in another order; each has begun both."""
    with Wires(2) as wires:

        def act(rank):
            futures = [everyone(wires, rank, channel) for channel in ((1, 2) if rank else (2, 1))]
            return [future.wait().sum().item() for future in futures]

        assert Workers(act, range(2)).end() == {0: [20, 20], 1: [20, 20]}


def test_workers_that_both_wait_for_a_third_one_are_not_accused():
    """Rank 0 has begun both reductions, rank 1 the first; rank 2 comes later."""
    with Wires(3) as wires:

        def act(rank):
            if rank == 2:
                time.sleep(4)
            first = everyone(wires, rank, 1)
            if rank:
                first.wait()
            return everyone(wires, rank, 2).wait().sum().item()

        assert Workers(act, range(3)).end() == {0: 30, 1: 30, 2: 30}


def test_a_second_thread_that_begins_operations_makes_nothing_certain():
    """It may begin what the other worker waits for, and does."""
    with Wires(2) as wires:
        other, ready = [], threading.Event()

        def second():
            everyone(wires, 0, 3).wait()
            ready.wait(4)  # twice as long as a mismatch takes
            everyone(wires, 0, 2).wait()

        def act(rank):
            if rank == 0:
                other.append(threading.Thread(target=second))
                other[0].start()
            else:
                everyone(wires, 1, 3).wait()
                everyone(wires, 1, 2).wait()
            return everyone(wires, rank, 1).wait().sum().item()

        assert Workers(act, range(2)).end() == {0: 20, 1: 20}
        other[0].join(PATIENCE_S)


@pytest.mark.parametrize("bounded", [(0,), (1,), (0, 1)])
def test_a_wait_that_the_script_ends_itself_makes_nothing_certain(bounded):
    with Wires(2) as wires:

        def act(rank):
            first = everyone(wires, rank, 1 + rank)
            if rank in bounded:
                with contextlib.suppress(RoundTimeout):  # the other one's may have ended before
                    first.wait(4)
                second = everyone(wires, rank, 2 - rank)
                return first.wait().sum().item() + second.wait().sum().item()
            total = first.wait().sum().item()
            return total + everyone(wires, rank, 2 - rank).wait().sum().item()

        assert Workers(act, range(2)).end() == {0: 40, 1: 40}


def test_a_peer_that_is_not_needed_is_not_accused():
    """Rank 0 waits for rank 1 alone, which comes later; rank 2 waits for rank 0 in something else."""
    with Wires(3) as wires:
        step = [ScheduleStep(sends=(Move(1, 0, 4),), adds=(Move(1, 4, 8),))]
        back = [ScheduleStep(sends=(Move(0, 0, 4),), adds=(Move(0, 4, 8),))]
        third = [ScheduleStep(sends=(Move(0, 0, 4),), adds=(Move(0, 4, 8),))]
        reply = [ScheduleStep(sends=(Move(2, 0, 4),), adds=(Move(2, 4, 8),))]

        def exchange(rank, schedule, channel):
            made = wires.make(rank, torch.ones(8), schedule, channel=channel, deadline_s=600)
            wires.loops[rank].submit(made)
            return made.future.wait()

        def act(rank):
            if rank == 0:
                exchange(0, step, 1)
                return exchange(0, reply, 2) is not None
            if rank == 1:
                time.sleep(4)
                return exchange(1, back, 1) is not None
            return exchange(2, third, 2) is not None

        assert Workers(act, range(3)).end() == {0: True, 1: True, 2: True}


def test_a_peer_that_is_over_with_an_operation_and_sent_too_little_did_something_else():
    with Wires(2) as wires:

        def act(rank):
            if rank == 0:
                flat = torch.ones(4)
                done = wires.make(0, flat, [ScheduleStep(sends=(Move(1, 0, 4),))], deadline_s=600)
                wires.loops[0].submit(done)
                return done.future.wait() is flat
            takes = [ScheduleStep(takes=(Move(0, 0, 4),)), ScheduleStep(takes=(Move(0, 4, 8),))]
            more = wires.make(1, torch.ones(8), takes, deadline_s=600)
            wires.loops[1].submit(more)
            return more.future.wait()

        outcomes = Workers(act, range(2)).end()
        assert outcomes[0] is True
        assert type(outcomes[1]) is MismatchedCalls


def test_messages_of_another_size_are_explained_by_what_workers_do():
    with Wires(3) as wires:

        def act(rank):
            length = 30 if rank == 1 else 10
            return wires.start(rank, torch.ones(length), deadline_s=600).future.wait()

        for error in Workers(act, range(3)).end().values():
            assert type(error) is MismatchedCalls
            assert error.message.startswith("workers make different calls: rank")
            assert " bytes where " in error.message


def test_a_worker_that_ends_is_named_with_what_the_others_needed_it_for():
    with Wires(2) as wires:
        waiting = Workers(lambda rank: everyone(wires, rank, 1).wait(), [0])
        wires.loops[1].close()
        error = waiting.end()[0]
        assert type(error) is PeerLost
        assert (
            "rank 1 on n1 ended while the others were still training: rank 0 is in wait()" in error.message
        )


def test_whom_a_worker_waits_for_is_reported_while_it_waits():
    with Wires(3) as wires:
        told = []
        wires.loops[0].watch.on_waiting = lambda *what: told.append(what)
        begun = time.time()
        waiting = Workers(lambda rank: everyone(wires, rank, 1).wait(), [0, 1])
        for _ in range(int(PATIENCE_S / 0.05)):
            if len(told) > 1:
                break
            time.sleep(0.05)
        Workers(lambda rank: everyone(wires, rank, 1).wait(), [2]).end()
        assert all(isinstance(outcome, torch.Tensor) for outcome in waiting.end().values())
        for ranks, since, doing in told:
            assert ranks == [2]
            assert begun - 1 < since < begun + 30
            assert doing.startswith("rank 2 is computing (test_watch.py:") or doing == "rank 2 is computing"


def test_answers_reach_each_of_several_threads_that_wait():
    with Wires(2) as wires:
        told = []
        wires.loops[0].watch.on_waiting = lambda *what: told.append(what)
        threads = Workers(lambda channel: everyone(wires, 0, channel).wait(), [1, 2])
        for _ in range(int(PATIENCE_S / 0.05)):
            if len(told) > 3:  # each of them more than once
                break
            time.sleep(0.05)
        Workers(lambda channel: everyone(wires, 1, channel).wait(), [1, 2]).end()
        assert all(isinstance(outcome, torch.Tensor) for outcome in threads.end().values())
        assert len(told) > 3
        assert not [doing for _, _, doing in told if "does not answer" in doing]


def test_a_peer_that_does_not_answer_is_reported_as_such_and_not_accused():
    with Wires(2, silent=(1,)) as wires:
        told = []
        wires.loops[0].watch.on_waiting = lambda *what: told.append(what)
        error = Workers(lambda rank: everyone(wires, 0, 1, deadline_s=5).wait(), [0]).end()[0]
        assert type(error) is RoundTimeout
        silent = "rank 1 does not answer: stopped, overloaded, or cut off from the network"
        assert error.message == f"rank 1 on n1 did not arrive within 5 s: {silent}"
        assert told[-1][0] == [1]
        assert told[-1][2] == silent


def test_a_report_that_fails_does_not_end_the_loop(caplog):
    with Wires(2) as wires:
        failed = threading.Event()

        def fail(*_):
            failed.set()
            raise OSError("no space left")

        wires.loops[0].watch.on_waiting = fail
        waiting = Workers(lambda rank: everyone(wires, rank, 1).wait(), [0])
        assert failed.wait(PATIENCE_S)
        Workers(lambda rank: everyone(wires, rank, 1).wait(), [1]).end()
        assert isinstance(waiting.end()[0], torch.Tensor)
    assert "a wait could not be reported" in caplog.text


def test_servers_neither_ask_nor_are_asked():
    with Wires(2) as wires:
        for loop in wires.loops:
            loop.watch.workers = frozenset({0})
        before = wires.ends[1][0].received_bytes
        waiting = Workers(lambda rank: everyone(wires, rank, 1 + rank, deadline_s=4).wait(), range(2))
        deadline = time.monotonic() + 3
        asked = False
        while time.monotonic() < deadline:
            asked = asked or any(loop.watch._questions for loop in wires.loops[1:])
            time.sleep(0.05)
        assert not asked
        assert wires.ends[1][0].received_bytes - before < 200, "the reduction itself, and no question"
        assert all(type(error) is RoundTimeout for error in waiting.end().values())


def test_nothing_is_asked_while_waits_are_short():
    with Wires(2) as wires:
        for number in range(1, 50):

            def act(rank, number=number):
                return everyone(wires, rank, 1, number=number).wait().sum().item()

            assert Workers(act, range(2)).end() == {0: 20, 1: 20}
        assert not any(loop.watch._questions for loop in wires.loops)


class Codec:
    """A thread by the name of a codec's, for one worker: waits for work, or is at work for a while."""

    def __init__(self, act):
        self._act = act
        self._work = Inbox()
        self._future = None
        self._begun = threading.Event()
        self._thread = threading.Thread(target=self._run, name="echelon-codec")
        self._thread.start()

    def _run(self):
        self._future = self._act()
        self._begun.set()
        self._work.get()

    def wait(self):
        """Wait, as a trainer does for its buckets, for what the thread has begun."""
        assert self._begun.wait(PATIENCE_S)
        return self._future.wait()

    def close(self):
        self._work.put(None)
        self._thread.join(PATIENCE_S)


@pytest.fixture
def impatient(monkeypatch):
    """As patient with codec threads as with training threads."""
    monkeypatch.setattr(module, "_CONFIRM_CODED_S", 0.5)


@pytest.mark.usefixtures("impatient")
def test_an_idle_codec_thread_does_not_make_different_calls_uncertain():
    with Wires(2) as wires:
        codecs = [Codec(lambda rank=rank: everyone(wires, rank, 7)) for rank in range(2)]
        Workers(lambda rank: codecs[rank].wait(), range(2)).end()
        waiting = Workers(lambda rank: everyone(wires, rank, 1 + rank).wait(), range(2))
        for error in waiting.end().values():
            assert type(error) is MismatchedCalls
        for codec in codecs:
            codec.close()


@pytest.mark.usefixtures("impatient")
def test_a_bucket_of_one_worker_and_another_call_of_the_other_are_different_calls():
    with Wires(2) as wires:
        codec = Codec(lambda: everyone(wires, 1, 7))
        waiting = Workers(lambda rank: codec.wait() if rank else everyone(wires, 0, 1).wait(), range(2))
        for error in waiting.end().values():
            assert type(error) is MismatchedCalls
        codec.close()


@pytest.mark.usefixtures("impatient")
def test_a_codec_thread_at_work_may_still_begin_what_the_other_waits_for():
    with Wires(2) as wires:

        def encode():
            time.sleep(4)
            return everyone(wires, 0, 7)

        codecs = [Codec(encode), Codec(lambda: everyone(wires, 1, 7))]

        def act(rank):
            if rank:
                codecs[1].wait()
            return everyone(wires, rank, 1).wait().sum().item()

        assert Workers(act, range(2)).end() == {0: 20, 1: 20}
        for codec in codecs:
            codec.close()


@pytest.mark.usefixtures("impatient")
def test_a_codec_thread_with_an_exchange_in_flight_may_begin_the_next_one():
    with Wires(2) as wires:

        def first_stage():
            first = everyone(wires, 0, 8)
            first.add_done_callback(lambda: everyone(wires, 0, 7))
            return first

        codecs = [Codec(first_stage), Codec(lambda: everyone(wires, 1, 7))]
        late = threading.Timer(4, everyone, (wires, 1, 8))
        late.start()

        def act(rank):
            if rank:
                codecs[1].wait()
            return everyone(wires, rank, 1).wait().sum().item()

        assert Workers(act, range(2)).end() == {0: 20, 1: 20}
        late.join()
        for codec in codecs:
            codec.close()
