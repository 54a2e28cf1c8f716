"""Certificates that `echelon certs` makes: workers connect with them, and a relay is refused."""

from __future__ import annotations

import os
import selectors
import socket
import ssl
import threading
from contextlib import ExitStack

import pytest
from cryptography import x509

from echelon.comm.meet import certs, meeting
from echelon.comm.meet.credentials import Credentials
from echelon.comm.meet.handshake import Refused
from echelon.comm.meet.service import MeetingService
from echelon.comm.meet.tls import Certificates
from echelon.comm.meet.visit import visit
from echelon.errors import ConfigError

VIEW = b"echelon: meeting"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("certificates")
    certs.make(made, [["worker", "10.0.0.2"], ["relay"]], days=3)
    return made


def of(folder, name):
    return Certificates(
        certificate=folder / f"{name}.pem", key=folder / f"{name}.key", authority=folder / "authority.pem"
    )


def credentials(folder, name, rank):
    contexts = of(folder, name).contexts() if name else None
    return Credentials(view=VIEW, secret=b"the secret", rank=rank, contexts=contexts)


@pytest.fixture
def service(folder):
    listener = socket.create_server(("127.0.0.1", 0))
    one = MeetingService([listener], credentials(folder, "worker", 0), size=2)
    yield one
    one.stop()


def test_keys_are_for_their_owner_and_the_authority_signs_for_further_machines(folder):
    assert [path.stat().st_mode & 0o777 for path in sorted(folder.glob("*.key"))] == [0o600] * 3
    before = (folder / "authority.pem").read_bytes()
    (path,) = certs.make(folder, [["later", "10.0.0.9"]], days=3)
    assert (folder / "authority.pem").read_bytes() == before
    of(folder, "later").contexts()
    shown = x509.load_pem_x509_certificate(path.read_bytes())
    names = shown.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["later", "localhost"]
    assert "10.0.0.9" in map(str, names.get_values_for_type(x509.IPAddress))


@pytest.mark.parametrize("names", [[""], ["../a"], ["authority"], ["a", "b c"]])
def test_what_is_not_a_name_is_refused(tmp_path, names):
    with pytest.raises(ConfigError, match="does not name a machine"):
        certs.make(tmp_path / "new", [names], days=3)
    assert not (tmp_path / "new").exists()


def test_a_damaged_authority_is_refused(tmp_path):
    (tmp_path / "authority.pem").write_text("x")
    with pytest.raises(ConfigError, match=r"the authority in .* cannot be used"):
        certs.make(tmp_path, [["a"]], days=3)


def test_workers_meet_inside_tls(folder, service):
    store = visit(lambda: ("127.0.0.1", service.port), credentials(folder, "worker", 1), timeout_s=30)
    store.set("a", "x" * 100_000)
    assert store.get("a") == b"x" * 100_000
    assert isinstance(store._sock, ssl.SSLSocket)


def test_a_worker_without_certificates_is_refused_and_learns_why(folder, service):
    with pytest.raises(Refused, match="the leader was given TLS certificates, this worker was not"):
        visit(lambda: ("127.0.0.1", service.port), credentials(folder, "", 1), timeout_s=30)


def test_a_certificate_for_another_machine_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(certs, "_HERE", ())
    certs.make(tmp_path, [["elsewhere", "10.0.0.3"]], days=3)
    listener = socket.create_server(("127.0.0.1", 0))
    one = MeetingService([listener], credentials(tmp_path, "elsewhere", 0), size=2)
    try:
        with pytest.raises(Refused, match=r"is for 10\.0\.0\.3, elsewhere, not for 127\.0\.0\.1") as caught:
            visit(lambda: ("127.0.0.1", one.port), credentials(tmp_path, "elsewhere", 1), timeout_s=30)
        assert "echelon certs" in caught.value.fix
    finally:
        one.stop()


# A relay -----------------------------------------------------------------------------------------


def relayed(service, context_of):
    """A relay's port: it speaks TLS of its own to both sides, and passes on what is inside."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve():
        with ExitStack() as stack:
            caller = stack.enter_context(listener.accept()[0])
            leader = stack.enter_context(socket.create_connection(("127.0.0.1", service.port)))
            leader.sendall(caller.recv(5))
            caller.sendall(leader.recv(5))
            try:
                caller = stack.enter_context(context_of("answering").wrap_socket(caller))
                leader = stack.enter_context(context_of("dialling").wrap_socket(leader, server_side=True))
                pass_on(caller, leader)
            except OSError:
                return

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    return listener, thread


def pass_on(one, other):
    with selectors.DefaultSelector() as ready:
        ready.register(one, selectors.EVENT_READ, other)
        ready.register(other, selectors.EVENT_READ, one)
        while True:
            for key, _ in ready.select(30):
                data = key.fileobj.recv(1 << 16)
                if not data:
                    return
                key.data.sendall(data)


def test_a_relay_with_a_certificate_of_its_own_is_refused_though_the_workers_know_the_secret(
    folder, service
):
    """Its certificate is the authority's, and names this machine, but both ends see different ones."""
    contexts = of(folder, "relay").contexts()
    listener, thread = relayed(service, lambda role: getattr(contexts, role))
    with listener:
        where = listener.getsockname()
        with pytest.raises(Refused, match="does not know the run's secret"):
            visit(lambda: where, credentials(folder, "worker", 1), timeout_s=30)
        thread.join(30)
    assert not service._visitors


def test_a_relay_that_says_it_uses_tls_without_the_authoritys_certificate_is_refused(
    folder, service, tmp_path
):
    certs.make(tmp_path, [["relay"]], days=3)
    contexts = of(tmp_path, "relay").contexts()
    for role in (contexts.dialling, contexts.answering):
        role.check_hostname = False
        role.verify_mode = ssl.CERT_NONE
    listener, thread = relayed(service, lambda role: getattr(contexts, role))
    with listener:
        where = listener.getsockname()
        with pytest.raises(Refused, match=r"has a certificate that is not valid here|does not use TLS"):
            visit(lambda: where, credentials(folder, "worker", 1), timeout_s=5)
        thread.join(30)
    assert not service._visitors


def test_a_relay_that_says_there_is_no_tls_is_refused(folder, service, monkeypatch):
    """It passes on all bytes, but tells each side that the other one has no certificates."""
    for name, kind in (("CERT", "worker.pem"), ("KEY", "worker.key"), ("CA", "authority.pem")):
        monkeypatch.setenv(f"ECHELON_TLS_{name}", str(folder / kind))
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def say():
            with listener.accept()[0] as caller:
                caller.recv(5)
                caller.sendall(b"ECHM-")

        thread = threading.Thread(target=say, daemon=True)
        thread.start()
        monkeypatch.setenv("ECHELON_SECRET", "a secret of the test")
        address, port = listener.getsockname()
        place = meeting.Place(rank=1, world_size=2, address=address, port=port)
        with pytest.raises(Refused, match="the leader was not given TLS certificates, this worker was"):
            meeting.open_meeting(place, 30)
        thread.join(30)
    assert os.environ["ECHELON_TLS_CERT"]
