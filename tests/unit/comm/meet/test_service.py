"""The leader's meeting service, with real sockets: who proves itself is served, nobody else is."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
import time
from pathlib import Path

import pytest

from echelon.comm.meet import meeting, strangers
from echelon.comm.meet.board import BoardError, GetValue, SetValue, encode
from echelon.comm.meet.credentials import Credentials
from echelon.comm.meet.handshake import Refused, greet
from echelon.comm.meet.place import Place
from echelon.comm.meet.service import MeetingService, refused_key
from echelon.comm.meet.visit import LeaderStore, visit
from echelon.comm.wire.sealed import MessageWriter
from echelon.errors import ConfigError, JoinTimeout, WorkerError

VIEW = b"echelon: meeting"


def credentials(rank, secret=b"the secret"):
    return Credentials(view=VIEW, secret=secret, rank=rank)


@pytest.fixture
def service():
    listener = socket.create_server(("127.0.0.1", 0))
    one = MeetingService([listener], credentials(0), size=4)
    yield one
    one.stop()


def store_of(service, rank=1, timeout_s=30, **how):
    found = visit(lambda: ("127.0.0.1", service.port), credentials(rank, **how), timeout_s=timeout_s)
    assert found is not None
    return found


def stranger(service):
    sock = socket.create_connection(("127.0.0.1", service.port))
    sock.settimeout(30)
    return sock


def closed(sock):
    """Whether the other side closes the connection, whatever it says before."""
    with contextlib.suppress(ConnectionResetError):
        while sock.recv(1000):
            pass
    return True


def test_workers_read_what_others_write_and_claims_are_never_given_twice(service):
    leader = LeaderStore(service.board, timeout_s=30)
    stores = [leader, *(store_of(service, rank) for rank in (1, 2, 3))]
    stores[2].set("a", "x")
    assert [store.get("a") for store in stores] == [b"x"] * 4
    found = []

    def claim(store):
        found.extend(store.add("claim", 1) for _ in range(200))

    threads = [threading.Thread(target=claim, args=(store,)) for store in stores]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == list(range(1, 801))


def test_a_wrong_secret_is_said_on_both_sides(service, caplog):
    with pytest.raises(Refused, match="rank 0 does not know the run's secret") as caught:
        store_of(service, 2, secret=b"another")
    assert "ECHELON_SECRET_FILE" in caught.value.fix
    leader = LeaderStore(service.board, timeout_s=30)
    assert b"rank 2 does not know the run's secret" in leader.get(refused_key(2))
    assert "rejected a connection from 127.0.0.1: a peer that says it is rank 2" in caplog.text


def test_a_stranger_that_speaks_the_protocol_without_proof_reads_and_changes_nothing(service):
    store = store_of(service)
    store.set("a", "x")
    writer = MessageWriter(None)
    for data in (
        b"GET / HTTP/1.1\r\n\r\n",
        strangers.opening(encrypted=False) + writer.sealed(encode(SetValue("a", b"mine" * 20))),
        strangers.opening(encrypted=False) + os.urandom(200),
        strangers.opening(encrypted=True),
    ):
        with stranger(service) as sock:
            sock.sendall(data)
            assert closed(sock)
    assert store.get("a") == b"x"


@pytest.mark.parametrize("damage", [lambda data: data[:-1] + bytes([data[-1] ^ 1]), lambda data: data * 2])
def test_a_message_that_is_changed_or_repeated_ends_that_connection_only(service, damage):
    store = store_of(service)
    with stranger(service) as sock:
        sock.sendall(strangers.opening(encrypted=False))
        sock.recv(5)
        proven = greet(sock, credentials(2).talk(sock, dialled=True), timeout_s=30)
        sock.settimeout(30)
        sock.sendall(damage(MessageWriter(proven.keys).sealed(encode(SetValue("a", b"mine")))))
        assert closed(sock)
    store.set("b", "x")
    assert store.get("b") == b"x"


def test_a_message_that_is_too_long_is_refused_before_it_is_read(service):
    store = store_of(service)
    with pytest.raises(WorkerError, match="too long for the meeting"):
        store.set("a", bytes(2 << 20))
    with stranger(service) as sock:
        sock.sendall(strangers.opening(encrypted=False))
        sock.recv(5)
        greet(sock, credentials(2).talk(sock, dialled=True), timeout_s=30)
        sock.settimeout(30)
        sock.sendall(struct.pack("<I", 1 << 31))
        assert closed(sock)
    assert not store.check(["a"])


def test_many_idle_strangers_use_few_files_and_workers_are_served_meanwhile(service, caplog):
    store = store_of(service)
    before = len(list(Path("/proc/self/fd").iterdir()))
    crowd = [stranger(service) for _ in range(400)]
    try:
        for _ in range(50):
            assert store.add("claim", 1)
        while len(service._strangers) < strangers.MOST_STRANGERS:
            time.sleep(0.01)
        files = len(list(Path("/proc/self/fd").iterdir())) - before - len(crowd)
        assert files <= strangers.MOST_STRANGERS
        late = store_of(service, 2)
        late.set("a", "x")
        assert store.get("a") == b"x"
    finally:
        for sock in crowd:
            sock.close()
    assert len([record for record in caplog.records if "rejected a connection" in record.message]) <= 5


def test_a_silent_stranger_is_closed_in_time():
    listener = socket.create_server(("127.0.0.1", 0))
    one = MeetingService([listener], credentials(0), size=2)
    one._strangers._limit_s = 0.1
    try:
        with stranger(one) as sock:
            assert closed(sock)
    finally:
        one.stop()


def test_when_the_leader_ends_the_others_are_told_and_its_port_is_free(service):
    store, port = store_of(service), service.port
    service.stop()
    with pytest.raises(BoardError, match="the leader's meeting has ended"):
        store.ask(GetValue("a"))
    with pytest.raises(BoardError, match="the leader's meeting has ended"):
        store.get("a")
    socket.create_server(("127.0.0.1", port)).close()


# Where the meeting is ----------------------------------------------------------------------------


def place(port, rank, address="127.0.0.1"):
    return Place(rank=rank, world_size=2, address=address, port=port)


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


def test_the_leader_listens_at_the_address_that_was_named_and_nowhere_else(monkeypatch):
    monkeypatch.setenv("ECHELON_SECRET", "a secret of the test")
    port = free_port()
    leader = meeting.open_meeting(place(port, 0), 5)
    other = meeting.open_meeting(place(port, 1), 5)
    other.set("a", "x")
    assert leader.get("a") == b"x"
    assert meeting.open_meeting(place(port, 0), 5) is leader, "a second session joins the same meeting"
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port))
    del leader, other
    deadline = time.monotonic() + 30
    while meeting._services and time.monotonic() < deadline:
        time.sleep(0.01)
    socket.create_server(("127.0.0.1", port)).close()


def test_a_port_in_use_and_a_leader_that_does_not_come_are_named(monkeypatch):
    monkeypatch.setenv("ECHELON_SECRET", "a secret of the test")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} is in use"):
            meeting.open_meeting(place(port, 0), 5)
    with pytest.raises(JoinTimeout, match=f"no leader answered at 127.0.0.1:{port} within 0.2 s"):
        meeting.open_meeting(place(port, 1), 0.2)
