"""Two connections over TLS, driven by hand: messages arrive, no bytes stay in the socket object."""

from __future__ import annotations

import select
import socket
import ssl
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest

from echelon.comm.meet.tls import Certificates
from echelon.comm.wire.connection import Connection, Sink
from echelon.comm.wire.frames import HEADER_BYTES
from echelon.comm.wire.notices import LeaveNotice, Question
from echelon.errors import Corrupt

VIEW = bytes(range(16))
FILES = Path(__file__).parents[3] / "certificates"
WORKER = Certificates(
    certificate=FILES / "worker.pem", key=FILES / "worker.key", authority=FILES / "authority.pem"
)


class Buffer(Sink):
    def __init__(self, size, log=None):
        self.size_bytes = size
        self.memory = bytearray(size)
        self.done = 0
        self.log = log if log is not None else []

    def place(self, offset, length):
        return memoryview(self.memory)[offset : offset + length]

    def take(self, offset, data):
        raise AssertionError("it has a place")

    def finished(self):
        self.done += 1
        self.log.append(self)


@contextmanager
def two_sockets(tiny=False):
    plain = socket.socketpair()
    if tiny:
        for sock in plain:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
    contexts = WORKER.contexts()
    one = contexts.dialling.wrap_socket(plain[0], server_side=True, do_handshake_on_connect=False)
    other = contexts.answering.wrap_socket(plain[1], do_handshake_on_connect=False)
    with one, other:
        thread = threading.Thread(target=one.do_handshake)
        thread.start()
        other.do_handshake()
        thread.join()
        yield one, other


@contextmanager
def two(*, tiny=False, frame_bytes=64, **options):
    with two_sockets(tiny) as (one, other):
        yield (
            Connection(one, view=VIEW, peer="rank 1 on b", frame_bytes=frame_bytes),
            Connection(other, view=VIEW, peer="rank 0 on a", frame_bytes=frame_bytes, **options),
        )


