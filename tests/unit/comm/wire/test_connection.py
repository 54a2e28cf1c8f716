"""Two connections over a pair of sockets, driven by hand: messages arrive, wrong bytes are refused."""

from __future__ import annotations

import socket
from contextlib import contextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.comm.wire import frames, notices
from echelon.comm.wire.connection import Connection, Sink
from echelon.comm.wire.frames import HEADER_BYTES, NOTICES, Header
from echelon.comm.wire.notices import LeaveNotice, Question
from echelon.comm.wire.seals import PAYLOAD, Checksum
from echelon.errors import Corrupt, StaleView

VIEW = bytes(range(16))
FRAME = 64


class Buffer(Sink):
    """Receives into its own memory, or gets pieces."""

    def __init__(self, size, in_place=True, log=None):
        self.size_bytes = size
        self.memory = bytearray(size)
        self.in_place = in_place
        self.done = 0
        self.log = log if log is not None else []

    def place(self, offset, length):
        return memoryview(self.memory)[offset : offset + length] if self.in_place else None

    def take(self, offset, data):
        assert not self.in_place
        self.memory[offset : offset + len(data)] = data

    def finished(self):
        self.done += 1
        self.log.append(self)


@contextmanager
def two(tiny=False, view=VIEW, **options):
    one, other = socket.socketpair()
    if tiny:
        for sock in (one, other):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
    with one, other:
        yield (
            Connection(one, view=view, peer="rank 1 on b", frame_bytes=FRAME),
            Connection(other, view=VIEW, peer="rank 0 on a", frame_bytes=FRAME, **options),
        )


def content(size, seed=1):
    return bytes((seed * 7 + i * 31) % 251 for i in range(size))


def nothing():
    pass


def send(connection, key, data, priority=0, sent=nothing):
    connection.send(key, memoryview(data), priority, sent)


def pump(*connections):
    """Transfer bytes until none are left."""
    before = None
    while before != (now := [(c.sent_bytes, c.received_bytes) for c in connections]):
        before = now
        for connection in connections:
            connection.write()
            connection.read()


def pump_out(connection):
    while connection.wants_to_write:
        connection.write()


def wire(*messages, **options):
    """The bytes of some messages on the wire."""
    with two(**options) as (sender, receiver):
        for key, data in messages:
            send(sender, key, data)
        sender.write()
        return receiver.sock.recv(1 << 20)


def feed(receiver, sender, data):
    sender.sock.sendall(data)
    receiver.read()


