"""The whole check: run the script alone and on workers, compare, and explain.

If they part and nothing certain explains it, the script is run alone once more, with weights that differ in
their last digit. One that does not repeat itself cannot be checked; and some training makes as much of
rounding as the workers differ, which is then no fault of the script.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from echelon.check.causes import PartingCause, explain, explain_failure
from echelon.check.compare import SideComparison, StepDifference, compare, forgiven, repeats, within
from echelon.check.notes import CheckRequest, WorkerNotes
from echelon.check.sides import CheckWatcher, RunSide, run_side
from echelon.config.choices import check_above, check_at_least
from echelon.plan.plan import PlanRequest, make_plan

Outcome = Literal["same", "part", "failed", "not compared", "interrupted"]
TOLERANCE = 1e-4
_HALF_TOLERANCE = 3e-2
_LAST_LINES = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckSettings:
    """What to check. `tolerance` None: by the precision that the script computes in."""

    program: Sequence[str]
    name: str
    workers: int = 2
    steps: int = 5
    tolerance: float | None = None
    shares: str = "equal"

    def __post_init__(self) -> None:
        check_at_least(self, "workers", 2)
        check_at_least(self, "steps", 1)
        if self.tolerance is not None:
            check_above(self, "tolerance", 0)
        make_plan("check", [""] * self.workers, PlanRequest(shares=self.shares), cores=1)  # raises if wrong


class CheckedStep(msgspec.Struct, frozen=True, kw_only=True):
    """One optimizer step: losses, relative differences, and the first parameter that parts."""

    optimizer: str
    step: int
    loss_alone: float | None
    loss_workers: float | None
    loss: float | None
    gradients: float
    weights: float
    what: str
    parameter: str


class CheckReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a check has found.

    difference  the largest relative difference of losses, gradients and weights
    text        the result in one sentence
    error       what the script printed, if it failed
    """

    outcome: Outcome
    script: str
    workers: int
    tolerance: float
    difference: float | None = None
    text: str
    cause: str = ""
    fix: str = ""
    error: str = ""
    notes: list[str] = []
    steps: list[CheckedStep] = []


def check(settings: CheckSettings, watcher: CheckWatcher) -> CheckReport:
    """Check a script; nothing is left behind."""
    with tempfile.TemporaryDirectory(prefix="echelon-check-") as folder:
        return _Check(settings, watcher, Path(folder)).run()


