"""Workers (threads here) connect with each other; other connections are rejected and delay nobody."""

from __future__ import annotations

import logging
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import msgspec
import pytest
from torch.distributed import HashStore

from echelon.cluster.interfaces import interfaces
from echelon.comm.meet import mesh
from echelon.comm.meet.handshake import HungUp, Refused, conversation, greet
from echelon.comm.meet.rendezvous import Member, Rendezvous
from echelon.errors import JoinTimeout, LaunchError, PeerLost

VIEW = bytes(range(16))


def sockets(*where, **how):
    return {rank: link.sock for rank, link in mesh.connect(*where, **how).items()}


def rendezvous(store, rank, size):
    members = tuple(Member(rank=r, node=f"n{r}", host="h", pid=1) for r in range(size))
    return Rendezvous(store, members[rank], members)


def connect_all(size, *, address="127.0.0.1", secrets=None, timeout_s=90, first=None, view=VIEW):
    """Each worker's sockets or error; `first` runs when rank 0 listens, before others dial it."""
    store = HashStore()
    found = [None] * size
    listening = threading.Event()

    def work(rank):
        if rank and first:
            listening.wait(90)
        place = rendezvous(store, rank, size)
        secret = secrets[rank] if secrets else b"secret"
        try:
            found[rank] = sockets(place, address, view=view, secret=secret, timeout_s=timeout_s)
        except Exception as error:  # noqa: BLE001 - the test looks at it
            found[rank] = error
            place.announce_departure(f"{type(error).__name__}: {error}")

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    try:
        if first:
            first(address_of(store, 0))
    finally:
        listening.set()
        for thread in threads:
            thread.join()
    return found


def address_of(store, rank):
    key = f"address/{VIEW.hex()}/{rank}"
    while not store.check([key]):
        time.sleep(0.001)
    address = msgspec.json.decode(store.get(key))
    return address["host"], address["port"]


def assert_connected(found):
    """Every pair can exchange bytes over the right sockets."""
    size = len(found)
    with ExitStack() as stack:
        for own in found:
            assert isinstance(own, dict), own
            for sock in own.values():
                stack.enter_context(sock)
        for rank in range(size):
            assert set(found[rank]) == set(range(size)) - {rank}
            for peer, sock in found[rank].items():
                sock.settimeout(90)
                sock.sendall(bytes([rank, peer]))
        for rank in range(size):
            for peer, sock in found[rank].items():
                assert sock.recv(2) == bytes([peer, rank])


def link_local_addresses():
    """Link-local addresses of this machine, at most one; each names its interface."""
    found = [entry.address for entry in interfaces() if entry.up and entry.address.startswith("fe80")]
    return found[:1]


@pytest.mark.parametrize("address", ["127.0.0.1", "::1", *link_local_addresses()])
def test_every_worker_is_connected_with_every_other(address):
    assert_connected(connect_all(5, address=address))


def test_an_address_is_published_without_its_interface():
    """Interface names differ between machines."""
    published = []
    for address in ("127.0.0.1", "::1", *link_local_addresses()):
        assert_connected(connect_all(2, address=address, first=published.append))
        assert published.pop()[0] == address.partition("%")[0]


def test_two_runs_on_one_machine_stay_apart():
    with ThreadPoolExecutor(2) as pool:
        runs = [pool.submit(connect_all, 3, view=bytes([n]) * 16) for n in range(2)]
        found = [run.result() for run in runs]
    ports = [{sock.getsockname() for own in run for sock in own.values()} for run in found]
    assert not ports[0] & ports[1]
    for run in found:
        assert_connected(run)


def test_a_worker_of_another_run_is_rejected(caplog):
    def lost(address):
        talk = conversation(view=bytes(16), rank=1, secret=b"secret", dialled=True)
        with socket.create_connection(address) as sock, pytest.raises(HungUp):
            greet(sock, talk, timeout_s=90)

    with caplog.at_level(logging.WARNING):
        assert_connected(connect_all(2, first=lost))
    assert "rejected 1 connections" in caplog.text


def test_fifty_silent_connections_delay_no_worker(monkeypatch):
    """Waiting for a single one of them would take longer than the test may."""
    monkeypatch.setattr(mesh, "_HANDSHAKE_S", 1000)
    with ExitStack() as stack:

        def crowd(address):
            for _ in range(50):
                stack.enter_context(socket.create_connection(address))

        assert_connected(connect_all(3, first=crowd))


def test_junk_and_half_open_and_closed_connections_are_rejected_and_counted(caplog):
    with ExitStack() as stack, caplog.at_level(logging.WARNING):

        def outsiders(address):
            for data in (b"GET / HTTP/1.1\r\n\r\n" * 10, b"ECHI", bytes(100), b""):
                sock = stack.enter_context(socket.create_connection(address))
                sock.sendall(data)
            socket.create_connection(address).close()
            reset = socket.create_connection(address)
            reset.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            reset.close()
            time.sleep(0.1)

        assert_connected(connect_all(3, first=outsiders))
    assert "connections that are not from this run's workers" in caplog.text


def test_too_many_connections_drop_the_oldest_only(monkeypatch):
    monkeypatch.setattr(mesh, "_MOST_CALLERS", 16)
    with ExitStack() as stack:

        def crowd(address):
            for _ in range(30):
                stack.enter_context(socket.create_connection(address))

        assert_connected(connect_all(3, first=crowd))