def content(size, seed=1):
    return bytes((seed * 7 + i * 31) % 251 for i in range(251)) * (size // 251) + bytes(size % 251)


def send(connection, key, data, priority=0):
    connection.send(key, memoryview(data), priority, lambda: None)


def is_readable(connection):
    return bool(select.select([connection.sock], [], [], 0)[0])


def pump(*connections):
    """Transfer bytes until none are left; read where the kernel reports data, as the loop does."""
    while any(connection.wants_to_write or is_readable(connection) for connection in connections):
        for connection in connections:
            connection.write()
            if is_readable(connection):
                connection.read()


@pytest.mark.parametrize("tiny", [False, True])
@pytest.mark.parametrize("frame_bytes", [4096, 256 << 10])
def test_several_megabytes_go_both_ways_at_once(tiny, frame_bytes):
    """Through small buffers most records are refused by the kernel at first, and sent again."""
    sizes = [3_000_000, 0, 17, 16 << 10, 1_000_000, (256 << 10) - HEADER_BYTES]
    with two(tiny=tiny, frame_bytes=frame_bytes) as ends:
        sinks = [[Buffer(size) for size in sizes] for _ in ends]
        for seed, (end, own) in enumerate(zip(ends, sinks, strict=True)):
            for n, size in enumerate(sizes):
                end.expect((1, n), own[n])
                send(end, (1, n), content(size, 10 * (1 - seed) + n), priority=n % 3)
        pump(*ends)
        for seed, own in enumerate(sinks):
            for n, sink in enumerate(own):
                assert sink.memory == content(sizes[n], 10 * seed + n)
                assert sink.done == 1
        assert ends[0].sent_bytes == ends[1].received_bytes == ends[1].sent_bytes == ends[0].received_bytes


def test_slow_reader_gets_everything_despite_repeated_send_attempts():
    """A record that the kernel did not take is offered again: by then the buffer may have moved."""
    with two(tiny=True, frame_bytes=256 << 10) as (sender, receiver):
        data = bytearray(content(2_000_000))
        send(sender, (1, 0), data)
        sink = Buffer(len(data))
        receiver.expect((1, 0), sink)
        while not sender.sent_bytes:
            sender.write()
            receiver.read()
        sender.write()
        assert sender.sent_bytes < 200_000, "in the middle of a frame, and of a record"
        sender.forget(1)  # what is left of the frame is copied: its memory is the user's again
        data[:] = bytes(len(data))
        send(sender, (2, 0), content(100_000, 5))
        later = Buffer(100_000)
        receiver.expect((2, 0), later)
        while not later.done:
            for _ in range(3):
                sender.write()
            receiver.read()
        assert later.memory == content(100_000, 5)
        assert sink.memory[: 256 << 10] == content(2_000_000)[: 256 << 10]
        assert not sink.done
        assert receiver.refused == 0


def test_urgent_messages_and_notices_overtake_between_two_frames():
    with two(tiny=True) as (sender, receiver):
        log = []
        large, urgent = Buffer(500_000, log), Buffer(10, log)
        receiver.expect((1, 0), large)
        receiver.expect((1, 1), urgent)
        send(sender, (1, 0), content(500_000))
        sender.write()
        send(sender, (1, 1), content(10), priority=-1)
        sender.tell(Question(9))
        while not receiver.notices:
            sender.write()
            receiver.read()
        assert not large.done
        pump(sender, receiver)
        assert log == [urgent, large]
        assert large.memory == content(500_000)
        assert receiver.notices == [Question(9)]


def one_record(*messages, frame_bytes=64):
    """Frames as they would be if a peer put them all in one record."""
    one, other = socket.socketpair()
    with one, other:
        sender = Connection(one, view=VIEW, peer="", frame_bytes=frame_bytes)
        for key, data in messages:
            send(sender, key, data)
        while sender.wants_to_write:
            sender.write()
        return other.recv(1 << 20)


def test_no_decrypted_bytes_stay_unread_in_the_tls_layer():
    """More frames in one record than are read at once: the kernel would not wake the loop for the rest."""
    record = one_record(*(((1, n), b"x") for n in range(100)))
    assert len(record) < 16 << 10
    with two() as (sender, receiver):
        sender.sock.sendall(record)
        receiver.read()
        assert not is_readable(receiver)
        assert receiver.received_bytes == len(record)


def test_one_read_is_short_however_much_has_arrived():
    with two() as (sender, receiver):
        for n in range(150):
            send(sender, (1, n), b"x")
        while sender.wants_to_write:
            sender.write()
        receiver.read()
        assert 0 < receiver.received_bytes < sender.sent_bytes / 4
        assert is_readable(receiver)


def test_no_bytes_stay_unread_after_a_pause_in_the_middle_of_a_record():
    record = one_record(((1, 0), content(5000)))
    with two(aside_bytes=1000) as (sender, receiver):
        sender.sock.sendall(record)
        receiver.read()
        assert receiver.paused
        sink = Buffer(5000)
        receiver.expect((1, 0), sink)
        assert sink.done
        assert sink.memory == content(5000)


@contextmanager
def by_hand():
    """A connection, and a peer over TCP whose records the test sends itself: `encrypt` makes them."""
    contexts = WORKER.contexts()
    into, out = ssl.MemoryBIO(), ssl.MemoryBIO()
    side = contexts.dialling.wrap_bio(into, out, server_side=True)
    with socket.create_server(("127.0.0.1", 0)) as door:
        plain = socket.create_connection(door.getsockname(), timeout=90)
        other = door.accept()[0]
    with plain, contexts.answering.wrap_socket(other, do_handshake_on_connect=False) as sock:
        receiver = Connection(sock, view=VIEW, peer="rank 0 on a")
        receiver.read()  # begins the handshake
        into.write(plain.recv(1 << 16))
        with pytest.raises(ssl.SSLWantReadError):
            side.do_handshake()
        deliver(plain, receiver, out.read())
        into.write(plain.recv(1 << 16))
        side.do_handshake()

        def encrypt(data):
            side.write(data)
            return bytearray(out.read())

        yield plain, receiver, encrypt


def deliver(plain, receiver, data):
    """Send, and read when the kernel would wake us."""
    plain.sendall(data)
    assert select.select([receiver.sock], [], [], 10)[0], "nobody was woken"
    receiver.read()


def test_a_damaged_record_is_refused_and_counted():
    with by_hand() as (plain, receiver, encrypt):
        record = encrypt(one_record(((1, 0), b"x")))
        record[-1] ^= 1
        with pytest.raises(Corrupt, match=r"TLS with rank 0 on a failed: .*bad record mac"):
            deliver(plain, receiver, record)
        assert receiver.refused == 1


def test_the_last_byte_of_a_record_wakes_the_receiver():
    """The rest of the record is in the socket object already: the kernel has this one byte only."""
    frame = one_record(((1, 0), content(1000)), frame_bytes=1000)
    with by_hand() as (plain, receiver, encrypt):
        sink = Buffer(1000)
        receiver.expect((1, 0), sink)
        deliver(plain, receiver, encrypt(frame[: HEADER_BYTES + 10]))
        rest = encrypt(frame[HEADER_BYTES + 10 :])
        deliver(plain, receiver, rest[:-1])
        assert not sink.done
        deliver(plain, receiver, rest[-1:])
        assert sink.memory == content(1000)


def test_a_small_frame_goes_out_in_one_record():
    with two() as (sender, receiver):
        send(sender, (1, 0), content(50))
        sender.write()
        assert len(receiver.sock.recv(1 << 16)) == HEADER_BYTES + 50, "no more is received than one record"


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
