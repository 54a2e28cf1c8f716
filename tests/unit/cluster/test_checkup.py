import dataclasses
import os
import socket
import threading

import pytest

from echelon.cluster.checkup.data import data_sets
from echelon.cluster.checkup.emulation import emulation
from echelon.cluster.checkup.finding import Finding
from echelon.cluster.checkup.hardware import hardware
from echelon.cluster.checkup.installed import versions
from echelon.cluster.checkup.network import network, ports
from echelon.cluster.lab import needs
from echelon.cluster.machine import Machine, describe_machine

HEALTHY = dataclasses.replace(
    describe_machine(),
    cores_logical=8,
    cores_allowed=8,
    cpu_quota=None,
    cores_usable=8,
    memory_bytes=16 * 10**9,
    memory_available_bytes=8 * 10**9,
    memory_limit_bytes=None,
    shm_bytes=8 * 10**9,
    shm_free_bytes=8 * 10**9,
)


def _about(findings, subject: str) -> Finding:
    found = [finding for finding in findings if finding.subject == subject]
    assert len(found) == 1, found
    return found[0]


def _hardware(subject: str, **changed) -> Finding:
    machine: Machine = dataclasses.replace(HEALTHY, **changed)
    return _about(hardware(machine), subject)


@pytest.mark.parametrize("subject", ["system", "processor", "memory", "/dev/shm"])
def test_healthy_machine_is_ok(subject):
    assert _hardware(subject).level == "ok"


def test_a_cpu_quota_is_a_note():
    finding = _hardware("processor", cpu_quota=2.5, cores_usable=2)
    assert finding.level == "note"
    assert "2 usable" in finding.text
    assert "2.5 cores" in finding.text


def test_cpu_affinity_is_a_note():
    finding = _hardware("processor", cores_allowed=3, cores_usable=3)
    assert finding.level == "note"
    assert "pinned" in finding.text


def test_little_memory_is_a_note_with_a_fix():
    finding = _hardware("memory", memory_available_bytes=10**8)
    assert finding.level == "note"
    assert "fewer workers" in finding.fix


def test_the_memory_limit_of_a_container_counts():
    finding = _hardware("memory", memory_limit_bytes=5 * 10**8)
    assert finding.level == "note"
    assert "500.0 MB" in finding.text


def test_small_shared_memory_of_a_container_is_a_note_that_says_how_to_enlarge_it():
    finding = _hardware("/dev/shm", shm_bytes=64 * 2**20, shm_free_bytes=64 * 2**20)
    assert finding.level == "note"
    assert "--shm-size" in finding.fix


def test_full_shared_memory_is_a_problem():
    finding = _hardware("/dev/shm", shm_free_bytes=4096)
    assert finding.level == "problem"
    assert finding.fix


def test_machine_without_shared_memory_is_noted():
    assert _hardware("/dev/shm", shm_bytes=None, shm_free_bytes=None).level == "note"


def test_installed_packages_are_listed_with_their_versions():
    findings = list(versions())
    assert {finding.level for finding in findings} == {"ok"}
    assert "msgspec" in _about(findings, "others").text


@pytest.mark.parametrize(("least", "text"), [("9999.1", "9999.1 or newer"), (None, "not installed")])
def test_a_package_that_is_too_old_or_missing_is_a_problem_with_a_fix(monkeypatch, least, text):
    requirement = f"torch>={least}" if least else "no-such-package-of-that-name"
    lines = [requirement, "numpy", "pytest ; extra == 'dev'"]
    monkeypatch.setattr("importlib.metadata.requires", lambda name: lines)
    problem = next(finding for finding in versions() if finding.level == "problem")
    assert text in problem.text
    assert f'"{requirement}"' in problem.fix


def test_version_2_13_is_newer_than_2_9(monkeypatch):
    monkeypatch.setattr("importlib.metadata.requires", lambda name: ["torch>=2.9"])
    monkeypatch.setattr("importlib.metadata.version", lambda name: "2.13.0+cpu")
    assert {finding.level for finding in versions()} == {"ok"}


def test_packages_of_extras_are_not_required(monkeypatch):
    monkeypatch.setattr("importlib.metadata.requires", lambda name: ['no-such-package; extra == "dev"'])
    assert {finding.level for finding in versions()} == {"ok"}


def test_missing_package_of_the_extra_data_is_noted_with_the_command_that_helps(monkeypatch):
    lines = ['no-such-package; extra == "data"', 'another-one; extra == "dev"', "numpy"]
    monkeypatch.setattr("importlib.metadata.requires", lambda name: lines)
    finding = _about(versions(), "extra data")
    assert finding.level == "note"
    assert finding.text == "not installed: no-such-package; some data sets need it"
    assert ".[data]" in finding.fix


