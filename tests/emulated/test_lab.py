"""A lab on the real kernel: it exists, has the configured speeds, and is always removed."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from echelon.cluster.lab import network
from echelon.cluster.lab.lab import Lab, Seat, take_down
from echelon.cluster.lab.names import NAMESPACES
from echelon.cluster.lab.network import Network
from echelon.cluster.lab.remove import lab_ids, remove_all
from echelon.cluster.lab.spec import parse_lab
from echelon.errors import LabError, UnknownName

BuildLab = Callable[[str], Lab]

PAIR = """
[[node]]
name = "a"
[[node]]
name = "b"
"""

THIN = """
[[node]]
name = "a"
count = 2
site = "x"
link = "1gbit"
[[node]]
name = "b"
site = "y"
link = "1gbit"
[[uplink]]
between = ["x", "y"]
rate = "100mbit"
"""

RECEIVE = """
import socket, sys, time
server = socket.create_server(("0.0.0.0", 5000))
server.settimeout(90)
print("ready", flush=True)
peer, _ = server.accept()
started, count = time.perf_counter(), 0
while piece := peer.recv(1 << 18):
    count += len(piece)
print(count / (time.perf_counter() - started))
"""
SEND = """
import socket, sys
with socket.create_connection((sys.argv[1], 5000), timeout=90) as peer:
    peer.sendall(bytes(int(sys.argv[2])))
"""
COUNT = """
import sys, time
until, count = time.monotonic() + float(sys.argv[1]), 0
while time.monotonic() < until:
    count += 1
print(count)
"""


def seat_of(lab: Lab, node: str) -> Seat:
    return next(seat for seat in lab.seats if seat.node == node)


def python_in(seat: Seat, code: str, *words: str) -> subprocess.Popen[str]:
    command = [*seat.prefix, sys.executable, "-c", code, *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def result_of(seat: Seat, code: str, *words: str) -> str:
    with python_in(seat, code, *words) as process:
        output, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    return output.strip()


def bytes_per_s(lab: Lab, source: str, target: str, count: int) -> float:
    """The rate of one bounded TCP stream between two nodes."""
    with python_in(seat_of(lab, target), RECEIVE) as receiver:
        assert receiver.stdout is not None
        receiver.stdout.readline()
        result_of(seat_of(lab, source), SEND, seat_of(lab, target).address, str(count))
        return float(receiver.communicate(timeout=120)[0])


def links_of_the_host() -> str:
    return subprocess.run(["ip", "-o", "-br", "link"], capture_output=True, text=True, check=True).stdout


def wait_until(true: Callable[[], bool], deadline_s: float = 90.0) -> None:
    until = time.monotonic() + deadline_s
    while not true():
        assert time.monotonic() < until, "the condition did not become true"
        time.sleep(0.02)


def test_a_lab_exists_in_the_kernel_and_is_removed_completely(build_lab: BuildLab, lab_prefix: str) -> None:
    before = links_of_the_host()
    lab = build_lab(THIN)
    names = lab.state.names
    assert set(names.namespaces()) == {names.switch, *(names.namespace(n) for n in ("a-0", "a-1", "b"))}
    assert lab.groups.of("b").is_dir()
    assert names.state.is_file()
    assert links_of_the_host() == before
    lab.down()
    assert names.namespaces() == []
    assert not lab.groups.path.exists()
    assert not names.state.exists()
    assert not names.hosts.exists()
    assert lab_ids(lab_prefix) == []
    lab.down()


def test_leaving_the_context_removes_the_lab(build_lab: BuildLab, lab_prefix: str) -> None:
    with build_lab(PAIR):
        assert lab_ids(lab_prefix) != []
    assert lab_ids(lab_prefix) == []


def test_a_program_in_a_seat_is_in_its_node_with_all_its_threads(build_lab: BuildLab) -> None:
    lab = build_lab('[[node]]\nname = "a"\ncpu = 0.5\n[[node]]\nname = "b"\n')
    seat = seat_of(lab, "a")
    code = """
