"""How operations end when a peer dies, leaves, is late or errs, and when this worker leaves."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from echelon.comm.schedule.collective import Move, ScheduleStep
from echelon.comm.wire.loop import Operation
from echelon.errors import Corrupt, PeerLost, RoundTimeout, WorkerError
from wires import Wires, values


def failure(exchange):
    with pytest.raises(WorkerError) as caught:
        exchange.future.wait()
    return caught.value


def wait_until(condition):
    for _ in range(20_000):
        if condition():
            return
        time.sleep(0.005)
    raise AssertionError("it never happened")


# A peer dies -------------------------------------------------------------------------------------


@pytest.mark.parametrize("collective", ["ring", "direct", "butterfly", "hierarchical", "ps"])
def test_a_peer_that_dies_is_named_by_all_survivors_at_once(collective):
    """Also by workers that exchange nothing with it: across the ring, or with another server."""
    with Wires(4) as wires:
        waiting = [wires.start(rank, torch.ones(1000), collective, deadline_s=600) for rank in range(3)]
        wires.kill(3)
        for exchange in waiting:
            error = failure(exchange)
            assert type(error) is PeerLost
            assert error.ranks == (3,)
            assert "rank 3 on n3 is gone" in error.message


def test_buffers_do_not_change_after_a_peer_dies_with_much_in_flight():
    with Wires(3, buffer_bytes=4096) as wires:
        flats = [torch.ones(2_000_000) for _ in range(3)]
        waiting = [wires.start(rank, flats[rank], "ring", deadline_s=600) for rank in range(3)]
        wait_until(lambda: wires.ends[0][1].sent_bytes > 1_000_000)
        wires.kill(2)
        for exchange in waiting[:2]:
            assert failure(exchange).ranks == (2,)
        for flat in flats[:2]:
            flat.fill_(7)
        time.sleep(0.05)
        assert all(bool((flat == 7).all()) for flat in flats[:2]), "nobody writes there any more"


def test_after_a_death_every_later_operation_fails_at_once():
    with Wires(3) as wires:
        wires.kill(2)
        wait_until(lambda: _raises(wires.loops[0].check))
        for number in (1, 2):
            error = failure(wires.start(0, torch.ones(4), number=number, deadline_s=600))
            assert error.ranks == (2,)
        with pytest.raises(PeerLost, match="rank 2 on n2"):
            wires.loops[0].check()


def _raises(act):
    try:
        act()
    except WorkerError:
        return True
    return False


# A peer leaves -----------------------------------------------------------------------------------


@pytest.mark.parametrize("tcp", [True, False])
def test_workers_may_leave_as_soon_as_their_part_is_done(tcp):
    for number in range(1, 20):
        with Wires(4, tcp=tcp) as wires:
            flats = [values(rank, 1 + 400 * number) for rank in range(4)]
            expected = torch.stack(flats).sum(0)
            outcomes = {}

            def work(rank, wires=wires, flats=flats, outcomes=outcomes):
                exchange = wires.start(rank, flats[rank], "ring")
                try:
                    exchange.future.wait()
                    outcomes[rank] = flats[rank]
                except WorkerError as error:
                    outcomes[rank] = error
                wires.loops[rank].close()

            threads = [threading.Thread(target=work, args=(rank,)) for rank in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            for rank in range(4):
                assert isinstance(outcomes[rank], torch.Tensor), outcomes[rank]
                assert torch.equal(outcomes[rank], expected)


def test_the_last_bytes_of_a_worker_that_leaves_are_delivered():
    """Also with unread data, for which the kernel would reset the connection."""
    length = 300_000
    with Wires(2, tcp=True) as wires:
        unread = wires.make(0, torch.ones(100_000), [ScheduleStep(sends=(Move(1, 0, 100_000),))], channel=2)
        wires.loops[0].submit(unread)
        unread.future.wait()
        last = wires.make(1, values(1, length), [ScheduleStep(sends=(Move(0, 0, length),))])
        wires.loops[1].submit(last)
        last.future.wait()
        wires.loops[1].close()
        flat = torch.zeros(length)
        taken = wires.make(0, flat, [ScheduleStep(takes=(Move(1, 0, length),))])
        wires.loops[0].submit(taken)
        taken.future.wait()
        assert torch.equal(flat, values(1, length))


def test_a_worker_that_leaves_early_is_named_by_all_others():
    with Wires(4) as wires:
        waiting = [wires.start(rank, torch.ones(10), "ring", deadline_s=600) for rank in range(3)]
        wires.loops[3].close()
        for exchange in waiting:
            error = failure(exchange)
            assert error.ranks == (3,)
            assert "rank 3 on n3 ended while the others were still training" in error.message


def test_a_worker_that_leaves_with_an_error_is_named_with_it():
    with Wires(4) as wires:
        waiting = [wires.start(rank, torch.ones(10), "ring", deadline_s=600) for rank in range(3)]
        wires.loops[3].close("ValueError: sample 17 is broken")
        for exchange in waiting:
            error = failure(exchange)
            assert error.ranks == (3,)
            assert "rank 3 on n3 failed: ValueError: sample 17 is broken" in error.message


def test_a_worker_that_leaves_because_of_another_has_that_one_named():
    with Wires(3) as wires:
        first = wires.start(0, torch.ones(10), deadline_s=600)
        wires.ends[2][0].sock.shutdown(2)  # rank 0 alone sees rank 2 die
        error = failure(first)
        wires.loops[0].close(f"PeerLost: {error}")
        later = wires.start(1, torch.ones(10), number=2, deadline_s=600)
        told = failure(later)
        assert told.ranks == (2,)
        assert told.message == error.message


def test_operation_that_no_longer_needs_the_leaving_worker_continues():
    with Wires(3) as wires:
        early = wires.make(2, values(2, 10), [ScheduleStep(sends=(Move(0, 0, 10),))])
        wires.loops[2].submit(early)
        early.future.wait()
        wires.loops[2].close()
        wait_until(lambda: _raises(wires.loops[0].check))
        flat = torch.zeros(10)
        steps = [ScheduleStep(takes=(Move(2, 0, 10),)), ScheduleStep(adds=(Move(1, 0, 10),))]
        late = wires.make(0, flat, steps)
        wires.loops[0].submit(late)
        wires.loops[1].submit(wires.make(1, values(1, 10), [ScheduleStep(sends=(Move(0, 0, 10),))]))
        late.future.wait()
        assert torch.equal(flat, values(1, 10) + values(2, 10))


def test_slow_worker_does_not_need_a_worker_that_sent_everything_and_left():
    """Its messages for later steps have arrived already."""
    with Wires(3) as wires:
        early = wires.make(
            2, values(2, 10), [ScheduleStep(sends=(Move(0, 0, 4),)), ScheduleStep(sends=(Move(0, 4, 10),))]
        )
        flat = torch.zeros(10)
        steps = [
            ScheduleStep(takes=(Move(2, 0, 4),)),
            ScheduleStep(adds=(Move(1, 0, 4),)),
            ScheduleStep(takes=(Move(2, 4, 10),)),
        ]
        late = wires.make(0, flat, steps)
        wires.loops[0].submit(late)
        wires.loops[2].submit(early)
        early.future.wait()
        wires.loops[2].close()
        wait_until(lambda: _raises(wires.loops[0].check))
        wires.loops[1].submit(wires.make(1, values(1, 4), [ScheduleStep(sends=(Move(0, 0, 4),))]))
        late.future.wait()
        assert torch.equal(flat, values(2, 10) + torch.cat([values(1, 4), torch.zeros(6)]))


# A peer is late ----------------------------------------------------------------------------------


def test_all_workers_name_a_missing_worker_at_the_deadline_and_notify_it():
    with Wires(4) as wires:
        waiting = [wires.start(rank, torch.ones(10), "ring", deadline_s=1) for rank in range(3)]
        for exchange in waiting:
            error = failure(exchange)
            assert type(error) is RoundTimeout
            assert error.ranks == (3,)
            assert "rank 3 on n3 did not arrive within 1 s" in error.message
        late = failure(wires.start(3, torch.ones(10), "ring", deadline_s=600))
        assert type(late) is PeerLost
        assert "gave up on this worker" in late.message
        assert "did not arrive within 1 s" in late.message


def test_a_silent_worker_is_named_by_all_at_the_deadline():
    with Wires(4, silent=(1,)) as wires:
        waiting = [wires.start(rank, torch.ones(10), "ring", deadline_s=1) for rank in (0, 2, 3)]
        for exchange in waiting:
            error = failure(exchange)
            assert type(error) is RoundTimeout
            assert error.ranks == (1,)


def test_after_a_deadline_the_next_operation_works():
    with Wires(3) as wires:
        waiting = [wires.start(rank, torch.ones(100_000), "ring", deadline_s=1) for rank in range(2)]
        for exchange in waiting:
            assert failure(exchange).ranks == (2,)
        assert isinstance(failure(wires.start(2, torch.ones(100_000), deadline_s=600)), PeerLost)
        flats = [values(rank, 100_000) for rank in range(3)]
        expected = torch.stack(flats).sum(0)
        for exchange in [wires.start(rank, flats[rank], number=2) for rank in range(3)]:
            exchange.future.wait()
        assert all(torch.equal(flat, expected) for flat in flats)


def test_a_worker_that_waits_in_an_earlier_operation_is_not_blamed():
    """Rank 0's deadline passes first; rank 1 answers that it has begun, too."""
    with Wires(3) as wires:
        second = wires.start(1, torch.ones(10), "ring", deadline_s=600)
        first = wires.start(0, torch.ones(10), "ring", deadline_s=1)
        assert failure(first).ranks == failure(second).ranks == (2,)


