"""With certificates, workers use TLS, and reject peers without a certificate of their authority."""

from __future__ import annotations

import contextlib
import logging
import select
import socket
import ssl
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import msgspec
import pytest
import torch
from torch.distributed import HashStore

from echelon.comm.meet import mesh
from echelon.comm.meet.handshake import Refused
from echelon.comm.meet.rendezvous import Member, Rendezvous
from echelon.comm.meet.tls import Certificates
from echelon.comm.schedule.collective import COLLECTIVES
from echelon.comm.wire.connection import Connection
from echelon.comm.wire.exchange import Exchange
from echelon.comm.wire.loop import CHANNEL_BITS, Loop
from echelon.errors import ConfigError, JoinTimeout, PeerLost

VIEW = bytes(range(16))
FILES = Path(__file__).parents[3] / "certificates"


def sockets(*where, **how):
    return {rank: link.sock for rank, link in mesh.connect(*where, **how).items()}


def certificates(name="worker", key=None, authority="authority"):
    return Certificates(
        certificate=FILES / f"{name}.pem",
        key=FILES / f"{key or name}.key",
        authority=FILES / f"{authority}.pem",
    )


WORKER = certificates()
UNTRUSTED = certificates("untrusted", authority="other-authority")


@pytest.fixture
def both_authorities(tmp_path):
    """A file with both authorities."""
    path = tmp_path / "both.pem"
    path.write_text((FILES / "authority.pem").read_text() + (FILES / "other-authority.pem").read_text())
    return path


# Files -------------------------------------------------------------------------------------------


def environment(**changes):
    found = {
        "ECHELON_TLS_CERT": str(FILES / "worker.pem"),
        "ECHELON_TLS_KEY": str(FILES / "worker.key"),
        "ECHELON_TLS_CA": str(FILES / "authority.pem"),
    }
    return found | {f"ECHELON_TLS_{name}": str(value) for name, value in changes.items()}


def test_the_environment_names_all_three_files_or_none():
    assert Certificates.from_environment({}) is None
    assert Certificates.from_environment(environment(CERT="", KEY="", CA="")) is None
    assert Certificates.from_environment(environment()) == WORKER


@pytest.mark.parametrize("name", ["CERT", "KEY", "CA"])
def test_a_variable_that_is_missing_is_named(name):
    with pytest.raises(ConfigError, match=f"without ECHELON_TLS_{name}") as caught:
        Certificates.from_environment(environment(**{name: ""}))
    assert "on all workers, or on none" in caught.value.fix


@pytest.mark.parametrize("name", ["CERT", "KEY", "CA"])
def test_a_file_that_cannot_be_read_is_named(name, tmp_path):
    for path, why in ((tmp_path / "none.pem", "No such file"), (tmp_path, "Is a directory")):
        with pytest.raises(ConfigError, match=f"{path} cannot be read: {why}") as caught:
            Certificates.from_environment(environment(**{name: path}))
        assert caught.value.where == f"ECHELON_TLS_{name}"
        assert caught.value.fix


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("CERT", "does not contain a cert"),
        ("KEY", "is not a private key"),
        ("CA", "does not contain a cert"),
    ],
)
def test_a_file_of_another_kind_is_named(name, message):
    junk = FILES / "README.md"
    with pytest.raises(ConfigError, match=f"{junk} {message}") as caught:
        Certificates.from_environment(environment(**{name: junk}))
    assert caught.value.where == f"ECHELON_TLS_{name}"


@pytest.mark.parametrize(
    ("changes", "message", "fix"),
    [
        (
            {"KEY": "untrusted.key"},
            r"untrusted\.key does not belong to .*worker\.pem",
            "the key",
        ),
        ({"KEY": "locked.key"}, r"locked\.key is protected by a password", "without a password"),
        ({"CERT": "expired.pem"}, r"expired\.pem is not valid .*: certificate has expired", "renew it"),
        (
            {"CA": "other-authority.pem"},
            r"worker\.pem is not valid under .*other-authority\.pem",
            "signed",
        ),
    ],
)
def test_files_that_do_not_fit_each_other_or_the_date_are_named_with_a_fix(changes, message, fix):
    with pytest.raises(ConfigError, match=message) as caught:
        Certificates.from_environment(
            environment(**{name: FILES / value for name, value in changes.items()})
        )
    assert fix in caught.value.fix


