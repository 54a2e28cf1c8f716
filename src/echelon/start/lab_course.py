"""What happens to a lab in the course of a run: CPU quotas come into force, faults come, links vary.

Every change is an event, and its time is known: quotas come into force once, for a stated reason
(quotas.py), and faults by seconds count from then. What was not done by the end of the run is said.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable
from types import TracebackType

from echelon.cluster.lab.faults import FaultClock, InjectedFault
from echelon.cluster.lab.lab import Lab
from echelon.cluster.lab.spec import FaultSpec
from echelon.cluster.lab.variation import varying
from echelon.observe import readiness
from echelon.observe.events import LAUNCHER, Event, FaultInjected, Noted, QuotasApplied
from echelon.observe.run_folder import RunFolder
from echelon.start.quotas import QuotaTrigger


class LabCourse:
    """The course of one run's lab. The launcher calls `look` a few times a second."""

    def __init__(self, lab: Lab, folder: RunFolder, workers: int, *, bounded: bool, seed: int) -> None:
        self._lab = lab
        self._variation = varying(lab, seed)
        self._folder = folder
        self._trigger = QuotaTrigger(workers, bounded=bounded)
        self._faults: FaultClock | None = None
        self._started_at = time.monotonic()
        self._applied_at: float | None = None

    def begin(self) -> None:
        """Workers are about to start: lift quotas, and ask workers how far they are."""
        readiness.ask(self._folder)
        self._lab.lift_quotas()
        self._started_at = time.monotonic()

    def started(self, pids_of_node: Callable[[str], Iterable[int]]) -> None:
        """Workers were started; `pids_of_node` are those that faults apply to."""
        self._faults = FaultClock(self._lab, pids_of_node=pids_of_node)

    def look(self, ended: Collection[int], step: int | None) -> list[Event]:
        """Do what is due, and return it as events. `ended` are the ranks of processes that have ended."""
        now = time.monotonic()
        events: list[Event] = []
        if self._applied_at is None:
            reason = self._trigger.look(readiness.told(self._folder), ended, now)
            if reason is None:
                return []
            self._lab.apply_quotas()
            self._applied_at = now
            events.append(self._applied(reason, now))
        if self._faults is not None:
            injected = self._faults.tick(now - self._applied_at, step)
            events += [_injected(fault) for fault in injected]
        return events

    def end(self, *, completed: bool) -> list[Event]:
        """The workers have ended: say what did not come about, if the run was completed."""
        phases = readiness.told(self._folder)
        said = []
        if completed and self._applied_at is None and self._quotas:
            said.append(
                f"CPU quotas never came into force: the run ended, and {self._trigger.awaited(phases)}"
            )
        left = self._faults.left if completed and self._faults is not None else ()
        said += [
            f"the fault {fault.action} {fault.target} was not injected: {_missed(fault)}" for fault in left
        ]
        return [Noted(t=time.time(), rank=LAUNCHER, text=text, warning=True) for text in said]

    def __enter__(self) -> LabCourse:
        self._variation.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        readiness.forget(self._folder)
        self._variation.__exit__(kind, error, trace)

    @property
    def _quotas(self) -> dict[str, float]:
        return {node.name: node.cpu for node in self._lab.spec.nodes if node.cpu is not None}

    def _applied(self, reason: str, now: float) -> QuotasApplied:
        after_s = now - self._started_at
        return QuotasApplied(
            t=time.time(), rank=LAUNCHER, reason=reason, after_s=after_s, quotas=self._quotas
        )


def _injected(fault: InjectedFault) -> FaultInjected:
    return FaultInjected(
        t=time.time(), rank=LAUNCHER, action=fault.action, target=fault.target, detail=fault.detail
    )


def _missed(fault: FaultSpec) -> str:
    if fault.at_s is not None:
        return f"the run ended before second {fault.at_s:g}"
    return f"no event said that step {fault.at_step} had ended"
