"""Faults on the real kernel, injected into small programs in a lab."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from echelon.cluster.lab.faults import FaultClock, apply
from echelon.cluster.lab.lab import Lab
from echelon.cluster.lab.spec import Action, FaultSpec

BuildLab = Callable[[str], Lab]

NODES = """
[[node]]
name = "a"
site = "x"
cpu = 0.5
link = "1gbit"
[[node]]
name = "b"
site = "y"
[[uplink]]
between = ["x", "y"]
rate = "800mbit"
"""

# Answers every byte with itself.
ECHO = """
import socket
server = socket.create_server(("0.0.0.0", 5000))
print("ready", flush=True)
peer, _ = server.accept()
while piece := peer.recv(1 << 16):
    peer.sendall(piece)
"""
# For each line "COUNT TIMEOUT": sends COUNT bytes, prints how long their echo took, or "silence".
ASK = """
import socket, sys, time
peer = socket.create_connection((sys.argv[1], 5000), timeout=90)
outstanding = 0
print("ready", flush=True)
for line in sys.stdin:
    count, timeout = line.split()
    started = time.perf_counter()
    peer.settimeout(float(timeout))
    outstanding += int(count)
    try:
        peer.sendall(bytes(int(count)))
        while outstanding:
            outstanding -= len(peer.recv(1 << 16)) or sys.exit("closed")
        print(time.perf_counter() - started, flush=True)
    except TimeoutError:
        print("silence", flush=True)
    except OSError as error:
        print(error, flush=True)
"""
# Counts the passes of a loop in a tenth of a second, whenever asked.
WORK = """
import sys, time
print("ready", flush=True)
for line in sys.stdin:
    until, count = time.monotonic() + float(line), 0
    while time.monotonic() < until:
        count += 1
    print(count, flush=True)
"""


class Program:
    """A program in a node that answers lines with lines."""

    def __init__(self, lab: Lab, node: str, code: str, *words: str) -> None:
        seat = next(seat for seat in lab.seats if seat.node == node)
        self.process = subprocess.Popen(
            [*seat.prefix, sys.executable, "-c", code, *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.read() == "ready"

    def read(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def ask(self, line: str) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()
        return self.read()

    @property
    def state(self) -> str:
        """The kernel's letter for the process state: T is stopped."""
        return Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()[0]


@contextmanager
def program(lab: Lab, node: str, code: str, *words: str) -> Iterator[Program]:
    running = Program(lab, node, code, *words)
    try:
        yield running
    finally:
        running.process.kill()
        running.process.communicate()


@contextmanager
def conversation(lab: Lab) -> Iterator[Program]:
    """A connection from a to b, across the uplink."""
    with program(lab, "b", ECHO), program(lab, "a", ASK, lab.seats[1].address) as asking:
        yield asking


def fault(action: Action, node: str | None = None, link: str | None = None) -> FaultSpec:
    return FaultSpec(action=action, at_s=0.0, node=node, link=link)


def wait_until(true: Callable[[], bool]) -> None:
    until = time.monotonic() + 90
    while not true():
        assert time.monotonic() < until
        time.sleep(0.01)


def wait_for_state(running: Program, stopped: bool) -> None:
    wait_until(lambda: (running.state == "T") == stopped)


def test_kill_ends_the_programs_of_one_node_only(build_lab: BuildLab) -> None:
    lab = build_lab(NODES)
    with program(lab, "a", WORK) as first, program(lab, "b", WORK) as second:
        assert apply(lab, fault("kill", "a")) == f"killed process {first.process.pid} on a"
        assert first.process.wait(90) == -signal.SIGKILL
        assert int(second.ask("0.01")) > 0
        wait_until(lambda: lab.pids("a") == [])
        assert apply(lab, fault("kill", "a")) == "killed nothing on a: no process runs there"