def test_loopback_works_for_local_peers_and_ports():
    assert _about(network(), "local peers").level == "ok"
    assert _about(ports(), "loopback").level == "ok"


def test_peer_that_cannot_be_resolved_is_a_problem():
    finding = _about(network("two..dots"), "peer")
    assert finding.level == "problem"
    assert "two..dots" in finding.text
    assert finding.fix


def test_a_peer_on_this_machine_is_ok_with_a_reason():
    finding = _about(network("127.0.0.1"), "peer")
    assert finding.level == "ok"
    assert "because" in finding.text


def test_own_name_that_resolves_to_loopback_is_a_note(monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "node-a")
    entry = (socket.AF_INET, socket.SOCK_DGRAM, 17, "", ("127.0.1.1", 1))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **kwargs: [entry])
    monkeypatch.setattr("echelon.cluster.checkup.network._RESOLVE_WITHIN_S", 90)
    finding = _about(network(), "own name")
    assert finding.level == "note"
    assert "127.0.1.1" in finding.text
    assert "/etc/hosts" in finding.fix


def test_a_resolver_that_does_not_answer_is_abandoned(monkeypatch):
    answered = threading.Event()

    def dead(*args, **kwargs):
        answered.wait(200)
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

    monkeypatch.setattr(socket, "getaddrinfo", dead)
    finding = _about(network(), "own name")
    answered.set()
    assert finding.level == "note"
    assert "does not resolve quickly" in finding.text


def test_machine_without_default_route_is_noted(monkeypatch):
    monkeypatch.setattr("echelon.cluster.interfaces.default_route", lambda: None)
    finding = _about(network(), "other peers")
    assert finding.level == "note"
    assert "--peer" in finding.fix


def test_port_with_a_server_is_a_problem_that_names_the_process():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        finding = _about(ports(port), f"port {port}")
    assert finding.level == "problem"
    assert f"(pid {os.getpid()})" in finding.text


def test_a_port_in_use_only_on_ipv6_is_a_problem():
    if not socket.has_ipv6:
        pytest.skip("this system has no IPv6")
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as server:
        port = server.getsockname()[1]
        assert _about(ports(port), f"port {port}").level == "problem"


def test_port_is_free_again_after_its_server_is_gone():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(server.getsockname()):
            server.accept()[0].close()  # leaves a connection in the closing state
    assert _about(ports(port), f"port {port}").level == "ok"


def test_loopback_that_refuses_ports_is_a_problem(monkeypatch):
    def refuse(*args, **kwargs):
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(socket, "create_server", refuse)
    finding = _about(ports(), "loopback")
    assert finding.level == "problem"
    assert "Too many open files" in finding.text


def test_missing_root_for_the_lab_is_a_note_with_a_fix(monkeypatch):
    monkeypatch.setattr(needs, "missing", lambda: ["root"])
    (finding,) = emulation()
    assert finding.level == "note"
    assert "root" in finding.text
    assert "root" in finding.fix


@pytest.mark.parametrize(("there", "level"), [(True, "ok"), (False, "note")])
def test_latency_is_emulated_only_where_the_kernel_has_netem(monkeypatch, there, level):
    monkeypatch.setattr(needs, "missing", list)
    monkeypatch.setattr(needs, "has_netem", lambda: there)
    findings = list(emulation())
    assert _about(findings, "emulation").level == "ok"
    assert _about(findings, "latency").level == level


def test_available_and_absent_data_sets_are_listed_separately(monkeypatch, tmp_path):
    monkeypatch.setenv("ECHELON_DATA", str(tmp_path))
    (tmp_path / "text").mkdir()
    (tmp_path / "text/tinyshakespeare.txt").write_text("to be")
    findings = list(data_sets())
    assert "digits" in _about(findings, "built in").text
    assert _about(findings, "in folder").text.startswith("text in ")
    assert "mnist" in _about(findings, "absent").text
    assert "text" not in _about(findings, "absent").text.partition(" not in ")[0]


def test_without_echelon_data_the_cache_folder_is_searched(monkeypatch, tmp_path):
    monkeypatch.delenv("ECHELON_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    finding = _about(data_sets(), "absent")
    assert "ECHELON_DATA is not set" in finding.text
    assert finding.level == "note"


def test_a_missing_data_folder_is_a_problem(monkeypatch, tmp_path):
    monkeypatch.setenv("ECHELON_DATA", str(tmp_path / "nowhere"))
    finding = _about(data_sets(), "ECHELON_DATA")
    assert finding.level == "problem"
    assert "nowhere" in finding.text
