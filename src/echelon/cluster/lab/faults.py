"""Injects the faults of a lab file, each one once.

`due` decides and is pure; `apply` injects a fault; `FaultClock` remembers which ones happened. The launcher
provides the elapsed seconds and the step that the run has reached.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from echelon.cluster.lab.lab import Lab
from echelon.cluster.lab.processes import send
from echelon.cluster.lab.spec import FaultSpec, show_rate
from echelon.config.units import show_seconds

PidsOfNode = Callable[[str], Iterable[int]]

_SIGNALS = {
    "kill": (signal.SIGKILL, "killed"),
    "stop": (signal.SIGSTOP, "stopped"),
    "continue": (signal.SIGCONT, "continued"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class InjectedFault:
    """A fault that was injected; the fields are those of the event `FaultInjected`."""

    action: str
    target: str
    detail: str


def due(
    faults: Sequence[FaultSpec], done: Collection[int], elapsed_s: float, step: int | None
) -> list[int]:
    """The indices of the faults that are due: by time, then by step, then in the order of the file."""
    ready = []
    for index, fault in enumerate(faults):
        if index in done:
            continue
        if fault.at_s is not None and fault.at_s <= elapsed_s:
            ready.append((0, fault.at_s, index))
        elif fault.at_step is not None and step is not None and fault.at_step <= step:
            ready.append((1, fault.at_step, index))
    return [index for _, _, index in sorted(ready)]


class FaultClock:
    """The faults of one run. `tick` may be called at any time."""

    def __init__(
        self,
        lab: Lab,
        faults: Sequence[FaultSpec] | None = None,
        pids_of_node: PidsOfNode | None = None,
    ) -> None:
        self.lab = lab
        self.faults = tuple(lab.spec.faults if faults is None else faults)
        self.pids_of_node = pids_of_node or lab.pids
        self._done: set[int] = set()

    @property
    def left(self) -> list[FaultSpec]:
        """The faults that have not happened."""
        return [fault for index, fault in enumerate(self.faults) if index not in self._done]

    def tick(self, elapsed_s: float, step: int | None) -> list[InjectedFault]:
        """Inject all faults that are due now; `step` is None while no step is known."""
        injected = []
        for index in due(self.faults, self._done, elapsed_s, step):
            self._done.add(index)
            fault = self.faults[index]
            detail = apply(self.lab, fault, self.pids_of_node)
            injected.append(InjectedFault(action=fault.action, target=fault.target, detail=detail))
        return injected


def apply(lab: Lab, fault: FaultSpec, pids_of_node: PidsOfNode | None = None) -> str:
    """Inject one fault, and return a sentence that describes it."""
    if fault.action in _SIGNALS:
        return _signal(fault, pids_of_node or lab.pids)
    if fault.action == "slow":
        lab.set_cpu(fault.target, fault.cpu)
        return f"slowed {fault.target} down to {fault.cpu:g} cores"
    if fault.action == "rate":
        lab.set_rate(fault.target, fault.rate_bytes_per_s)
        return f"gave the link {fault.target} a rate of {show_rate(fault.rate_bytes_per_s)}"
    if fault.action == "jitter":
        lab.set_jitter(fault.target, fault.jitter_s or 0.0)
        return f"gave the link {fault.target} a jitter of {show_seconds(fault.jitter_s or 0.0)}"
    if fault.action == "loss":
        lab.set_loss(fault.target, fault.loss or 0.0)
        return f"let the link {fault.target} lose {fault.loss or 0.0:.3g} of what it carries"
    if fault.action == "cut":
        lab.cut(fault.target)
        return f"cut the link {fault.target}"
    lab.restore(fault.target)
    if fault.node is None:
        return f"restored the link {fault.target}"
    lab.set_cpu(fault.node, lab.spec.nodes[lab.spec.index_of(fault.node)].cpu)
    return f"restored the link and the CPU speed of {fault.target}"


def _signal(fault: FaultSpec, pids_of_node: PidsOfNode) -> str:
    number, verb = _SIGNALS[fault.action]
    signalled: set[int] = set()
    # A process may start another one meanwhile: repeat until there are no new ones.
    while fresh := set(pids_of_node(fault.target)) - signalled:
        send(fresh, number)
        signalled |= fresh
        time.sleep(0.001)
    if not signalled:
        return f"{verb} nothing on {fault.target}: no process runs there"
    count = "process" if len(signalled) == 1 else "processes"
    return f"{verb} {count} {', '.join(map(str, sorted(signalled)))} on {fault.target}"