# Joining -----------------------------------------------------------------------------------------


def rendezvous(store, rank, size):
    members = tuple(Member(rank=r, node=f"n{r}", host="h", pid=1) for r in range(size))
    return Rendezvous(store, members[rank], members)


def connect_all(given, *, timeout_s=90, first=None, address="127.0.0.1"):
    """Each worker's sockets or error, by its certificates; `first` runs before others dial rank 0."""
    store = HashStore()
    found = [None] * len(given)
    listening = threading.Event()

    def work(rank):
        if rank and first:
            listening.wait(90)
        place = rendezvous(store, rank, len(given))
        try:
            found[rank] = sockets(
                place, address, view=VIEW, secret=b"s", timeout_s=timeout_s, certificates=given[rank]
            )
        except Exception as error:  # noqa: BLE001 - the test looks at it
            found[rank] = error
            place.announce_departure(f"{type(error).__name__}: {error}")

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(len(given))]
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


def close_all(found):
    for own in found:
        assert isinstance(own, dict), own
    for own in found:
        for sock in own.values():
            assert sock.version() == "TLSv1.3"
            sock.close()


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_workers_with_certificates_of_one_authority_are_connected_by_tls(address):
    found = connect_all([WORKER] * 4, address=address)
    assert [set(own) for own in found] == [{0, 1, 2, 3} - {rank} for rank in range(4)]
    close_all(found)


def test_traffic_between_workers_is_encrypted():
    """Even the hello: a proxy in the middle sees neither magic nor view."""
    store, heard = HashStore(), bytearray()
    with ExitStack() as stack:
        middle = stack.enter_context(socket.create_server(("127.0.0.1", 0)))

        def pass_on():
            caller = stack.enter_context(middle.accept()[0])
            target = stack.enter_context(socket.create_connection(real["address"]))
            while len(ready := select.select([caller, target], [], [], 90)[0]):
                for sock in ready:
                    data = sock.recv(1 << 16)
                    if not data:
                        return
                    heard.extend(data)
                    (target if sock is caller else caller).sendall(data)

        real, found = {}, {}

        def work(rank):
            found[rank] = sockets(
                rendezvous(store, rank, 2),
                "127.0.0.1",
                view=VIEW,
                secret=b"s",
                timeout_s=90,
                certificates=WORKER,
            )

        answering = threading.Thread(target=work, args=(0,))
        answering.start()
        real["address"] = address_of(store, 0)
        posing = {"host": "127.0.0.1", "port": middle.getsockname()[1], "encrypted": True}
        store.set(f"address/{VIEW.hex()}/0", msgspec.json.encode(posing).decode())
        between = threading.Thread(target=pass_on)
        between.start()
        work(1)
        answering.join()
        close_all([found[0], found[1]])
        between.join()
    assert len(heard) > 1000
    assert b"ECHI" not in heard
    assert VIEW not in heard


def test_a_worker_of_another_authority_is_refused_and_all_errors_name_it(caplog):
    with caplog.at_level(logging.WARNING):
        found = connect_all([WORKER, WORKER, UNTRUSTED])
    assert isinstance(found[2], Refused)
    assert "rank 0 on n0 does not accept this worker's certificate" in found[2].message
    assert "unknown ca" in found[2].message
    assert "one authority" in found[2].fix
    assert found[2].ranks == (0,)
    for error in found[:2]:
        assert isinstance(error, PeerLost), "at once, not at the deadline"
        assert error.ranks == (2,)
    assert "connections that are not from this run's workers" in caplog.text