@settings(max_examples=60, deadline=None)
@given(data=st.data(), tiny=st.booleans())
def test_any_messages_arrive_whole_expected_before_or_after_they_arrive(data, tiny):
    """Messages of any size and priority, expected in any order, before or after they arrive."""
    sizes = data.draw(st.lists(st.integers(0, 400), max_size=8), label="sizes")
    urgency = [data.draw(st.integers(-2, 2)) for _ in sizes]
    in_place = [data.draw(st.booleans()) for _ in sizes]
    keys = [(1 + n % 2, n) for n in range(len(sizes))]
    steps = data.draw(
        st.permutations([(what, n) for what in ("send", "expect") for n in range(len(sizes))])
    )
    sent = []
    with two(tiny=tiny) as (sender, receiver):
        sinks = [Buffer(size, place) for size, place in zip(sizes, in_place, strict=True)]
        for what, n in steps:
            if what == "send":
                send(sender, keys[n], content(sizes[n], n), urgency[n], lambda n=n: sent.append(n))
            else:
                receiver.expect(keys[n], sinks[n])
            for _ in range(data.draw(st.integers(0, 2))):
                sender.write()
                receiver.read()
        pump(sender, receiver)
        for n, sink in enumerate(sinks):
            assert bytes(sink.memory) == content(sizes[n], n)
            assert sink.done == 1
        assert sorted(sent) == list(range(len(sizes)))
        frame_count = sum(max(1, -(-size // FRAME)) for size in sizes)
        assert sender.sent_bytes == receiver.received_bytes == sum(sizes) + frame_count * HEADER_BYTES
        assert not sender.wants_to_write
        assert (receiver.refused, receiver.broken, receiver.paused) == (0, None, False)


@settings(max_examples=20, deadline=None)
@given(sizes=st.lists(st.integers(0, 3000), min_size=1, max_size=5), seed=st.integers(0, 99))
def test_both_directions_at_once_through_tiny_buffers(sizes, seed):
    with two(tiny=True) as ends:
        sinks = [[Buffer(size) for size in sizes] for _ in ends]
        for end, own in zip(ends, sinks, strict=True):
            for n, size in enumerate(sizes):
                end.expect((1, n), own[n])
                send(end, (1, n), content(size, seed))
        pump(*ends)
        for own in sinks:
            assert [bytes(sink.memory) for sink in own] == [content(size, seed) for size in sizes]
        assert ends[0].sent_bytes == ends[1].received_bytes == ends[1].sent_bytes == ends[0].received_bytes


def test_an_urgent_message_overtakes_between_two_frames():
    with two(tiny=True) as (sender, receiver):
        log = []
        large, urgent, equal = Buffer(50_000, log=log), Buffer(10, log=log), Buffer(10, log=log)
        for n, sink in enumerate((large, urgent, equal)):
            receiver.expect((1, n), sink)
        send(sender, (1, 0), content(50_000), priority=0)
        sender.write()
        assert 0 < sender.sent_bytes < 50_000, "the kernel has not taken all of it"
        send(sender, (1, 2), content(10), priority=0)
        send(sender, (1, 1), content(10), priority=-1)
        pump(sender, receiver)
        assert log == [urgent, large, equal]
        assert bytes(large.memory) == content(50_000)


def test_notices_overtake_all_messages_and_are_not_counted_as_payload():
    with two(tiny=True) as (sender, receiver):
        send(sender, (1, 0), content(50_000), priority=-1000)
        sender.write()
        sender.tell(Question(9))
        sender.tell(LeaveNotice("done"))
        sink = Buffer(50_000)
        receiver.expect((1, 0), sink)
        while not receiver.notices:
            sender.write()
            receiver.read()
        assert not sink.done
        pump(sender, receiver)
        assert receiver.notices == [Question(9), LeaveNotice("done")]
        assert bytes(sink.memory) == content(50_000)


def test_one_read_of_a_connection_is_short_however_much_has_arrived():
    """Other connections must be served, too."""
    with two() as (sender, receiver):
        for n in range(200):
            send(sender, (1, n), b"x")
        sender.write()
        assert sender.wants_to_write
        assert sender.progressed, "there would be room"
        pump_out(sender)
        receiver.read()
        assert 0 < receiver.received_bytes < sender.sent_bytes / 4
        pump(sender, receiver)
        assert receiver.received_bytes == sender.sent_bytes == 200 * (HEADER_BYTES + 1)


# What nobody waits for yet -----------------------------------------------------------------------


def test_early_messages_are_kept_aside_up_to_a_limit_and_then_the_peer_waits():
    with two(tiny=True, aside_bytes=1000) as (sender, receiver):
        send(sender, (1, 0), content(50_000))
        pump(sender, receiver)
        assert receiver.paused
        assert receiver.received_bytes <= (1000 // FRAME + 1) * (FRAME + HEADER_BYTES)
        assert sender.wants_to_write, "TCP makes it wait"
        sink = Buffer(50_000)
        receiver.expect((1, 0), sink)
        assert not receiver.paused
        pump(sender, receiver)
        assert bytes(sink.memory) == content(50_000)
        assert sink.done == 1


def test_an_expected_message_is_read_behind_more_than_the_limit():
    """If the connection were not read, two workers could wait for each other for ever."""
    with two(aside_bytes=1000) as (sender, receiver):
        early, awaited = Buffer(5000), Buffer(8)
        send(sender, (2, 0), content(5000))
        send(sender, (1, 0), content(8))
        pump(sender, receiver)
        assert receiver.paused
        receiver.expect((1, 0), awaited)
        pump(sender, receiver)
        assert awaited.done
        assert receiver.paused
        receiver.expect((2, 0), early)
        assert early.done
        assert bytes(early.memory) == content(5000)
        assert not receiver.paused


def test_expecting_a_message_in_the_middle_of_its_frame_works():
    frame = wire(((1, 0), content(50)))
    with two() as (sender, receiver):
        feed(receiver, sender, frame[: HEADER_BYTES + 20])
        sink = Buffer(50)
        receiver.expect((1, 0), sink)
        feed(receiver, sender, frame[HEADER_BYTES + 20 :])
        assert bytes(sink.memory) == content(50)
        assert sink.done == 1


@pytest.mark.parametrize("cut", [1, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + 1, HEADER_BYTES + 49])
def test_frames_that_come_in_pieces_are_put_together(cut):
    frame = wire(((1, 0), content(50)))
    with two() as (sender, receiver):
        sink = Buffer(50)
        receiver.expect((1, 0), sink)
        feed(receiver, sender, frame[:cut])
        assert not sink.done
        feed(receiver, sender, frame[cut:])
        assert bytes(sink.memory) == content(50)


# What is wrong -----------------------------------------------------------------------------------


@settings(max_examples=80, deadline=None)
@given(bit=st.integers(0, 8 * (2 * HEADER_BYTES + 100) - 1), early=st.booleans())
def test_any_flipped_bit_is_refused_and_counted(bit, early):
    """In the header or payload of either frame of a message."""
    stream = bytearray(wire(((1, 0), content(100))))
    assert len(stream) == 2 * HEADER_BYTES + 100
    stream[bit // 8] ^= 1 << bit % 8
    with two() as (sender, receiver):
        sink = Buffer(100, in_place=False)
        if not early:
            receiver.expect((1, 0), sink)
        with pytest.raises(Corrupt, match="rank 0 on a"):
            feed(receiver, sender, stream)
        assert receiver.refused == 1
        assert not sink.done


def test_a_replayed_frame_is_refused():
    frame = wire(((1, 0), content(10)))
    with two() as (sender, receiver), pytest.raises(Corrupt, match="frame 0 where 1 was due"):
        feed(receiver, sender, frame + frame)


def test_a_lost_frame_is_noticed():
    stream = wire(((1, 0), content(10)), ((1, 1), content(10)))
    with two() as (sender, receiver), pytest.raises(Corrupt, match="frame 1 where 0 was due"):
        feed(receiver, sender, stream[HEADER_BYTES + 10 :])


def test_a_frame_of_another_view_is_refused_and_counted():
    with two() as (sender, receiver):
        with pytest.raises(StaleView):
            feed(receiver, sender, wire(((1, 0), content(10)), view=bytes(16)))
        assert receiver.refused == 1


def made(*, key=(1, 0), size, offset=0, payload=b"", length=None, sequence=0):
    header = Header(
        VIEW,
        sequence,
        *key,
        size,
        offset,
        len(payload) if length is None else length,
        Checksum().of(sequence, PAYLOAD, payload),
    )
    return header.pack(Checksum()) + payload


def test_an_oversized_frame_is_refused_before_memory_is_taken_for_it():
    huge = frames.MOST_FRAME_BYTES + 1
    with two() as (sender, receiver), pytest.raises(Corrupt, match="announced a frame"):
        feed(receiver, sender, made(size=huge, length=huge))


def test_a_frame_that_ends_short_is_the_end_of_the_peer():
    frame = wire(((1, 0), content(50)))
    with two() as (sender, receiver):
        sink = Buffer(50)
        receiver.expect((1, 0), sink)
        feed(receiver, sender, frame[:-1])
        sender.sock.close()
        with pytest.raises(ConnectionError, match="in the middle of a frame"):
            receiver.read()
        assert not sink.done


@pytest.mark.parametrize("size", [40, 60])
def test_a_message_of_another_size_than_the_awaited_is_refused(size):
    with two() as (sender, receiver):
        sink = Buffer(50)
        receiver.expect((1, 0), sink)
        with pytest.raises(Corrupt, match=f"sent {size} bytes where 50 were due"):
            feed(receiver, sender, wire(((1, 0), content(size))))
        assert bytes(sink.memory) == bytes(50)


@pytest.mark.parametrize("cut", [HEADER_BYTES + 10, None])
def test_an_early_message_of_another_size_than_the_awaited_breaks_its_own_connection_only(cut):
    """`expect` may be called while another peer is served, which is not to blame."""
    frame = wire(((1, 0), content(40)))
    with two() as (sender, receiver):
        sink = Buffer(50)
        feed(receiver, sender, frame[:cut])
        receiver.expect((1, 0), sink)
        if cut is None:
            assert isinstance(receiver.broken, Corrupt)
        else:
            with pytest.raises(Corrupt, match="40 bytes where 50"):
                feed(receiver, sender, frame[cut:])
        assert receiver.refused == 1
        assert not sink.done


@pytest.mark.parametrize("awaited", [True, False])
def test_parts_out_of_order_are_refused(awaited):
    with two() as (sender, receiver):
        if awaited:
            receiver.expect((1, 0), Buffer(100))
        stream = made(size=100, payload=content(20)) + made(
            size=100, offset=10, payload=content(20), sequence=1
        )
        with pytest.raises(Corrupt, match="out of order"):
            feed(receiver, sender, stream)


def test_a_message_that_changes_its_size_is_refused():
    stream = made(size=100, payload=content(20)) + made(size=90, offset=20, payload=content(20), sequence=1)
    with two() as (sender, receiver), pytest.raises(Corrupt, match="two sizes"):
        feed(receiver, sender, stream)


@pytest.mark.parametrize("payload", [b"", b"junk", bytes(200_000)])
def test_invalid_notice_is_refused(payload):
    with two() as (sender, receiver):
        sender.frame_bytes = 1 << 20
        send(sender, (NOTICES, 0), payload)
        with pytest.raises(Corrupt):
            pump(sender, receiver)
        assert receiver.notices == []


def test_a_peer_that_closes_is_gone_after_all_it_sent_was_read():
    with two() as (sender, receiver):
        send(sender, (1, 0), content(10))
        sender.tell(LeaveNotice())
        sender.write()
        sender.sock.close()
        with pytest.raises(ConnectionError):
            receiver.read()
        sink = Buffer(10)
        receiver.expect((1, 0), sink)
        assert sink.done
        assert receiver.notices == [LeaveNotice()]


# Operations that were given up -------------------------------------------------------------------


def test_buffer_is_not_changed_after_its_operation_was_abandoned():
    frame = wire(((1, 0), content(50)))
    with two() as (sender, receiver):
        sink = Buffer(50)
        receiver.expect((1, 0), sink)
        feed(receiver, sender, frame[: HEADER_BYTES + 20])
        receiver.forget(1)
        sink.memory[:] = bytes(50)
        feed(receiver, sender, frame[HEADER_BYTES + 20 :])
        assert bytes(sink.memory) == bytes(50)
        assert not sink.done
        assert receiver.refused == 0, "the frame was right all the same"


def test_later_frames_of_an_abandoned_operation_are_dropped():
    with two(aside_bytes=1000) as (sender, receiver):
        send(sender, (1, 0), content(600))
        pump(sender, receiver)
        receiver.forget(1)
        send(sender, (1, 1), content(5000))
        send(sender, (2, 0), content(20))
        pump(sender, receiver)
        assert not receiver.paused, "it would never be read from again"
        other = Buffer(20)
        receiver.expect((2, 0), other)
        assert bytes(other.memory) == content(20)


def test_a_frame_in_flight_is_sent_whole_though_its_buffer_is_reused():
    with two(tiny=True) as (sender, receiver):
        data = bytearray(content(100_000))
        sender.frame_bytes = 80_000
        done = []
        send(sender, (1, 0), data, sent=lambda: done.append(1))
        sender.write()
        assert 0 < sender.sent_bytes < 80_000, "in the middle of the first frame"
        sender.forget(1)
        data[:] = bytes(100_000)
        send(sender, (2, 0), content(30))
        pump(sender, receiver)
        sink = Buffer(30)
        receiver.expect((2, 0), sink)
        assert bytes(sink.memory) == content(30)
        assert receiver.received_bytes == 80_000 + HEADER_BYTES + 30 + HEADER_BYTES
        assert done == []
        assert receiver.refused == 0


def test_queued_messages_of_an_abandoned_operation_are_not_sent():
    with two() as (sender, receiver):
        send(sender, (1, 0), content(500), priority=3)
        send(sender, (2, 0), content(5), priority=1)
        send(sender, (1, 1), content(500), priority=2)
        sender.forget(1)
        pump(sender, receiver)
        assert sender.sent_bytes == 5 + HEADER_BYTES


def test_notices_of_other_operations_survive():
    with two() as (sender, receiver):
        sender.tell(Question(1))
        sender.forget(1)
        pump(sender, receiver)
        assert receiver.notices == [Question(1)]
        assert notices.decode(notices.encode(Question(1)), peer="") == Question(1)


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="needs TCP_USER_TIMEOUT of Linux")
def test_a_machine_that_answers_nothing_is_given_up_after_the_time_that_was_asked_for():
    with (
        socket.create_server(("127.0.0.1", 0)) as door,
        socket.create_connection(door.getsockname()) as one,
    ):
        other, _ = door.accept()
        with other:
            Connection(one, view=VIEW, peer="rank 1 on b", silent_s=20.0)
            Connection(other, view=VIEW, peer="rank 0 on a")

            def asked(sock):
                names = ("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT", "TCP_USER_TIMEOUT")
                found = [sock.getsockopt(socket.IPPROTO_TCP, getattr(socket, name)) for name in names]
                return found if sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) else []

            idle_s, between_s, count, unanswered_ms = asked(one)
            assert idle_s + count * between_s == 20
            assert unanswered_ms == 20_000
            assert asked(other) == []