import glob, json, os, socket, threading
thread = threading.Thread(target=threading.Event().wait, args=(1,))
thread.start()
groups = {open(f).read() for f in glob.glob("/proc/self/task/*/cgroup")}
print(json.dumps({
    "pid": os.getpid(), "interfaces": sorted(n for _, n in socket.if_nameindex()),
    "groups": len(groups), "group": groups.pop(), "b": socket.gethostbyname("b"),
}))
"""
    with python_in(seat, code) as process:
        said = json.loads(process.communicate(timeout=120)[0])
    assert said["pid"] == process.pid
    assert said["interfaces"] == ["eth0", "lo"]
    assert said["groups"] == 1
    assert f"{lab.state.names.stem}/node-a\n" in said["group"]
    assert said["b"] == seat_of(lab, "b").address
    assert (seat.site, seat.speed, seat.interface) == ("main", 0.5, "eth0")
    assert seat_of(lab, "b").speed is None


def test_a_slow_uplink_has_about_its_rate(build_lab: BuildLab) -> None:
    lab = build_lab(THIN)
    assert bytes_per_s(lab, "b", "a-1", 4_000_000) < 1.3 * 12.5e6
    # Other load only lowers a rate, so that of the link is the best of some tries.
    assert any(bytes_per_s(lab, "a-0", "a-1", 12_000_000) > 2 * 12.5e6 for _ in range(20))


def test_a_smaller_quota_does_less_work(build_lab: BuildLab) -> None:
    lab = build_lab('[[node]]\nname = "fast"\ncpu = 0.5\n[[node]]\nname = "slow"\ncpu = 0.02\n')
    with (
        python_in(seat_of(lab, "fast"), COUNT, "1") as fast,
        python_in(seat_of(lab, "slow"), COUNT, "1") as slow,
    ):
        done = [int(process.communicate(timeout=120)[0]) for process in (fast, slow)]
    assert 2 < done[0] / done[1] < 150  # 25, and less on a machine that has no half core to give
    assert [status.cpu for status in lab.status()] == [0.5, 0.02]


def test_quotas_can_be_lifted_while_programs_start(build_lab: BuildLab) -> None:
    lab = build_lab('[[node]]\nname = "a"\ncpu = 0.3\n[[node]]\nname = "b"\n')
    lab.lift_quotas()
    assert [status.cpu for status in lab.status()] == [None, None]
    lab.apply_quotas()
    assert [status.cpu for status in lab.status()] == [0.3, None]


RING = "".join(f'[[node]]\nname = "{s}"\nsite = "{s}"\n' for s in "xyz")
RING += "".join(f'[[uplink]]\nbetween = ["{a}", "{b}"]\n' for a, b in ("xy", "yz", "zx"))


def test_a_broadcast_does_not_circle_in_a_ring_of_sites(build_lab: BuildLab) -> None:
    lab = build_lab(RING)
    shout = """
import socket, sys
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
    s.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
    s.sendto(b"x", (sys.argv[1], 5000))