def test_a_worker_that_dials_one_of_another_authority_refuses_it(both_authorities, caplog):
    """Even though the dialled one trusts both authorities."""
    trusting = Certificates(
        certificate=UNTRUSTED.certificate, key=UNTRUSTED.key, authority=both_authorities
    )
    with caplog.at_level(logging.WARNING):
        found = connect_all([trusting, WORKER])
    assert isinstance(found[1], Refused)
    assert "rank 0 on n0 has a certificate that is not valid here: " in found[1].message
    assert "one authority" in found[1].fix
    assert isinstance(found[0], PeerLost)
    assert "connections that are not from this run's workers" in caplog.text


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((WORKER, None), "rank 0 on n0 was given TLS certificates, this worker was not"),
        ((None, WORKER), "rank 0 on n0 was not given TLS certificates, this worker was"),
    ],
)
def test_a_worker_with_tls_and_one_without_fail_with_the_reason(given, message):
    found = connect_all(given)
    assert isinstance(found[1], Refused)
    assert found[1].message == message
    assert "ECHELON_TLS_CERT" in found[1].fix
    assert isinstance(found[0], PeerLost)
    assert message in found[0].message


def answer_in_plain_text(sock):
    sock.sendall(b"SSH-2.0-server\r\n")
    sock.recv(1 << 16)


def answer_without_a_certificate(sock):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with context.wrap_socket(sock) as encrypted:
        encrypted.recv(1)


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (answer_in_plain_text, "wrong version"),
        (answer_without_a_certificate, "did not return a certificate"),
    ],
)
def test_an_answer_without_tls_or_certificate_is_refused_with_the_peers_name(answer, why):
    """Even though the store says that it has both: there is no fallback."""
    store = HashStore()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = {"host": "127.0.0.1", "port": listener.getsockname()[1], "encrypted": True}
        store.set(f"address/{VIEW.hex()}/0", msgspec.json.encode(address).decode())

        def accept_one():
            sock, _ = listener.accept()
            with sock, contextlib.suppress(OSError):
                answer(sock)

        thread = threading.Thread(target=accept_one)
        thread.start()
        with pytest.raises(Refused, match=f"rank 0 on n0 does not use TLS .*{why}"):
            mesh.connect(
                rendezvous(store, 1, 2),
                "127.0.0.1",
                view=VIEW,
                secret=b"s",
                timeout_s=90,
                certificates=WORKER,
            )
        thread.join()


def test_a_peer_that_closes_during_the_tls_handshake_is_tried_again_until_the_deadline():
    store = HashStore()
    calls = []
    over = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = {"host": "127.0.0.1", "port": listener.getsockname()[1], "encrypted": True}
        store.set(f"address/{VIEW.hex()}/0", msgspec.json.encode(address).decode())

        def answer():
            listener.settimeout(0.1)
            while not over.is_set():
                try:
                    sock, _ = listener.accept()
                except TimeoutError:
                    continue
                calls.append(sock)
                sock.close()

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(JoinTimeout, match="rank 0 on n0 cannot be reached"):
            mesh.connect(
                rendezvous(store, 1, 2),
                "127.0.0.1",
                view=VIEW,
                secret=b"s",
                timeout_s=2,
                certificates=WORKER,
            )
        over.set()
        thread.join()
    assert len(calls) > 1


def test_other_connections_to_a_tls_worker_are_counted_and_delay_no_worker(monkeypatch, caplog):
    """Silent ones, in plain text or in the middle of a TLS handshake; junk; and closed ones."""
    with ExitStack() as stack, caplog.at_level(logging.WARNING):

        def outsiders(address):
            for _ in range(30):
                stack.enter_context(socket.create_connection(address))
            for data in (b"ECHI" + bytes(53), b"GET / HTTP/1.1\r\n\r\n" * 10, b"\x16\x03\x01\x02\x00\x01"):
                stack.enter_context(socket.create_connection(address)).sendall(data)
            stack.enter_context(socket.create_connection(address)).sendall(hello())
            half_an_answer(stack.enter_context(socket.create_connection(address)))
            socket.create_connection(address).close()
            reset = socket.create_connection(address)
            reset.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            reset.close()
            time.sleep(0.1)

        monkeypatch.setattr(mesh, "_HANDSHAKE_S", 1000)  # waiting for a single one would take too long
        close_all(connect_all([WORKER] * 3, first=outsiders))
    assert "connections that are not from this run's workers" in caplog.text


