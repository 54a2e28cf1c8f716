"""Messages of any length arrive whole on all workers, or workers that lack one get the reason."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.comm.group import Group
from echelon.comm.wire.all_to_all import (
    ATTEMPTS,
    HEAD_BYTES,
    AllToAll,
    pack_head,
    unpack_head,
)
from echelon.comm.wire.connection import Sink
from echelon.comm.wire.frames import HEADER_BYTES, checksum
from echelon.comm.wire.loop import CHANNEL_BITS
from echelon.comm.wire.notices import LeaveNotice
from echelon.errors import Corrupt, MismatchedCalls, PeerLost, RoundTimeout, WorkerError
from wires import Wires, values

TAG = 1 << CHANNEL_BITS | 1
HEAD, PAYLOAD, ANSWER = range(3)


def text(sender, receiver, length):
    """Bytes unique to this pair."""
    return random.Random(sender * 100 + receiver).randbytes(length)


def make(messages, *, number=1, channel=1, deadline_s=90, priority=0):
    """One worker's part: `messages` by peer."""
    outgoing = {peer: memoryview(message) for peer, message in messages.items()}
    tag = channel << CHANNEL_BITS | number
    return AllToAll(tag, outgoing, deadline_s=deadline_s, priority=priority)


def start_all(wires, lengths, *, order=None, **options):
    """All workers' parts, in flight; `lengths[a][b]` is that of a's message to b."""
    size = wires.size
    operations = {}
    for rank in order or range(size):
        given = {p: text(rank, p, lengths[rank][p]) for p in range(size) if p != rank}
        operations[rank] = make(given, **options)
        wires.loops[rank].submit(operations[rank])
    return [operations[rank] for rank in range(size)]


def check_all(operations, lengths):
    """All workers have all messages, and the operation has ended."""
    for rank, all_to_all in enumerate(operations):
        got = {peer: bytes(message.numpy()) for peer, message in all_to_all.received.wait().items()}
        assert got == {p: text(p, rank, lengths[p][rank]) for p in range(len(operations)) if p != rank}
    for all_to_all in operations:
        all_to_all.future.wait()


def even(size, length):
    return [[length] * size for _ in range(size)]


class Tampering:
    """Changes the messages that one end of a connection sends: `change` gets the key and the bytes.

    It gives other bytes, or None if these are never to be sent.
    """

    def __init__(self, connection, change):
        self._send = connection.send
        self._change = change
        connection.send = self

    def __call__(self, key, data, priority, sent):
        changed = self._change(key[1], data)
        if changed is not None:
            self._send(key, memoryview(changed), priority, sent)