"""
    everyone = ".".join([*lab.seats[0].address.split(".")[:2], "255", "255"])
    result_of(seat_of(lab, "x"), shout, everyone)
    time.sleep(0.1)
    show = ["ip", "-n", lab.state.names.switch, "-j", "-s", "link", "show", "u0a"]
    (uplink,) = json.loads(subprocess.run(show, capture_output=True, check=True).stdout)
    assert uplink["stats64"]["tx"]["packets"] < 10


def test_sites_joined_in_a_ring_all_reach_each_other(build_lab: BuildLab) -> None:
    lab = build_lab(RING)
    for source, target in (("x", "y"), ("y", "z"), ("z", "x")):
        assert bytes_per_s(lab, source, target, 100_000) > 0


def test_status_names_the_processes_of_each_node(build_lab: BuildLab) -> None:
    lab = build_lab(PAIR)
    with subprocess.Popen([*seat_of(lab, "b").prefix, "sleep", "60"]) as process:
        wait_until(lambda: "sleep 60" in lab.status()[1].processes.values())
        by_node = {status.seat.node: status.processes for status in lab.status()}
        assert by_node == {"a": {}, "b": {process.pid: "sleep 60"}}
        assert lab.pids("b") == [process.pid]
        process.kill()


def test_down_ends_processes_that_are_stopped_or_ignore_signals(build_lab: BuildLab) -> None:
    lab = build_lab('[[node]]\nname = "a"\ncpu = 0.2\n')
    deaf = 'trap "" TERM; echo ready; while true; do sleep 0.2; done'
    with (
        subprocess.Popen([*lab.seats[0].prefix, "sleep", "60"]) as stopped,
        subprocess.Popen([*lab.seats[0].prefix, "sh", "-c", deaf], stdout=subprocess.PIPE) as stubborn,
    ):
        assert stubborn.stdout is not None
        stubborn.stdout.readline()
        wait_until(lambda: stopped.pid in lab.pids("a"))
        stopped.send_signal(signal.SIGSTOP)
        lab.down()
        assert stopped.wait(60) == -signal.SIGTERM
        assert stubborn.wait(60) == -signal.SIGKILL


MAKER = """
import subprocess, sys, time
from echelon.cluster.lab.lab import Lab
from echelon.cluster.lab.spec import parse_lab
text, run, prefix = sys.argv[1:]
lab = Lab.up(parse_lab(text, file="f", name="crashed"), run, prefix=prefix)
child = subprocess.Popen([*lab.seats[0].prefix, "sleep", "60"], start_new_session=True)
print(child.pid, flush=True)
time.sleep(250)
"""


def test_a_lab_whose_maker_was_killed_is_found_and_removed(lab_prefix: str) -> None:
    command = [sys.executable, "-c", MAKER, PAIR, "some-run", lab_prefix]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as maker:
        assert maker.stdout is not None
        child = int(maker.stdout.readline())
        lab = Lab.find("some-run", lab_prefix)
        assert lab.in_use
        with pytest.raises(LabError, match=f"belongs to a run that is still going on, process {maker.pid}"):
            take_down("crashed", lab_prefix)
        maker.kill()
    found = Lab.find("crashed", lab_prefix)
    assert not found.in_use
    wait_until(lambda: found.pids("a") == [child])
    assert take_down("crashed", lab_prefix) == [found.id]
    assert lab_ids(lab_prefix) == []
    assert not Path(f"/proc/{child}/ns/net").exists()
    assert take_down("crashed", lab_prefix) == []


def test_a_lab_is_removed_by_id_even_when_its_state_file_is_damaged(
    build_lab: BuildLab, lab_prefix: str
) -> None:
    lab = build_lab(PAIR)
    lab.state.names.state.write_text("{")
    assert Lab.all(lab_prefix) == []
    assert take_down(lab.id, lab_prefix) == [lab.id]
    assert lab_ids(lab_prefix) == []


@pytest.mark.parametrize("failure", [LabError("no"), KeyboardInterrupt()], ids=["error", "Ctrl-C"])
def test_a_failure_half_way_leaves_nothing(
    failure: BaseException, build_lab: BuildLab, lab_prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []

    def fail(self: Network, name: str, rate: float | None) -> None:
        seen.extend(lab_ids(lab_prefix))
        raise failure

    monkeypatch.setattr(Network, "shape", fail)
    with pytest.raises(type(failure)):
        build_lab(THIN)
    assert len(seen) == 1
    assert lab_ids(lab_prefix) == []


def test_a_command_that_the_kernel_refuses_is_named(
    build_lab: BuildLab, lab_prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(network, "shaping_lines", lambda *given: ["qdisc add dev eth0 root nonsense"])
    with pytest.raises(LabError, match="cannot shape the link a-0") as caught:
        build_lab(THIN)
    assert caught.value.where == "tc qdisc add dev eth0 root nonsense"
    assert lab_ids(lab_prefix) == []


def test_two_labs_of_one_file_live_side_by_side(build_lab: BuildLab, lab_prefix: str) -> None:
    first, second = build_lab(PAIR), build_lab(PAIR)
    assert lab_ids(lab_prefix) == sorted([first.id, second.id])
    with pytest.raises(LabError, match="2 labs are named 'test'") as caught:
        Lab.find("test", lab_prefix)
    assert first.id in caught.value.fix
    assert bytes_per_s(first, "a", "b", 1000) > 0
    first.down()
    assert lab_ids(lab_prefix) == [second.id]
    assert bytes_per_s(second, "a", "b", 1000) > 0


def test_building_a_lab_twice_is_refused_and_the_first_stays(lab_prefix: str) -> None:
    spec = parse_lab(PAIR, file="f", name="f")
    lab = Lab.up(spec, "same run", prefix=lab_prefix)
    with pytest.raises(LabError, match="already up") as caught:
        Lab.up(spec, "same run", prefix=lab_prefix)
    assert caught.value.fix == f"remove it first: echelon lab down {lab.id}"
    assert bytes_per_s(lab, "a", "b", 1000) > 0


def test_removing_all_takes_only_what_carries_the_prefix_and_an_id(
    build_lab: BuildLab, lab_prefix: str
) -> None:
    labs = [build_lab(PAIR), build_lab(PAIR)]
    foreign = [f"{lab_prefix}-mine", f"{lab_prefix}x-0a0b0c0d-a"]
    try:
        for name in foreign:
            subprocess.run(["ip", "netns", "add", name], check=True)
        assert remove_all(lab_prefix) == sorted(lab.id for lab in labs)
        assert all((NAMESPACES / name).exists() for name in foreign)
    finally:
        for name in foreign:
            subprocess.run(["ip", "netns", "delete", name], check=True)
    assert lab_ids(lab_prefix) == []


def test_latency_is_emulated_or_a_note_says_that_it_is_not(build_lab: BuildLab) -> None:
    lab = build_lab('[[node]]\nname = "a"\nlatency = "5ms"\n[[node]]\nname = "b"\n')
    assert lab.latency_emulated != any("latency is not emulated" in note for note in lab.notes)
    assert bytes_per_s(lab, "a", "b", 1000) > 0


def test_an_unknown_node_names_the_nearest(build_lab: BuildLab) -> None:
    lab = build_lab(THIN)
    with pytest.raises(UnknownName, match="did you mean 'a-1'"):
        lab.set_cpu("a-3", 0.1)
