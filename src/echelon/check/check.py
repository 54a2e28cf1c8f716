"""The whole check: run the script alone and on workers, compare, and explain.

If they part and nothing certain explains it, the script is run again: alone, for one that does not repeat
itself cannot be checked, and on both sides in 64 bits, for some training makes much of rounding.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import msgspec

from echelon.check.causes import SAME_SAMPLES, PartingCause, explain, explain_failure
from echelon.check.compare import SideComparison, StepDifference, compare, without_growth
from echelon.check.notes import CheckRequest, WorkerNotes
from echelon.check.sides import CheckWatcher, RunSide, run_side
from echelon.config.choices import check_above, check_at_least
from echelon.plan.plan import PlanRequest, make_plan

Outcome = Literal["same", "part", "failed", "not compared", "interrupted"]
TOLERANCE = 1e-4
_HALF_TOLERANCE = 3e-2
_WIDE_TOLERANCE = 1e-6
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


class _Interrupted(Exception):
    """The user has pressed Ctrl-C."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pair:
    """Two sides and how they compare."""

    alone: RunSide
    workers: RunSide
    found: SideComparison


class _Check:
    """One check, in a temporary folder."""

    def __init__(self, settings: CheckSettings, watcher: CheckWatcher, folder: Path) -> None:
        self._settings = settings
        self._watcher = watcher
        self._folder = folder
        self._tolerance = settings.tolerance or TOLERANCE
        self._size = f"{settings.workers} workers"

    def run(self) -> CheckReport:
        try:
            return self._run()
        except _Interrupted:
            return self._report("interrupted", "interrupted")

    def _run(self) -> CheckReport:
        alone = self._side("alone", 1)
        if alone.result.failure is not None:
            fix = "run it alone, and fix what it says"
            return self._failed(alone, f"{self._settings.name} fails alone", None, fix)
        unfit = self._unfit(alone.notes.leader)
        if unfit is not None:
            return unfit
        if self._settings.tolerance is None and alone.notes.leader.half:
            self._tolerance = _HALF_TOLERANCE
        workers = self._side("workers", self._settings.workers, draws="alone")
        if workers.result.failure is not None:
            return self._failed_on_workers(workers)
        pair = self._pair(alone, workers, self._tolerance)
        if not pair.found.same:
            return self._look_again(pair)
        leader = workers.notes.leader
        if leader.models == 0:
            return self._not_shared(pair, self._cause(pair))
        if pair.found.repeated and leader.batch is None and not leader.picks:
            return self._not_shared(pair, SAME_SAMPLES)
        return self._same(pair)

    def _look_again(self, pair: _Pair) -> CheckReport:
        """They part: is that so in any case, or do draws, rounding or the script itself make it seem so?"""
        cause = self._cause(pair)
        if cause.certain:
            return self._part(pair, cause)
        again = self._side("again", 1, "again")
        if again.result.code == 0 and not self._pair(pair.alone, again, self._tolerance).found.same:
            return self._part(pair, self._unrepeatable())
        if pair.workers.notes.leader.guessed:
            turned = self._side(
                "turned", self._settings.workers, "rows in turn", draws="alone", alternate=True
            )
            if turned.result.code == 0:
                other = self._pair(pair.alone, turned, self._tolerance)
                if other.found.same:
                    return self._same(other)
        wide = None if pair.alone.notes.leader.half else self._in_doubles()
        if wide is None:
            return self._part(pair, cause)
        if wide.found.same:
            by = brief(pair.found.largest)
            note = f"in 32 bits they differ by {by}: this training makes much of rounding"
            return self._same(wide, note)
        return self._part(pair, self._cause(wide))

    def _in_doubles(self) -> _Pair | None:
        """Both sides in 64 bits; None if the script does not run so."""
        alone = self._side("alone-64", 1, "in 64 bits", doubles=True)
        if alone.result.code:
            return None
        size = self._settings.workers
        workers = self._side("workers-64", size, "in 64 bits", draws="alone-64", doubles=True)
        if workers.result.code:
            return None
        pair = self._pair(alone, workers, _WIDE_TOLERANCE)
        return replace(pair, found=without_growth(pair.found))

    def _pair(self, alone: RunSide, workers: RunSide, tolerance: float) -> _Pair:
        found = compare(alone.notes, workers.notes, tolerance)
        return _Pair(alone=alone, workers=workers, found=found)

    def _cause(self, pair: _Pair) -> PartingCause:
        return explain(pair.alone.notes.leader, pair.workers.notes.workers, pair.found)

    def _side(self, name: str, workers: int, how: str = "", *, draws: str = "", **options: bool) -> RunSide:
        request = CheckRequest(
            program=list(self._settings.program),
            steps=self._settings.steps,
            draws=str(self._folder / draws) if draws else "",
            **options,
        )
        shown = "alone" if workers == 1 else self._size
        shares = "equal" if workers == 1 else self._settings.shares
        side = run_side(
            self._folder / name,
            f"{shown}, {how}" if how else shown,
            request,
            workers,
            shares,
            self._watcher,
        )
        if side.interrupted:
            raise _Interrupted
        return side

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
                f"{name} ended without a step of training, so there is nothing to compare",
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

    def _same(self, pair: _Pair, rounding: str = "") -> CheckReport:
        """Report that they are the same. `rounding`: a note on why they were compared in 64 bits."""
        found, name = pair.found, self._settings.name
        by, how = found.largest, " in 64 bits" if rounding else ""
        if rounding and by > _WIDE_TOLERANCE:
            by, how = max(found.steps[0].gradients, found.steps[0].weights), " in 64 bits at the first step"
        text = f"the same to {brief(by)}{how}" if by else f"the same{how}, bit for bit"
        text += f": {_steps(len(found.steps))} of {name}, alone and on {self._size}"
        notes = [rounding] if rounding else self._note_losses(found)
        return self._report("same", text, found=found, difference=by, notes=[*notes, *self._notes(pair)])

    def _part(self, pair: _Pair, cause: PartingCause) -> CheckReport:
        return self._report(
            "part",
            self._where(pair.found),
            cause=cause.text,
            fix=cause.fix,
            found=pair.found,
            notes=self._notes(pair),
        )

    def _not_shared(self, pair: _Pair, cause: PartingCause) -> CheckReport:
        text = f"nothing is shared out: each of the {self._size} trains what one alone trains"
        notes = self._notes(pair)
        return self._report("part", text, cause=cause.text, fix=cause.fix, found=pair.found, notes=notes)

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

    def _notes(self, pair: _Pair) -> list[str]:
        """What else is to be known."""
        found, leader = pair.found, pair.workers.notes.leader
        notes = list(leader.remarks)
        taken = max((step.number for step in found.steps), default=0)
        if taken < self._settings.steps:
            notes.append(f"the script ended after {taken} of {self._settings.steps} steps")
        if found.same and leader.batch is None and found.repeated and leader.picks:
            notes.append(
                "here all workers had the same samples, because draws are the same; in a run each draws "
                f"its own, and a step is over {self._settings.workers} times as many"
            )
        elif found.same and leader.batch is None and not found.repeated:
            notes.append(
                "no prepared loader handed out a batch, so it was not checked that the workers train "
                "different samples"
            )
        lost = [step for step in found.steps if not math.isfinite(step.loss_alone or 0.0)]
        if lost:
            notes.append(f"alone too, the loss of step {lost[0].number} is {lost[0].loss_alone:g}")
        if leader.saves or pair.alone.notes.leader.saves:
            notes.append("what the script saved went to a temporary folder; its own files are as they were")
        if self._settings.tolerance is None and self._tolerance == _HALF_TOLERANCE:
            notes.append(f"the script computes in 16 bits: the tolerance is {brief(self._tolerance)}")
        return notes

    def _note_losses(self, found: SideComparison) -> list[str]:
        """Gradients decide; that losses differ nevertheless is said."""
        wrong = [step.number for step in found.steps if (step.loss or 0.0) > self._tolerance]
        if not wrong:
            return []
        where = f"the gradients agree, the losses do not (step {wrong[0]})"
        return [f"{where}: what the workers' losses are means over is not known"]

    def _report(
        self,
        outcome: Outcome,
        text: str,
        *,
        difference: float | None = None,
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
            difference=found.largest if found and difference is None else difference,
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


def _steps(count: int) -> str:
    return "1 step" if count == 1 else f"{count} steps"


def brief(difference: float) -> str:
    """A difference in one digit: 3e-7."""
    if not 0 < difference < float("inf"):
        return "0" if difference == 0 else "infinity"
    digits, _, exponent = f"{difference:.0e}".partition("e")
    return f"{digits}e{int(exponent)}" if int(exponent) < -2 else f"{difference:.1g}"