# A peer errs -------------------------------------------------------------------------------------


def test_a_peer_that_sends_junk_is_named_by_all_and_hears_why():
    with Wires(4) as wires:
        waiting = [wires.start(rank, torch.ones(10), "ring", deadline_s=600) for rank in range(3)]
        hearing = wires.start(3, torch.ones(10), "ring", deadline_s=600, number=2, channel=5)
        wires.ends[3][1].sock.send(b"GET / HTTP/1.1\r\n\r\n" * 10)
        errors = [failure(exchange) for exchange in waiting]
        assert type(errors[1]) is Corrupt
        for error in errors:
            assert error.ranks == (3,)
            assert "rank 3 on n3 sent bytes that are not a frame" in error.message
        assert "rank 3 on n3 sent bytes that are not a frame" in failure(hearing).message
        assert wires.ends[1][3].refused == 1


def test_peer_loss_seen_by_one_worker_ends_the_next_operation_of_all():
    with Wires(4) as wires:
        wires.ends[3][1].sock.send(bytes(100))
        wait_until(lambda: _raises(wires.loops[1].check))
        waiting = [wires.start(rank, torch.ones(10), "ring", deadline_s=600) for rank in range(3)]
        assert [failure(exchange).ranks for exchange in waiting] == [(3,)] * 3


