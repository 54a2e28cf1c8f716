"""When faults happen, and what they do, on a lab that only records calls."""

from __future__ import annotations

from typing import Any, cast

from echelon.cluster.lab.faults import FaultClock, InjectedFault, apply, due
from echelon.cluster.lab.lab import Lab
from echelon.cluster.lab.spec import FaultSpec, LabSpec, NodeSpec

FAULTS = (
    FaultSpec(action="cut", at_s=5.0, node="a"),
    FaultSpec(action="restore", at_s=2.0, node="a"),
    FaultSpec(action="slow", at_step=10, node="a", cpu=0.1),
)


class RecordingLab:
    """A lab that records calls."""

    def __init__(self) -> None:
        self.spec = LabSpec(name="n", nodes=(NodeSpec(name="a", site="s", cpu=0.5),), faults=FAULTS)
        self.done: list[tuple[Any, ...]] = []

    def pids(self, node: str) -> list[int]:
        return []

    def set_cpu(self, node: str, cpu: float | None) -> None:
        self.done.append(("cpu", node, cpu))

    def set_rate(self, link: str, rate: float | None) -> None:
        self.done.append(("rate", link, rate))

    def cut(self, link: str) -> None:
        self.done.append(("cut", link))

    def restore(self, link: str) -> None:
        self.done.append(("restore", link))


def noted() -> tuple[RecordingLab, Lab]:
    lab = RecordingLab()
    return lab, cast("Lab", lab)


def test_nothing_is_due_before_its_time() -> None:
    assert due(FAULTS, (), 1.9, None) == []
    assert due(FAULTS, (), 0.0, 9) == []


def test_overdue_faults_happen_in_the_order_of_their_times() -> None:
    assert due(FAULTS, (), 60.0, 10) == [1, 0, 2]


def test_a_fault_that_happened_is_not_due_again() -> None:
    assert due(FAULTS, {1, 2}, 60.0, 10) == [0]


def test_a_clock_injects_each_fault_once_and_describes_it() -> None:
    notes, lab = noted()
    clock = FaultClock(lab)
    assert clock.tick(1.0, None) == []
    assert clock.tick(2.5, 3) == [
        InjectedFault(action="restore", target="a", detail="restored the link and the CPU speed of a")
    ]
    assert clock.tick(2.6, 4) == []
    assert [fault.action for fault in clock.tick(9.0, 12)] == ["cut", "slow"]
    assert clock.tick(99.0, 99) == []
    assert notes.done == [("restore", "a"), ("cpu", "a", 0.5), ("cut", "a"), ("cpu", "a", 0.1)]


def test_a_rate_is_described_in_the_notation_of_lab_files() -> None:
    notes, lab = noted()
    fault = FaultSpec(action="rate", at_s=0.0, link="x/y", rate_bytes_per_s=1.25e6)
    assert apply(lab, fault) == "gave the link x/y a rate of 10mbit"
    assert notes.done == [("rate", "x/y", 1.25e6)]


def test_the_description_says_that_a_node_had_no_process_to_kill() -> None:
    _, lab = noted()
    detail = apply(lab, FaultSpec(action="kill", at_s=0.0, node="a"))
    assert detail == "killed nothing on a: no process runs there"