def test_a_silent_connection_to_a_tls_worker_is_closed_after_the_timeout(monkeypatch):
    monkeypatch.setattr(mesh, "_HANDSHAKE_S", 0.3)

    def silent(address):
        for speak in (lambda sock: None, half_an_answer):
            with socket.create_connection(address, timeout=90) as sock:
                speak(sock)
                while sock.recv(1 << 16):
                    pass
        monkeypatch.setattr(mesh, "_HANDSHAKE_S", 90)

    close_all(connect_all([WORKER] * 2, first=silent))


def test_a_peer_of_another_authority_sees_no_certificate(both_authorities):
    trusting = Certificates(
        certificate=UNTRUSTED.certificate, key=UNTRUSTED.key, authority=both_authorities
    )

    def outsider(address):
        with socket.create_connection(address, timeout=10) as plain:
            context = trusting.contexts().dialling
            sock = context.wrap_socket(plain, server_side=True, do_handshake_on_connect=False)
            with sock, pytest.raises(ssl.SSLError, match="unknown ca"):
                sock.do_handshake()

    close_all(connect_all([WORKER] * 2, first=outsider))


def hello():
    """The first TLS message."""
    out = ssl.MemoryBIO()
    side = WORKER.contexts().answering.wrap_bio(ssl.MemoryBIO(), out)
    with pytest.raises(ssl.SSLWantReadError):
        side.do_handshake()
    return out.read()


def half_an_answer(sock):
    """Begin the handshake as a dialling worker would, and stop halfway."""
    into, out = ssl.MemoryBIO(), ssl.MemoryBIO()
    side = WORKER.contexts().dialling.wrap_bio(into, out, server_side=True)
    sock.settimeout(90)
    into.write(sock.recv(1 << 16))
    with pytest.raises(ssl.SSLWantReadError):
        side.do_handshake()
    sock.sendall(out.read(300))


# All together ------------------------------------------------------------------------------------


def test_workers_reduce_over_tls_and_close_cleanly():
    size, length = 3, 600_000
    found = connect_all([WORKER] * size)
    names = {rank: f"rank {rank} on n{rank}" for rank in range(size)}
    loops = [
        Loop(
            {peer: Connection(sock, view=VIEW, peer=names[peer]) for peer, sock in own.items()},
            names,
            me=names[rank],
        )
        for rank, own in enumerate(found)
    ]
    try:
        for number in range(1, 4):
            parts = [torch.arange(length, dtype=torch.float32) + rank for rank in range(size)]
            schedules = [COLLECTIVES.build("ring").schedule(rank, size, length) for rank in range(size)]
            exchanges = [
                Exchange(
                    1 << CHANNEL_BITS | number,
                    part,
                    schedule,
                    rank=rank,
                    op="sum",
                    deadline_s=90,
                    priority=0,
                )
                for rank, (part, schedule) in enumerate(zip(parts, schedules, strict=True))
            ]
            for loop, exchange in zip(loops, exchanges, strict=True):
                loop.submit(exchange)
            for exchange in exchanges:
                exchange.future.wait()
            for part in parts:
                assert torch.equal(part, torch.arange(length, dtype=torch.float32) * 3 + 3)
        loops[2].close()
        with pytest.raises(PeerLost, match="rank 2 on n2") as caught:
            wait_for_error(loops[0])
        assert "died" not in caught.value.message, "its departure notice arrived"
    finally:
        for loop in loops:
            loop.close()


def wait_for_error(loop):
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:
        loop.check()
        time.sleep(0.01)