class _Check:
    """One check, in a temporary folder."""

    def __init__(self, settings: CheckSettings, watcher: CheckWatcher, folder: Path) -> None:
        self._settings = settings
        self._watcher = watcher
        self._folder = folder
        self._tolerance = settings.tolerance or TOLERANCE
        self._size = f"{settings.workers} workers"

    def run(self) -> CheckReport:
        alone = self._side("alone", 1)
        if alone.interrupted:
            return self._report("interrupted", "interrupted")
        if alone.result.failure is not None:
            fix = "run it alone, and fix what it says"
            return self._failed(alone, f"{self._settings.name} fails alone", None, fix)
        unfit = self._unfit(alone.notes.leader)
        if unfit is not None:
            return unfit
        if self._settings.tolerance is None and alone.notes.leader.half:
            self._tolerance = _HALF_TOLERANCE
        together = self._side("together", self._settings.workers, draws="alone")
        if together.interrupted:
            return self._report("interrupted", "interrupted")
        if together.result.failure is not None:
            return self._failed_on_workers(together)
        found = compare(alone.notes, together.notes, self._tolerance)
        return self._same(alone, together, found) if found.same else self._part(alone, together, found)

    def _side(self, name: str, workers: int, *, draws: str = "", nudge: bool = False) -> RunSide:
        request = CheckRequest(
            program=list(self._settings.program),
            steps=self._settings.steps,
            draws=str(self._folder / draws) if draws else "",
            nudge=nudge,
        )
        shown = self._size if workers > 1 else "alone, again" if nudge else "alone"
        shares = "equal" if workers == 1 else self._settings.shares
        return run_side(self._folder / name, shown, request, workers, shares, self._watcher)

    # What cannot be compared -----------------------------------------------------------------------

    def _unfit(self, notes: WorkerNotes) -> CheckReport | None:
        """Why a script that ran alone cannot be checked."""
        name = self._settings.name
        if notes.workers == 0:
            return self._report(
                "not compared",
                f"{name} does not call echelon.join(): every worker would do the whole job by itself",
                fix=f"echelon adapt {name} shows the lines to change",
            )
        if not notes.steps:
            return self._report(
                "not compared",
                f"{name} ended without a step of an optimizer, so there is nothing to compare",
                fix="give it arguments with which it trains a few steps",
            )
        return None

    def _failed_on_workers(self, side: RunSide) -> CheckReport:
        failure = side.result.failure
        assert failure is not None
        notes = side.notes.workers[failure.rank]
        text = f"{self._settings.name} runs alone, and fails on {self._size}"
        return self._failed(side, text, explain_failure(failure.text, notes), "")

    def _failed(self, side: RunSide, text: str, cause: PartingCause | None, fix: str) -> CheckReport:
        failure = side.result.failure
        assert failure is not None
        last = "\n".join(side.result.log_tail.splitlines()[-_LAST_LINES:])
        return self._report(
            "failed",
            f"{text}: {failure.cause}",
            cause=cause.text if cause else "",
            fix=cause.fix if cause else fix,
            error=(failure.text or last).rstrip(),
        )

    # What was compared -----------------------------------------------------------------------------

    def _same(
        self, alone: RunSide, together: RunSide, found: SideComparison, grown: SideComparison | None = None
    ) -> CheckReport:
        steps = len(found.steps)
        text = f"the same to {brief(found.largest)}" if found.largest else "the same, bit for bit"
        text += (
            f": {steps} step{'s' if steps > 1 else ''} of {self._settings.name}, alone and on {self._size}"
        )
        if grown is not None:
            found = forgiven(found)
        notes = self._notes(alone, together, found)
        if grown is not None:
            notes.append(
                "this training makes much of rounding: one worker alone, with weights that differ in their "
                f"last digit, differs by {brief(grown.largest)}"
            )
        return self._report("same", text, found=found, notes=notes)

    def _part(self, alone: RunSide, together: RunSide, found: SideComparison) -> CheckReport:
        cause = explain(alone.notes.leader, together.notes.workers, found)
        if not cause.certain:
            again = self._side("again", 1, nudge=True)
            if again.interrupted:
                return self._report("interrupted", "interrupted")
            if again.result.failure is None:
                grown = compare(alone.notes, again.notes, self._tolerance)
                if within(found, grown, self._tolerance):
                    return self._same(alone, together, found, grown)
                if not repeats(grown, self._tolerance):
                    cause = self._unrepeatable()
        notes = self._notes(alone, together, found)
        text = self._where(found)
        return self._report("part", text, cause=cause.text, fix=cause.fix, found=found, notes=notes)

    def _unrepeatable(self) -> PartingCause:
        return PartingCause(
            text=f"{self._settings.name} does not repeat itself: run alone twice, it parts as well",
            fix="seed whatever draws at random outside of torch, numpy.random and random",
        )

    def _where(self, found: SideComparison) -> str:
        first = found.first
        if first is not None:
            return (
                f"they part at step {first.number}: the {first.what} of {first.parameter} "
                f"differs by {brief(first.by)}{_whose(found, first)}"
            )
        at = found.unequal_samples
        if at is not None:
            return f"they part at step {found.steps[at].number}: the number of samples differs"
        if found.drift is not None:
            return f"the workers part from each other at step {found.drift.number}"
        return "they take different steps"

    def _notes(self, alone: RunSide, together: RunSide, found: SideComparison) -> list[str]:
        """What else is to be known."""
        leader = together.notes.leader
        notes = list(leader.remarks)
        taken = max((step.number for step in found.steps), default=0)
        if taken < self._settings.steps:
            notes.append(f"the script ended after {taken} of {self._settings.steps} steps")
        if found.first is None and leader.batch is None and not leader.unshared:
            notes.append(
                "no prepared loader handed out a batch, so it was not checked that the workers train "
                "different samples"
            )
        wrong = [step for step in found.steps if (step.loss or 0.0) > self._tolerance]
        if found.first is None and wrong:
            notes.append(
                f"the gradients agree, the losses do not (step {wrong[0].number}): what the workers' "
                "losses are means over is not known"
            )
        lost = [step for step in found.steps if not math.isfinite(step.loss_alone or 0.0)]
        if lost:
            notes.append(f"alone too, the loss of step {lost[0].number} is {lost[0].loss_alone:g}")
        if leader.saves or alone.notes.leader.saves:
            notes.append("what the script saved went to a temporary folder; its own files are as they were")
        if self._settings.tolerance is None and self._tolerance == _HALF_TOLERANCE:
            notes.append(f"the script computes in 16 bits: the tolerance is {brief(self._tolerance)}")
        return notes

    def _report(
        self,
        outcome: Outcome,
        text: str,
        *,
        cause: str = "",
        fix: str = "",
        error: str = "",
        found: SideComparison | None = None,
        notes: Sequence[str] = (),
    ) -> CheckReport:
        return CheckReport(
            outcome=outcome,
            script=self._settings.name,
            workers=self._settings.workers,
            tolerance=self._tolerance,
            difference=found.largest if found else None,
            text=text,
            cause=cause,
            fix=fix,
            error=error,
            notes=list(notes),
            steps=[_checked(step) for step in found.steps] if found else [],
        )


def _checked(step: StepDifference) -> CheckedStep:
    return CheckedStep(
        optimizer=step.optimizer,
        step=step.number,
        loss_alone=step.loss_alone,
        loss_workers=step.loss_workers,
        loss=step.loss,
        gradients=step.gradients,
        weights=step.weights,
        what=step.what,
        parameter=step.parameter,
    )


def _whose(found: SideComparison, first: StepDifference) -> str:
    """Names the optimizer if there are several."""
    return f" ({first.optimizer})" if len({step.optimizer for step in found.steps}) > 1 else ""


def brief(difference: float) -> str:
    """A difference in one digit: 3e-7."""
    if not 0 < difference < float("inf"):
        return "0" if difference == 0 else "infinity"
    digits, _, exponent = f"{difference:.0e}".partition("e")
    return f"{digits}e{int(exponent)}" if int(exponent) < -2 else f"{difference:.1g}"