def test_kill_also_ends_child_processes(build_lab: BuildLab) -> None:
    lab = build_lab(NODES)
    family = 'import subprocess; subprocess.Popen(["sleep", "60"]); print("ready", flush=True); input()'
    with program(lab, "a", family) as parent:
        assert len(lab.pids("a")) == 2
        assert apply(lab, fault("kill", "a")).startswith("killed processes ")
        assert parent.process.wait(90) == -signal.SIGKILL
        wait_until(lambda: lab.pids("a") == [])  # the child dies when it gets CPU time


def test_stop_freezes_a_node_and_continue_wakes_it(build_lab: BuildLab) -> None:
    lab = build_lab(NODES)
    with program(lab, "a", WORK) as running:
        assert apply(lab, fault("stop", "a")) == f"stopped process {running.process.pid} on a"
        wait_for_state(running, stopped=True)
        assert apply(lab, fault("continue", "a")) == f"continued process {running.process.pid} on a"
        wait_for_state(running, stopped=False)
        assert int(running.ask("0.01")) > 0


def test_slow_takes_effect_on_a_running_program_and_restore_ends_it(build_lab: BuildLab) -> None:
    lab = build_lab(NODES)
    with program(lab, "a", WORK) as running:
        before = int(running.ask("0.6"))
        slow = FaultSpec(action="slow", at_s=0.0, node="a", cpu=0.02)
        assert apply(lab, slow) == "slowed a down to 0.02 cores"
        during = int(running.ask("0.6"))
        assert before > 2 * during
        apply(lab, fault("restore", "a"))
        assert lab.status()[0].cpu == 0.5


def test_a_changed_rate_takes_effect_on_an_open_connection(build_lab: BuildLab) -> None:
    lab = build_lab(NODES)
    with conversation(lab) as asking:

        def fastest_of_ten() -> float:
            """The shortest of ten echoes; other load slows down some of them."""
            return min(float(asking.ask("300000 90")) for _ in range(10))

        before = fastest_of_ten()
        rate = FaultSpec(action="rate", at_s=0.0, link="x/y", rate_bytes_per_s=250_000)
        assert apply(lab, rate) == "gave the link x/y a rate of 2mbit"
        during = float(asking.ask("300000 90"))
        assert during > 3 * before
        assert apply(lab, fault("restore", link="x/y")) == "restored the link x/y"
        assert during > 3 * fastest_of_ten()


def test_a_cut_uplink_is_silent_and_the_connection_survives_its_restoration(build_lab: BuildLab) -> None:
    lab = build_lab(NODES)
    with conversation(lab) as asking:
        assert float(asking.ask("10 90")) > 0
        assert apply(lab, fault("cut", link="x/y")) == "cut the link x/y"
        assert asking.ask("10 0.5") == "silence"
        apply(lab, fault("restore", link="x/y"))
        assert float(asking.ask("10 90")) > 0


def test_a_node_can_be_cut_off_alone(build_lab: BuildLab) -> None:
    lab = build_lab(NODES + '[[node]]\nname = "c"\nsite = "y"\n')
    with conversation(lab) as asking:
        apply(lab, fault("cut", "c"))
        assert float(asking.ask("10 90")) > 0
        apply(lab, fault("cut", "b"))
        assert asking.ask("10 0.3") == "silence"
        apply(lab, fault("restore", "b"))
        assert float(asking.ask("10 90")) > 0


def test_a_clock_injects_the_faults_of_the_file_in_time(build_lab: BuildLab) -> None:
    lab = build_lab(
        NODES
        + """
        [[fault]]
        at_step = 3
        action = "kill"
        node = "b"
        [[fault]]
        at_s = 1.5
        action = "slow"
        node = "a"
        cpu = 0.1
        """
    )
    with program(lab, "b", WORK) as running:
        clock = FaultClock(lab)
        assert clock.tick(1.0, 2) == []
        assert [done.action for done in clock.tick(1.6, 2)] == ["slow"]
        assert lab.status()[0].cpu == 0.1
        assert [(done.action, done.target) for done in clock.tick(1.7, 4)] == [("kill", "b")]
        assert running.process.wait(90) == -signal.SIGKILL
        assert clock.tick(99.0, 99) == []