def test_buffers_of_different_sizes_are_refused_with_the_peer_named():
    with Wires(2) as wires:
        small = wires.start(0, torch.ones(10), deadline_s=600)
        large = wires.start(1, torch.ones(30), deadline_s=600)
        errors = [failure(small), failure(large)]
        assert any("bytes where" in error.message for error in errors)


# This worker -------------------------------------------------------------------------------------


def test_closing_wakes_waiting_threads():
    with Wires(2) as wires:
        waiting = wires.start(0, torch.ones(4), deadline_s=600)
        threading.Timer(0.05, wires.loops[0].close).start()
        assert "this worker has left" in failure(waiting).message
        after = failure(wires.start(0, torch.ones(4), number=2, deadline_s=600))
        assert "this worker has left" in after.message
        wires.loops[0].close()


class Odd(Operation):
    """An operation with a mistake in it."""

    def begin(self, connections):
        raise KeyError("mistake")

    def needs(self, rank):
        return False

    def awaited(self):
        return set()


def test_defect_in_the_loop_ends_every_operation_with_that_reason(caplog):
    with Wires(3) as wires:
        mine = wires.start(0, torch.ones(4), "ring", deadline_s=600)
        theirs = wires.start(1, torch.ones(4), "ring", deadline_s=600)
        odd = Odd(7 << 40 | 1, 600, None)
        wires.loops[0].submit(odd)
        for exchange in (mine, odd):
            error = failure(exchange)
            assert "KeyError: 'mistake'" in error.message
            assert isinstance(error.__cause__, KeyError)
        assert "KeyError: 'mistake'" in failure(theirs).message, "the others learn it too"
        again = failure(wires.start(0, torch.ones(4), number=2, deadline_s=600))
        assert isinstance(again.__cause__, KeyError)
        with pytest.raises(WorkerError, match="mistake"):
            wires.loops[0].check()
    assert "the thread that moves bytes failed" in caplog.text


def test_small_operation_is_not_delayed_by_a_large_one():
    """Rank 1 floods rank 0 while rank 0 and rank 2 exchange small messages."""
    length = 32_000_000
    with Wires(3) as wires:
        flood = wires.make(0, torch.zeros(length), [ScheduleStep(takes=(Move(1, 0, length),))], channel=2)
        wires.loops[0].submit(flood)
        wires.loops[1].submit(
            wires.make(1, torch.ones(length), [ScheduleStep(sends=(Move(0, 0, length),))], channel=2)
        )
        wait_until(lambda: wires.ends[0][1].received_bytes > 0)
        for number in range(1, 4):
            parts = [
                wires.make(rank, torch.ones(4), _exchange_with(2 - rank), channel=3, number=number)
                for rank in (0, 2)
            ]
            for rank, part in zip((0, 2), parts, strict=True):
                wires.loops[rank].submit(part)
            for part in parts:
                part.future.wait()
        assert not flood.ended
        flood.future.wait()


def _exchange_with(peer):
    return [ScheduleStep(sends=(Move(peer, 0, 2),), adds=(Move(peer, 2, 4),))]


def test_a_thousand_operations_submitted_at_once_all_end():
    with Wires(2) as wires:
        flats = [[torch.ones(3) for _ in range(1000)] for _ in range(2)]
        waiting = [
            wires.start(rank, flats[rank][n], number=n + 1) for rank in range(2) for n in range(1000)
        ]
        for exchange in waiting:
            exchange.future.wait()
        assert all(bool((flat == 2).all()) for own in flats for flat in own)
