"""Jitter and loss on the real kernel, with netem or without it."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from echelon.cluster.lab.faults import apply
from echelon.cluster.lab.lab import Lab
from echelon.cluster.lab.spec import FaultSpec
from echelon.cluster.lab.variation import varying

BuildLab = Callable[[str], Lab]

NODES = """
[[node]]
name = "a"
link = "100mbit"
[[node]]
name = "b"
link = "100mbit"
"""

# Counts datagrams until one is empty.
COUNT = """
import socket
server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
server.bind(("0.0.0.0", 5000))
server.settimeout(60)
print("ready", flush=True)
count = 0
while server.recv(100):
    count += 1
print(count)
"""
# Sends COUNT datagrams, one every 2 ms, then empty ones until all is over.
SEND = """
import socket, sys, time
peer = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
peer.connect((sys.argv[1], 5000))
for _ in range(int(sys.argv[2])):
    peer.send(b"x")
    time.sleep(0.002)
try:
    for _ in range(100):
        time.sleep(0.02)
        peer.send(b"")
except ConnectionRefusedError:
    pass
"""


def python_in(lab: Lab, node: int, code: str, *words: str) -> subprocess.Popen[str]:
    command = [*lab.seats[node].prefix, sys.executable, "-c", code, *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def arrived(lab: Lab, count: int) -> int:
    """How many of so many datagrams from a arrive at b."""
    with python_in(lab, 1, COUNT) as receiver:
        assert receiver.stdout is not None
        receiver.stdout.readline()
        with python_in(lab, 0, SEND, lab.seats[1].address, str(count)):
            return int(receiver.stdout.readline())


def rates_of(lab: Lab, link: str) -> list[str]:
    """The kernel's discipline at both ends of a link."""
    found = []
    for namespace, device in lab.network.link(link).ends:
        command = ["tc", "-n", namespace, "qdisc", "show", "dev", device]
        found.append(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return found


def wait_for_rates(lab: Lab, link: str) -> None:
    """Return when a link has had several rates."""
    seen: set[str] = set()
    until = time.monotonic() + 60
    while len(seen) < 6:
        assert time.monotonic() < until, seen
        seen |= set(rates_of(lab, link))


def is_cut(lab: Lab, link: str) -> bool:
    (port,) = lab.network.link(link).ports
    command = ["bridge", "-n", lab.state.names.switch, "link", "show", "dev", port]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return "state disabled" in shown


def test_a_lossy_link_loses_datagrams_and_a_sound_one_does_not(build_lab: BuildLab) -> None:
    lab = build_lab(NODES.replace('name = "b"', 'name = "b"\nloss = "30%"', 1))
    with varying(lab):
        lossy = arrived(lab, 500)
    assert 150 < lossy < 460
    apply(lab, FaultSpec(action="loss", at_s=0.0, node="b", loss=0.0))
    assert arrived(lab, 100) == 100


def test_a_link_with_jitter_changes_its_rate_until_the_block_ends(build_lab: BuildLab) -> None:
    lab = build_lab(NODES.replace('name = "a"', 'name = "a"\njitter = "20ms"', 1))
    steady = rates_of(lab, "b")
    whole = rates_of(lab, "a")
    threads = threading.active_count()
    with varying(lab, seed=1):
        if not lab.state.netem:
            wait_for_rates(lab, "a")
        assert rates_of(lab, "b") == steady
    assert rates_of(lab, "a") == whole
    assert threading.active_count() == threads


def test_faults_begin_and_end_jitter_and_loss(build_lab: BuildLab) -> None:
    lab = build_lab(
        NODES + '[[fault]]\nat_s = 9\naction = "jitter"\nnode = "a"\njitter = "20ms"\n'
        '[[fault]]\nat_s = 9\naction = "loss"\nlink = "b"\nloss = 0.5\n'
    )
    whole = rates_of(lab, "a")
    jitter, loss = lab.spec.faults
    with varying(lab):
        assert rates_of(lab, "a") == whole
        assert apply(lab, jitter) == "gave the link a a jitter of 20.0 ms"
        assert apply(lab, loss) == "let the link b lose 0.5 of what it carries"
        if not lab.state.netem:
            wait_for_rates(lab, "a")
            assert any(is_cut(lab, "b") for _ in range(200))
        apply(lab, FaultSpec(action="restore", at_s=0.0, node="a"))
        apply(lab, FaultSpec(action="restore", at_s=0.0, node="b"))
        assert arrived(lab, 50) == 50
        assert not is_cut(lab, "b")
    assert rates_of(lab, "a") == whole


def test_a_link_that_is_cut_stays_cut_while_it_loses(build_lab: BuildLab) -> None:
    lab = build_lab(NODES.replace('name = "b"', 'name = "b"\nloss = "50%"', 1))
    with varying(lab):
        apply(lab, FaultSpec(action="cut", at_s=0.0, node="b"))
        assert all(is_cut(lab, "b") for _ in range(50))
    assert is_cut(lab, "b")


def test_only_one_process_varies_a_lab_at_a_time(build_lab: BuildLab) -> None:
    lab = build_lab(NODES.replace('name = "a"', 'name = "a"\njitter = "20ms"', 1))
    threads = threading.active_count()
    with varying(lab):
        during = threading.active_count()
        with varying(Lab(lab.state)):
            assert threading.active_count() == during
    assert threading.active_count() == threads


@pytest.mark.usefixtures("can_emulate")
def test_a_run_with_jitter_and_loss_trains_and_leaves_nothing(tmp_path: Path) -> None:
    links = NODES.replace('name = "a"', 'name = "a"\njitter = "5ms"\nloss = "1%"', 1)
    (tmp_path / "lossy.toml").write_text(f'name = "lossy"\n{links}')
    words = ["train", "--lab", "lossy.toml", "--epochs", "1", "--model", "mlp", "--batch", "300"]
    done = subprocess.run(
        [sys.executable, "-m", "echelon", *words],
        cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "epoch 1 evaluated" in done.stdout
    assert "links" not in done.stderr  # no change of a link failed