def test_a_silent_connection_is_closed_after_the_timeout(monkeypatch):
    monkeypatch.setattr(mesh, "_HANDSHAKE_S", 0.1)

    def silent(address):
        with socket.create_connection(address) as sock:
            sock.settimeout(90)
            assert sock.recv(1) == b"", "the listener closed the connection"
        monkeypatch.setattr(mesh, "_HANDSHAKE_S", 90)

    assert_connected(connect_all(2, first=silent))


def test_a_worker_with_another_secret_is_refused_and_all_errors_name_it():
    found = connect_all(3, secrets=[b"secret", b"secret", b"other"], timeout_s=90)
    assert isinstance(found[2], Refused)
    assert "does not know the run's secret" in found[2].message
    assert "ECHELON_SECRET" in found[2].fix
    for error in found[:2]:
        assert isinstance(error, PeerLost), "at once, not at the deadline"
        assert error.ranks == (2,)
        assert "does not know the run's secret" in error.message


def test_a_worker_that_never_dials_is_named_at_the_deadline():
    store = HashStore()
    with pytest.raises(JoinTimeout) as caught:
        mesh.connect(rendezvous(store, 0, 2), "127.0.0.1", view=VIEW, secret=b"s", timeout_s=0.3)
    assert caught.value.ranks == (1,)
    assert "rank 1 on n1 did not connect within 0.3 s" in caught.value.message
    assert "listening at 127.0.0.1 port" in caught.value.where


def test_a_worker_that_never_listens_is_named_at_the_deadline():
    with pytest.raises(JoinTimeout, match="rank 0 on n0 does not listen"):
        mesh.connect(rendezvous(HashStore(), 1, 2), "127.0.0.1", view=VIEW, secret=b"s", timeout_s=0.3)


def test_a_worker_that_cannot_be_reached_is_named_at_the_deadline():
    store = HashStore()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    store.set(f"address/{VIEW.hex()}/0", msgspec.json.encode({"host": "127.0.0.1", "port": port}).decode())
    with pytest.raises(JoinTimeout, match=r"cannot be reached at 127\.0\.0\.1 port") as caught:
        mesh.connect(rendezvous(store, 1, 2), "127.0.0.1", view=VIEW, secret=b"s", timeout_s=1)
    assert caught.value.ranks == (0,)


def test_a_worker_that_is_not_reached_at_its_first_address_is_dialled_at_another():
    """The first leads nowhere, the second to a program that is no worker, the third to the worker."""
    store = HashStore()
    found = {}

    def listen():
        found[0] = sockets(
            rendezvous(store, 0, 2),
            "127.0.0.2",
            further=["127.0.0.1"],
            view=VIEW,
            secret=b"s",
            timeout_s=90,
        )

    thread = threading.Thread(target=listen)
    thread.start()
    address_of(store, 0)
    key = f"address/{VIEW.hex()}/0"
    (other,) = msgspec.json.decode(store.get(key))["further"]
    assert other[0] == "127.0.0.1"
    with socket.create_server(("127.0.0.1", 0)) as closed:
        nowhere = closed.getsockname()
    with socket.create_server(("127.0.0.1", 0)) as program:
        said = {"host": nowhere[0], "port": nowhere[1], "further": [program.getsockname(), other]}
        store.set(key, msgspec.json.encode(said).decode())
        hanging_up = threading.Thread(target=lambda: program.accept()[0].close(), daemon=True)
        hanging_up.start()
        # An address of its own would not be dialled for a worker elsewhere.
        found[1] = sockets(rendezvous(store, 1, 2), "127.0.0.3", view=VIEW, secret=b"s", timeout_s=90)
        hanging_up.join()
    thread.join()
    assert_connected([found[0], found[1]])


@pytest.mark.parametrize(
    ("elsewhere", "dialled"), [(True, ["10.0.0.2"]), (False, ["172.17.0.1", "10.0.0.2"])]
)
def test_an_address_that_this_machine_has_too_is_not_dialled_for_a_worker_elsewhere(elsewhere, dialled):
    address = mesh.ListenAddress("172.17.0.1", 5, further=(("10.0.0.2", 6),))
    places = mesh._places(address, ["10.0.0.1", "172.17.0.1"], elsewhere=elsewhere)
    assert [host for host, _ in places] == dialled


def test_an_impostor_at_a_workers_address_is_refused():
    """It accepts the connection, and cannot prove that it knows the secret."""
    store = HashStore()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = {"host": "127.0.0.1", "port": listener.getsockname()[1]}
        store.set(f"address/{VIEW.hex()}/0", msgspec.json.encode(address).decode())

        def pose():
            sock, _ = listener.accept()
            with sock:
                hello = sock.recv(57)
                sock.sendall(hello[:20] + bytes(4) + hello[24:])
                sock.recv(32)
                sock.sendall(bytes(range(32)))

        thread = threading.Thread(target=pose)
        thread.start()
        with pytest.raises(Refused, match="rank 0 does not know the run's secret"):
            mesh.connect(rendezvous(store, 1, 2), "127.0.0.1", view=VIEW, secret=b"s", timeout_s=90)
        thread.join()


def test_an_address_that_is_not_this_machines_is_refused():
    with pytest.raises(LaunchError, match=r"cannot listen at 192\.0\.2\.1"):
        mesh.connect(rendezvous(HashStore(), 0, 2), "192.0.2.1", view=VIEW, secret=b"s", timeout_s=1)


def test_all_agree_on_the_view_and_each_one_is_new():
    store = HashStore()
    first, *others = [mesh.agree_on_view(rendezvous(store, rank, 3)) for rank in range(3)]
    assert others == [first, first]
    assert len(first) == 16
    assert mesh.agree_on_view(rendezvous(HashStore(), 0, 3)) != first