def flipped(data):
    changed = bytearray(data)
    changed[len(changed) // 2] ^= 4
    return changed


def damaged(*numbers):
    """A change that damages these messages."""
    return lambda number, data: flipped(data) if number in numbers else data


class Told:
    """A callback that counts."""

    def __init__(self):
        self.times = 0
        self.event = threading.Event()

    def __call__(self):
        self.times += 1
        self.event.set()


def said(all_to_all):
    """The error of an all-to-all."""
    with pytest.raises(WorkerError) as caught:
        all_to_all.received.wait()
    return caught.value


def let_pass(loop):
    """Wait until a loop has handled everything submitted before."""
    probe = make({}, channel=9)
    loop.submit(probe)
    probe.future.wait()


class Hand:
    """A peer whose connection the test serves by hand."""

    def __init__(self, wires, rank, peer):
        self.connection = wires.ends[rank][peer]

    def send(self, number, data, tag=TAG):
        self.connection.send((tag, number), memoryview(data), 0, lambda: None)
        while self.connection.wants_to_write:
            self.connection.write()

    def give(self, message, attempt=0):
        self.send(3 * attempt + HEAD, pack_head(len(message), checksum(memoryview(message))))
        self.send(3 * attempt + PAYLOAD, message)

    def leave(self):
        """In peace."""
        self.connection.tell(LeaveNotice(""))
        self.connection.write()
        self.connection.sock.shutdown(socket.SHUT_WR)

    def take(self, number, length):
        """Read until that message is here."""
        got = bytearray(length)
        done = threading.Event()
        self.connection.expect((TAG, number), Into(memoryview(got), done))
        deadline = time.monotonic() + 90
        while not done.is_set():
            assert time.monotonic() < deadline
            self.connection.read()
        return bytes(got)


class Into(Sink):
    def __init__(self, memory, done):
        self.size_bytes, self._memory, self._done = len(memory), memory, done

    def place(self, offset, length):
        return self._memory[offset : offset + length]

    def take(self, offset, data):
        raise AssertionError

    def finished(self):
        self._done.set()


# All is well ------------------------------------------------------------------------------------------


@settings(max_examples=50, deadline=None)
@given(size=st.integers(2, 5), frame_bytes=st.sampled_from([8, 64, 1024]), data=st.data())
def test_messages_of_any_length_arrive_in_any_order_of_arrival(size, frame_bytes, data):
    length = st.sampled_from([0, 0, 1, 7, 64, 65, 1000])
    lengths = data.draw(
        st.lists(st.lists(length, min_size=size, max_size=size), min_size=size, max_size=size)
    )
    order = data.draw(st.permutations(range(size)), label="who submits first")
    with Wires(size, frame_bytes=frame_bytes, buffer_bytes=1) as wires:
        check_all(start_all(wires, lengths, order=order), lengths)


def test_messages_of_many_frames_arrive_over_small_buffers():
    lengths = [[0, 3_000_000, 5], [700_001, 0, 0], [1, 1_048_576, 0]]
    with Wires(3, buffer_bytes=4096) as wires:
        check_all(start_all(wires, lengths), lengths)


def test_the_same_memory_may_go_to_all():
    message = memoryview(text(0, 0, 100_000))
    with Wires(3) as wires:
        operations = [
            AllToAll(TAG, dict.fromkeys({0, 1, 2} - {r}, message), deadline_s=90) for r in range(3)
        ]
        for rank, all_to_all in enumerate(operations):
            wires.loops[rank].submit(all_to_all)
        for all_to_all in operations:
            assert [bytes(got.numpy()) for got in all_to_all.received.wait().values()] == [
                bytes(message)
            ] * 2


def test_a_group_of_one_has_nothing_to_wait_for():
    with Wires(2) as wires:
        all_to_all = make({})
        wires.loops[0].submit(all_to_all)
        assert all_to_all.received.wait() == {}
        all_to_all.future.wait()


def test_all_to_alls_and_sums_on_the_same_and_other_channels_stay_separate():
    lengths = [[0, 90_000, 3], [1, 0, 400_000], [0, 17, 0]]
    with Wires(3, frame_bytes=4096, buffer_bytes=4096) as wires:
        operations, sums, flats = [], [], []
        for turn in range(4):
            channel, number = 1 + turn % 2, 1 + turn
            operations.append(start_all(wires, lengths, number=number, channel=channel, priority=-turn))
            flats.append([values(rank, 50_000) for rank in range(3)])
            for rank in range(3):
                for own, tag in ((flats[-1][rank], number + 100), (values(rank, 9), number + 200)):
                    sums.append(wires.start(rank, own, number=tag, channel=channel, priority=turn))
        for turn in reversed(range(4)):
            check_all(operations[turn], lengths)
        for exchange in sums:
            exchange.future.wait()
        expected = sum(values(rank, 50_000) for rank in range(3))
        assert all(torch.equal(flat, expected) for turn in flats for flat in turn)


def test_an_urgent_all_to_all_overtakes_another():
    """The slow one cannot have ended: it has more bytes than are read meanwhile."""
    with Wires(2, buffer_bytes=4096, frame_bytes=4096, silent=(1,)) as wires:
        hand = Hand(wires, 1, 0)
        slow, quick = make({1: bytes(400_000)}, number=2, priority=5), make({1: b"now"}, number=1)
        wires.loops[0].submit(slow)
        wires.loops[0].submit(quick)
        hand.take(HEAD, HEAD_BYTES)
        assert hand.take(PAYLOAD, 3) == b"now"
        assert hand.connection.received_bytes < 400_000
        hand.give(b"you")
        assert bytes(quick.received.wait()[1].numpy()) == b"you"
        assert not slow.received.done()


def test_an_answer_overtakes_the_most_urgent_messages():
    with Wires(2, buffer_bytes=4096, frame_bytes=4096, silent=(1,)) as wires:
        hand = Hand(wires, 1, 0)
        for number, priority in ((2, -5), (1, 0)):
            wires.loops[0].submit(make({1: bytes(400_000)}, number=number, priority=priority))
        hand.give(b"you")
        assert hand.take(ANSWER, 1) == b"\1"
        assert hand.connection.received_bytes < 400_000


@pytest.mark.parametrize("length", [0, 1, 4096, 10_000])
def test_bytes_are_counted_as_the_connections_carry_them(length):
    """Without the headers of frames, and without answers."""
    with Wires(3, frame_bytes=4096) as wires:
        lengths = even(3, length)
        operations = start_all(wires, lengths)
        check_all(operations, lengths)
        for rank, all_to_all in enumerate(operations):
            assert all_to_all.sent_bytes == 2 * (HEAD_BYTES + length)
            assert all_to_all.repeats == 0
            carried = sum(connection.sent_bytes for connection in wires.ends[rank].values())
            frames = 1 + -(-length // 4096) + 1
            assert carried == all_to_all.sent_bytes + 2 * (frames * HEADER_BYTES + 1)


def test_times_are_taken_in_their_order():
    with Wires(2) as wires:
        before = time.perf_counter()
        operations = start_all(wires, even(2, 1000))
        for all_to_all in operations:
            all_to_all.future.wait()
            timing = all_to_all.timing
            assert before < timing.begun <= timing.sent < time.perf_counter()
            assert timing.begun <= timing.ended < time.perf_counter()


def test_messages_may_be_used_before_they_are_answered():
    with Wires(2, silent=(1,)) as wires:
        hand = Hand(wires, 1, 0)
        all_to_all = make({1: b"mine"})
        wires.loops[0].submit(all_to_all)
        hand.give(b"yours")
        assert bytes(all_to_all.received.wait()[1].numpy()) == b"yours"
        assert all_to_all.received.done()
        assert not all_to_all.ended
        assert all_to_all.needs(1)
        assert all_to_all.awaited() == {1}
        ended = all_to_all.timing.ended
        assert ended > 0
        hand.send(ANSWER, b"\1")
        all_to_all.future.wait()
        assert all_to_all.timing.ended == ended, "that is when the result was there"
        assert hand.take(ANSWER, 1) == b"\1"
        assert not all_to_all.needs(1)
        assert all_to_all.awaited() == set()


def test_an_all_to_all_ends_only_after_its_own_answers_are_sent():
    """A worker may leave when it has ended, so no peer may need it after that."""
    with Wires(2, silent=(1,)) as wires:
        Tampering(wires.ends[0][1], lambda number, data: None if number == ANSWER else data)
        hand = Hand(wires, 1, 0)
        all_to_all = make({1: b"mine"})
        wires.loops[0].submit(all_to_all)
        hand.send(ANSWER, b"\1")
        hand.give(b"yours")
        all_to_all.received.wait()
        let_pass(wires.loops[0])
        assert not all_to_all.ended
        assert all_to_all.needs(1)
        assert all_to_all.awaited() == {1}


def test_a_message_that_arrives_before_the_operation_begins_is_not_lost():
    with Wires(2, silent=(1,)) as wires:
        hand = Hand(wires, 1, 0)
        hand.give(b"early")
        let_pass(wires.loops[0])
        all_to_all = make({1: b""})
        wires.loops[0].submit(all_to_all)
        assert bytes(all_to_all.received.wait()[1].numpy()) == b"early"


# Damage -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 5000])
@pytest.mark.parametrize("number", [HEAD, PAYLOAD])
def test_a_message_damaged_once_is_sent_again_and_arrives_right(number, length):
    lengths = even(3, length)
    with Wires(3, frame_bytes=1024) as wires:
        Tampering(wires.ends[0][2], damaged(number))
        operations = start_all(wires, lengths)
        check_all(operations, lengths)
        assert [all_to_all.repeats for all_to_all in operations] == [1, 0, 0]
        assert operations[0].sent_bytes == 2 * (HEAD_BYTES + length), "repeats are not counted"


def test_a_damaged_head_of_an_empty_message_is_sent_again():
    with Wires(2) as wires:
        Tampering(wires.ends[0][1], damaged(HEAD))
        operations = start_all(wires, even(2, 0))
        check_all(operations, even(2, 0))
        assert [all_to_all.repeats for all_to_all in operations] == [1, 0]


def test_a_message_that_is_damaged_twice_still_arrives():
    lengths = even(2, 3000)
    with Wires(2) as wires:
        for rank in range(2):  # its first head and its second payload
            Tampering(wires.ends[rank][1 - rank], damaged(HEAD, 3 + PAYLOAD))
        operations = start_all(wires, lengths)
        check_all(operations, lengths)
        assert [all_to_all.repeats for all_to_all in operations] == [2, 2]


def test_nothing_is_left_with_the_connection_after_damage():
    """Messages that stay aside for ever would make the connection pause."""
    with Wires(2, frame_bytes=1024) as wires:
        for rank in range(2):
            Tampering(wires.ends[rank][1 - rank], damaged(HEAD, 3 + HEAD))
        operations = start_all(wires, even(2, 9000))
        check_all(operations, even(2, 9000))
        for rank in range(2):
            connection = wires.ends[rank][1 - rank]
            assert not any(connection.has((TAG, number)) for number in range(3 * ATTEMPTS))


def test_a_message_changed_after_the_operation_was_created_is_refused():
    """The checksum is that of the original. Once the message is restored, it is accepted."""
    memory = bytearray(text(0, 1, 2000))
    with Wires(2) as wires:
        mine, theirs = make({1: memory}), make({0: b""})
        memory[77] ^= 1

        def mend(number, data):
            if number == 3 + HEAD:
                memory[77] ^= 1
            return data

        Tampering(wires.ends[0][1], mend)
        wires.loops[0].submit(mine)
        wires.loops[1].submit(theirs)
        assert bytes(theirs.received.wait()[0].numpy()) == text(0, 1, 2000)
        mine.future.wait()
        assert mine.repeats == 1


def test_a_message_damaged_each_time_ends_the_operation_on_all_workers_at_once():
    with Wires(3) as wires:
        Tampering(wires.ends[0][2], lambda number, data: flipped(data) if number % 3 == PAYLOAD else data)
        operations = start_all(wires, even(3, 1000))
        receiver = said(operations[2])
        assert type(receiver) is Corrupt
        assert receiver.ranks == (0,)
        assert "rank 0 on n0 sent a message 3 times, damaged each time" in receiver.message
        assert operations[0].repeats == ATTEMPTS - 1
        with pytest.raises(PeerLost, match=r"rank 2 on n2 failed: rank 0 on n0 sent a message 3 times"):
            operations[0].future.wait()
        # What it has, the third one keeps; but from now on nothing works any more.
        with contextlib.suppress(WorkerError):
            operations[1].future.wait()
        for rank in range(3):
            later = make({peer: b"x" for peer in range(3) if peer != rank}, number=2)
            wires.loops[rank].submit(later)
            said(later)


@pytest.mark.parametrize(
    ("head", "complaint"),
    [
        (pack_head(1 << 41, 0), "announced a message of 2199023255552 bytes"),
        (pack_head((1 << 64) - 1, 0), "announced a message of 18446744073709551615 bytes"),
    ],
)
def test_a_wrong_head_is_refused_and_its_sender_named(head, complaint):
    with Wires(2, silent=(1,)) as wires:
        all_to_all = make({1: b"mine"})
        wires.loops[0].submit(all_to_all)
        Hand(wires, 1, 0).send(HEAD, head)
        error = said(all_to_all)
        assert type(error) is Corrupt
        assert error.ranks == (1,)
        assert error.message == f"rank 1 on n1 {complaint}"


@pytest.mark.parametrize("head", [pack_head(5, 0)[:7], pack_head(5, 0) + b"x", b""])
def test_a_head_of_another_size_is_of_another_call(head):
    with Wires(2, silent=(1,)) as wires:
        all_to_all = make({1: b"mine"})
        wires.loops[0].submit(all_to_all)
        Hand(wires, 1, 0).send(HEAD, head)
        error = said(all_to_all)
        assert type(error) is MismatchedCalls
        assert f"rank 1 on n1 sent {len(head)} bytes where 20 were due" in error.message


def test_a_payload_of_another_length_than_announced_is_refused():
    with Wires(2, silent=(1,)) as wires:
        all_to_all = make({1: b"mine"})
        wires.loops[0].submit(all_to_all)
        hand = Hand(wires, 1, 0)
        hand.send(HEAD, pack_head(5, checksum(memoryview(b"yours"))))
        hand.send(PAYLOAD, b"your")
        assert "rank 1 on n1 sent 4 bytes where 5 were due" in said(all_to_all).message


def test_a_message_for_which_there_is_no_memory_is_refused(monkeypatch):
    def empty(*_, **__):
        raise RuntimeError("not enough memory")

    with Wires(2, silent=(1,)) as wires:
        all_to_all = make({1: b"mine"})
        monkeypatch.setattr(torch, "empty", empty)
        wires.loops[0].submit(all_to_all)
        Hand(wires, 1, 0).send(HEAD, pack_head(1 << 39, 1))
        assert "bytes, and there is no memory for it" in said(all_to_all).message


@pytest.mark.parametrize("answers", [[b"\0"], [b"\2", b"\2", b"\2"]])
def test_invalid_answer_is_refused(answers):
    """Also a request for more attempts than allowed."""
    with Wires(2, silent=(1,)) as wires:
        all_to_all = make({1: b"mine"})
        wires.loops[0].submit(all_to_all)
        hand = Hand(wires, 1, 0)
        for attempt, answer in enumerate(answers):
            hand.take(3 * attempt + HEAD, HEAD_BYTES)
            assert hand.take(3 * attempt + PAYLOAD, 4) == b"mine"
            hand.send(3 * attempt + ANSWER, answer)
        assert said(all_to_all).message == "rank 1 on n1 sent an unknown answer"


@settings(max_examples=100, deadline=None)
@given(
    length=st.integers(0, 2**64 - 1),
    digest=st.integers(0, 2**64 - 1),
    bit=st.integers(0, 8 * HEAD_BYTES - 1),
)
def test_a_head_is_read_as_written_or_known_to_be_damaged(length, digest, bit):
    raw = bytearray(pack_head(length, digest))
    assert len(raw) == HEAD_BYTES
    assert unpack_head(raw) == (length, digest)
    raw[bit // 8] ^= 1 << bit % 8
    assert unpack_head(raw) is None


# Losses -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sent", ["nothing", "head", "half of the payload"])
def test_a_peer_that_dies_before_its_message_is_here_is_named(sent):
    with Wires(2, silent=(1,), frame_bytes=2000) as wires:
        all_to_all, told = make({1: b"mine"}), Told()
        all_to_all.received.add_done_callback(told)
        wires.loops[0].submit(all_to_all)
        hand = Hand(wires, 1, 0)
        if sent != "nothing":
            hand.send(HEAD, pack_head(100_000, 1))
        if sent == "half of the payload":
            hand.connection.send((TAG, PAYLOAD), memoryview(bytes(100_000)), 0, lambda: None)
            hand.connection.write()
            assert hand.connection.wants_to_write
        wires.kill(1)
        error = said(all_to_all)
        assert type(error) is PeerLost
        assert error.ranks == (1,)
        assert "rank 1 on n1 is gone" in error.message
        with pytest.raises(PeerLost):
            all_to_all.future.wait()
        assert told.times == 1


def test_messages_stay_usable_when_a_peer_dies_before_it_answers():
    with Wires(2, silent=(1,)) as wires:
        all_to_all, told = make({1: b"mine"}), Told()
        all_to_all.received.add_done_callback(told)
        wires.loops[0].submit(all_to_all)
        Hand(wires, 1, 0).give(b"yours")
        assert told.event.wait(90)
        wires.kill(1)
        with pytest.raises(PeerLost, match="rank 1 on n1 is gone"):
            all_to_all.future.wait()
        assert bytes(all_to_all.received.wait()[1].numpy()) == b"yours"
        assert told.times == 1


def test_a_peer_that_leaves_without_error_ends_the_operation_that_needs_it():
    with Wires(3) as wires:
        operations = [make({p: b"x" for p in range(3) if p != rank}) for rank in range(2)]
        for rank in range(2):
            wires.loops[rank].submit(operations[rank])
        wires.loops[2].close()
        for all_to_all in operations:
            assert "rank 2 on n2 ended while the others were still training" in said(all_to_all).message


@pytest.mark.parametrize("did", ["answer", "give"])
def test_a_peer_is_needed_until_it_has_sent_both_its_message_and_its_answer(did):
    with Wires(2, silent=(1,)) as wires:
        hand = Hand(wires, 1, 0)
        all_to_all = make({1: b"mine"})
        wires.loops[0].submit(all_to_all)
        hand.take(HEAD, HEAD_BYTES)
        if did == "answer":
            hand.send(ANSWER, b"\1")
        else:
            hand.give(b"yours")
        hand.leave()
        with pytest.raises(PeerLost, match="rank 1 on n1 ended while the others were still training"):
            all_to_all.future.wait()
        assert all_to_all.awaited() == {1}
        if did == "give":
            assert bytes(all_to_all.received.wait()[1].numpy()) == b"yours"


def test_an_all_to_all_that_begins_after_a_peer_has_left_fails():
    with Wires(2) as wires:
        wires.loops[1].close()
        all_to_all = make({1: b"x"})
        wires.loops[0].submit(all_to_all)
        assert said(all_to_all).ranks == (1,)


def test_a_peer_may_leave_once_the_others_have_its_messages():
    lengths = [[0, 500_000], [3, 0]]
    for _ in range(5):
        with Wires(2, buffer_bytes=4096) as wires:
            mine, theirs = start_all(wires, lengths)
            mine.received.wait()
            mine.finish_sending()
            assert mine.ended
            wires.loops[0].close()
            assert bytes(theirs.received.wait()[0].numpy()) == text(0, 1, 500_000)
            theirs.future.wait()


def test_a_leaving_worker_does_not_wait_for_peers_whose_messages_are_missing():
    with Wires(2) as wires:
        all_to_all = make({1: b"x"})
        wires.loops[0].submit(all_to_all)
        all_to_all.finish_sending()
        assert not all_to_all.ended


def test_the_deadline_names_the_missing_worker():
    with Wires(3) as wires:
        operations = [make({p: b"x" for p in range(3) if p != rank}, deadline_s=0.5) for rank in range(2)]
        for rank in range(2):
            wires.loops[rank].submit(operations[rank])
        for all_to_all in operations:
            error = said(all_to_all)
            assert type(error) is RoundTimeout
            assert error.ranks == (2,)


@pytest.mark.parametrize("number", [HEAD, PAYLOAD, ANSWER])
def test_the_deadline_names_the_worker_whose_message_or_answer_is_missing(number):
    """All workers have begun, but a message is missing."""
    with Wires(3) as wires:
        Tampering(wires.ends[2][0], lambda n, data: None if n == number else data)
        operations = start_all(wires, even(3, 10), deadline_s=0.5)
        with pytest.raises(RoundTimeout) as caught:
            operations[0].future.wait()
        assert caught.value.ranks in ((2,), (0,)), "or rank 2 was first to say that it is not answered"
        assert operations[0].awaited() == {2}
        if number == ANSWER:
            assert bytes(operations[0].received.wait()[2].numpy()) == text(2, 0, 10)
        else:
            assert type(said(operations[0])) is RoundTimeout


# Callbacks --------------------------------------------------------------------------------------------


def test_a_callback_runs_once_when_all_messages_have_arrived():
    with Wires(2, silent=(1,)) as wires:
        hand = Hand(wires, 1, 0)
        all_to_all, before, after = make({1: b"mine"}), Told(), Told()
        assert all_to_all.received.add_done_callback(before)
        wires.loops[0].submit(all_to_all)
        hand.take(HEAD, HEAD_BYTES)
        hand.send(HEAD, pack_head(5, checksum(memoryview(b"yours"))))
        assert before.times == 0
        hand.send(PAYLOAD, b"yours")
        assert before.event.wait(90)
        assert all_to_all.received.done()
        all_to_all.received.add_done_callback(after)
        assert after.times == 1
        hand.send(ANSWER, b"\1")
        all_to_all.future.wait()
        assert (before.times, after.times) == (1, 1)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_callback_runs_once_when_this_worker_leaves(when):
    with Wires(2) as wires:
        all_to_all, told = make({1: b"mine"}), Told()
        if when == "before":
            wires.loops[0].close()
        all_to_all.received.add_done_callback(told)
        wires.loops[0].submit(all_to_all)
        wires.loops[0].close()
        assert told.times == 1
        assert "this worker has left the group" in said(all_to_all).message


def test_the_callback_of_a_sum_runs_when_it_is_done():
    with Wires(2) as wires:
        flats = [values(rank, 1000) for rank in range(2)]
        first = wires.start(0, flats[0])
        told = Told()
        assert first.future.add_done_callback(told)
        assert told.times == 0
        wires.start(1, flats[1]).future.wait()
        assert told.event.wait(90)
        assert first.ended
        first.future.wait()
        assert told.times == 1


def test_a_thread_makes_progress_for_its_peers_before_it_blocks_and_not_otherwise():
    with Wires(2) as wires:
        progressed = []
        operations = {0: make({1: b"to one"}), 1: make({0: b"to zero"})}

        def begin_the_other():
            progressed.append(1)
            if len(progressed) == 1:  # what this thread waits for depends on it
                wires.loops[1].submit(operations[1])

        wires.loops[0].progress = begin_the_other
        wires.loops[0].submit(operations[0])
        assert bytes(operations[0].received.wait()[1].numpy()) == b"to zero"
        assert progressed == [1]
        operations[1].received.wait()
        operations[0].future.wait()
        before = len(progressed)
        operations[0].received.wait()
        operations[0].future.wait()
        assert len(progressed) == before
        timing = operations[0].received.timing
        assert timing.ended >= timing.begun > 0
        assert operations[0].sent_bytes == HEAD_BYTES + 6
        assert operations[0].repeats == 0


def test_a_timeout_names_the_awaited_worker_and_leaves_the_operation_in_flight():
    with Wires(3) as wires:
        operations = {rank: make({peer: b"x" for peer in range(3) if peer != rank}) for rank in range(3)}
        for rank in (0, 1):
            wires.loops[rank].submit(operations[rank])
        let_pass(wires.loops[0])
        operations[0].received.add_done_callback(told := Told())
        with pytest.raises(RoundTimeout, match=r"rank 2 on n2 did not arrive within 0\.2 s") as caught:
            operations[0].received.wait(0.2)
        assert 2 in caught.value.ranks
        assert told.times == 0
        wires.loops[2].submit(operations[2])
        assert sorted(operations[0].received.wait()) == [1, 2]


# Groups that can only gather and broadcast ------------------------------------------------------------


class Paired(Group):
    """Two members in two threads that see each other's tensors; `change` damages bytes in transfer."""

    size = 2

    def __init__(self, rank, table, barrier, change):
        self.rank, self._table, self._barrier, self._change = rank, table, barrier, change

    def all_gather(self, tensor):
        self._table[self.rank] = tensor
        self._barrier.wait(90)
        gathered = [part.clone() for part in self._table]
        self._barrier.wait(90)
        return gathered

    def broadcast(self, tensor, source=0):
        self._table[self.rank] = tensor
        self._barrier.wait(90)
        if self.rank != source:
            tensor.copy_(self._table[source])
            self._change(tensor)
        self._barrier.wait(90)

    def all_reduce(self, tensor, op="sum", *, priority=0):
        raise NotImplementedError

    def fork(self):
        raise NotImplementedError

    def close(self):
        raise NotImplementedError


def paired(outgoing, change=lambda tensor: None):
    """The messages, or the error, of each of two members."""
    table, barrier, results = [None, None], threading.Barrier(2), [None, None]

    def all_to_all(rank):
        given = [torch.tensor(list(message), dtype=torch.uint8) for message in outgoing[rank]]
        try:
            messages = Paired(rank, table, barrier, change).all_to_all(given)
            results[rank] = [bytes(part.numpy()) for part in messages.received.wait()], messages.sent_bytes
        except WorkerError as error:
            results[rank] = error

    threads = [threading.Thread(target=all_to_all, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@settings(max_examples=50, deadline=None)
@given(*[st.binary(max_size=20)] * 4)
def test_any_group_that_can_gather_and_broadcast_can_all_to_all(a, b, c, d):
    one, other = paired([[a, b], [c, d]])
    assert one[0] == [a, c]
    assert other[0] == [b, d]
    assert one[1] - other[1] == len(b) - len(c)


def test_a_damaged_message_is_never_returned():
    def damage(tensor):
        if tensor.numel() == 5:
            tensor[3] += 1

    one, other = paired([[b"", b"four"], [b"fives", b""]], damage)
    assert type(one) is Corrupt
    assert one.ranks == (1,)
    assert one.message == "rank 1 sent a damaged message"
    assert other[0] == [b"four", b""]
