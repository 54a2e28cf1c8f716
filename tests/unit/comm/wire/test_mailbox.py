"""Messages arrive whole, in order, where they are wanted; and whoever waits learns of an end."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from echelon.comm.wire.exchange import as_bytes
from echelon.comm.wire.mailbox import Mailbox, MessageHead
from echelon.errors import PeerLost, WorkerError
from wires import Wires

BYE = 9


def posts(wires, **options):
    """Everybody's."""
    everybody = range(wires.size)
    return [Mailbox(wires.loops[rank], set(everybody) - {rank}, **options) for rank in everybody]


def take(mailbox, count=1):
    messages = [mailbox.receive(10) for _ in range(count)]
    assert None not in messages
    return messages


def failure(mailbox):
    """What ended a post; messages that came before are passed over."""

    def wait():
        for _ in range(100):
            mailbox.receive(60)

    with pytest.raises(WorkerError) as caught:
        wait()
    return caught.value


def test_a_message_has_its_head_and_its_payload():
    with Wires(2) as wires:
        one, other = posts(wires)
        head = MessageHead(3, table=2, shard=65535, flags=1, step=-(1 << 62), start=1 << 60)
        one.send(1, head, memoryview(b"some bytes"))
        one.send(1, MessageHead(4))
        first, second = take(other, 2)
        assert (first.peer, first.head, bytes(first.payload)) == (0, head, b"some bytes")
        assert (second.peer, second.head, bytes(second.payload)) == (0, MessageHead(4), b"")


def test_messages_of_one_peer_arrive_in_the_order_in_which_they_were_sent():
    """Small and large, while others talk; more than the sockets' buffers hold."""
    with Wires(3, buffer_bytes=4096, frame_bytes=2048) as wires:
        made = posts(wires)
        lengths = [0, 1, 70_000, 0, 5000, 3, 200_000, 0] * 5
        for sender in (0, 1):
            for number, length in enumerate(lengths):
                made[sender].send(2, MessageHead(1, step=number), memoryview(bytes([number]) * length))
        got = {0: [], 1: []}
        for message in take(made[2], 2 * len(lengths)):
            got[message.peer].append(message)
        for messages in got.values():
            assert [message.head.step for message in messages] == list(range(len(lengths)))
            for number, message in enumerate(messages):
                assert bytes(message.payload) == bytes([number]) * lengths[number]


def test_a_payload_goes_straight_to_where_it_is_wanted():
    room = torch.zeros(50_000, dtype=torch.float64)

    def place(peer, head, length):
        at = head.start * 8
        return as_bytes(room)[at : at + length] if head.kind == 1 else None

    with Wires(2) as wires:
        sender = Mailbox(wires.loops[0], {1})
        taker = Mailbox(wires.loops[1], {0}, place=place)
        given = torch.arange(30_000, dtype=torch.float64)
        sender.send(1, MessageHead(1, start=20_000), as_bytes(given))
        sender.send(1, MessageHead(2), memoryview(b"aside"))
        placed, aside = take(taker, 2)
        assert len(placed.payload) == 0
        assert bytes(aside.payload) == b"aside"
        assert torch.equal(room[20_000:], given)
        assert not room[:20_000].any()


def test_messages_that_came_before_anybody_listened_are_not_lost():
    with Wires(2) as wires:
        early = Mailbox(wires.loops[0], {1})
        for number in range(20):
            early.send(1, MessageHead(1, step=number), memoryview(b"x" * 1000))
        time.sleep(0.05)
        late = Mailbox(wires.loops[1], {0})
        assert [message.head.step for message in take(late, 20)] == list(range(20))


def test_messages_and_reductions_do_not_mix():
    with Wires(2) as wires:
        made = posts(wires)
        flats = [torch.full((20_000,), float(rank + 1)) for rank in range(2)]
        for number in range(1, 4):
            made[0].send(1, MessageHead(1, step=number), memoryview(b"y" * 30_000))
            under_way = [wires.start(rank, flats[rank], number=number) for rank in range(2)]
            for exchange in under_way:
                exchange.wait()
        assert [message.head.step for message in take(made[1], 3)] == [1, 2, 3]
        assert all(bool((flat == 12).all()) for flat in flats)


def test_whoever_sends_is_told_when_the_kernel_has_it():
    with Wires(2, buffer_bytes=4096) as wires:
        one, other = posts(wires)
        sent = threading.Event()
        one.send(1, MessageHead(1), memoryview(bytes(500_000)), sent.set)
        assert sent.wait(90)
        assert len(take(other)[0].payload) == 500_000


def test_no_message_in_time_is_no_error():
    with Wires(2) as wires:
        one, _ = posts(wires)
        assert one.receive(0.0) is None
        assert one.receive(-1.0) is None
        assert one.receive(0.01) is None


def test_a_peer_that_dies_is_named_to_whoever_waits():
    with Wires(3) as wires:
        made = posts(wires)
        killing = threading.Timer(0.05, wires.kill, (2,))
        killing.start()
        for mailbox in made[:2]:
            error = failure(mailbox)
            assert type(error) is PeerLost
            assert error.ranks == (2,)
            assert "rank 2 on n2" in error.message
        killing.join()


def test_what_a_peer_sent_before_it_died_is_received_first():
    with Wires(2) as wires:
        one, other = posts(wires)
        one.send(1, MessageHead(1, step=6))
        assert take(other)[0].head.step == 6  # it listens
        sent = threading.Event()
        one.send(1, MessageHead(1, step=7), sent=sent.set)
        assert sent.wait(90)
        wires.kill(0)
        assert take(other)[0].head.step == 7
        assert failure(other).ranks == (0,)


def test_a_peer_that_leaves_without_a_farewell_ends_the_post():
    with Wires(3) as wires:
        made = posts(wires, farewell=BYE)
        wires.loops[2].close()
        error = failure(made[0])
        assert error.ranks == (2,)
        assert "ended while the others were still training" in error.message


def test_a_peer_may_leave_after_its_farewell_and_the_others_go_on():
    with Wires(3) as wires:
        made = posts(wires, farewell=BYE)
        made[2].leave([0, 1], MessageHead(BYE), 90)
        wires.loops[2].close()
        assert [take(mailbox)[0].head.kind for mailbox in made[:2]] == [BYE, BYE]
        time.sleep(0.05)
        made[0].send(1, MessageHead(1, step=5))
        assert take(made[1])[0].head.step == 5
        assert made[0].receive(0.0) is None


@pytest.mark.parametrize("attempt", range(5))
def test_a_farewell_is_never_lost_behind_much_that_is_under_way(attempt):
    """A loop that is closed drops what it still has; so leaving waits for the last message."""
    with Wires(2, buffer_bytes=4096) as wires:
        one, other = posts(wires, farewell=BYE)
        for number in range(10):
            one.send(1, MessageHead(1, step=number), memoryview(bytes(20_000)))
        one.leave([1], MessageHead(BYE), 90)
        wires.loops[0].close()
        messages = take(other, 11)
        assert [message.head.kind for message in messages] == [1] * 10 + [BYE]
        time.sleep(0.02)
        assert other.receive(0.0) is None


def test_leaving_does_not_wait_for_a_peer_that_is_dead():
    with Wires(2) as wires:
        one, _ = posts(wires)
        wires.kill(1)
        failure(one)
        one.leave([1], MessageHead(BYE), 10_000)


def test_after_the_loop_is_closed_a_post_says_so():
    with Wires(2) as wires:
        one, _ = posts(wires)
        wires.loops[0].close()
        assert "left the group" in failure(one).message
