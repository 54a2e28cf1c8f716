"""How long is a step of a script with DDP, and of its counterpart with Echelon?

The two scripts run in turns, each for some steps, on the same number of workers. What a step consists of is
seen from outside: backward passes, optimizer steps, and all the rest.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from echelon.bench.script_notes import (
    ScriptNote,
    ScriptRequest,
    has_all_notes,
    read_script_notes,
    write_script_request,
)
from echelon.bench.step import Progress, StepComparison, StepParts, median_of
from echelon.config.resolve import Resolved
from echelon.config.schema import RunSettings
from echelon.errors import LaunchError
from echelon.observe.events import AnyEvent
from echelon.observe.run_folder import RunFolder
from echelon.plan.plan import Plan
from echelon.start.run import Target, run

FORWARD, BACKWARD, UPDATE = "data and forward", "backward and communication", "update"
_SIDES = {"ddp": "DDP", "echelon": "Echelon"}
_WARM = 0.3  # the first steps of a run are slower: this part of them is not counted


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptPair:
    """A script with Echelon and its counterpart with DDP, and how to run both.

    `beside`: the folder of the script that `echelon` is an edited copy of.
    """

    ddp: Path
    echelon: Path
    args: tuple[str, ...] = ()
    beside: str = ""
    steps: int = 100
    turns: int = 2
    workers: int | None = None
    lab: str | None = None


class _AllNoted(Exception):
    """Every worker has made enough steps."""


class _UntilNoted:
    """Ends a run when all workers have written their notes."""

    def __init__(self, folder: Path, label: str, done: float, progress: Progress) -> None:
        self._folder, self._label, self._done, self._progress = folder, label, done, progress
        self.workers = 0

    def starting(self, folder: RunFolder, plan: Plan, notes: Sequence[str]) -> None:
        self.workers = len(plan.workers)
        self._progress(self._label, self._done)

    def joined(self, seconds: float) -> None:
        """Scripts with DDP never join."""

    def output(self, data: bytes) -> None:
        """Not shown."""

    def events(self, events: Sequence[AnyEvent]) -> None:
        if has_all_notes(self._folder, self.workers):
            raise _AllNoted


def measure_scripts(pair: ScriptPair, progress: Progress) -> StepComparison:
    """Run both scripts in turns."""
    found: dict[str, list[StepParts]] = {"ddp": [], "echelon": []}
    workers = 0
    for turn in range(pair.turns):
        order = list(found)[:: 1 if turn % 2 else -1]
        for at, side in enumerate(order):
            done = (2 * turn + at) / (2 * pair.turns)
            script = pair.ddp if side == "ddp" else pair.echelon
            label = f"{script.name} with {_SIDES[side]}: turn {turn + 1} of {pair.turns}"
            notes = _run_once(pair, script, label, done, progress)
            found[side].append(parts_of(script.name, notes))
            workers = len(notes)
    sides = {side: median_of(parts) for side, parts in found.items()}
    return StepComparison(name=pair.echelon.name, workers=workers, batch=0, threads=0, sides=sides)


def _run_once(
    pair: ScriptPair, script: Path, label: str, done: float, progress: Progress
) -> list[ScriptNote]:
    folder = Path(tempfile.mkdtemp(prefix="echelon-bench-"))
    try:
        beside = pair.beside if script == pair.echelon else ""
        program = [str(script), *pair.args]
        write_script_request(folder, ScriptRequest(program=program, steps=pair.steps, beside=beside))
        settings = RunSettings(workers=pair.workers, lab=pair.lab, runs=str(folder / "runs"), name="bench")
        target = Target(argv=["-m", "echelon.bench.script_worker", str(folder)], name="bench")
        watcher = _UntilNoted(folder, label, done, progress)
        try:
            ended = run(Resolved(settings, {}), target, watcher)
        except _AllNoted:
            ended = None
        if ended is not None and ended.failure is not None:
            raise LaunchError(
                f"{script.name} failed on rank {ended.failure.rank}: {ended.failure.cause}",
                where=script.name,
                fix=f"see what it says: echelon run --workers {watcher.workers} {script}",
            )
        if ended is not None and ended.code:
            raise KeyboardInterrupt
        return read_script_notes(folder, watcher.workers)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def parts_of(name: str, notes: Sequence[ScriptNote]) -> StepParts:
    """The median step of all workers, without the first ones."""
    fewest = min(len(note.steps) for note in notes)
    first = max(1, round(_WARM * fewest))
    if fewest <= first:
        raise LaunchError(
            f"{name} made only {fewest} optimizer steps",
            where=name,
            fix="give it more data or epochs, or arguments after --",
        )
    steps = [step for note in notes for step in note.steps[first:]]
    step_s = median(step.step_s for step in steps)
    backward_s = median(step.backward_s for step in steps)
    update_s = median(step.update_s for step in steps)
    parts = {FORWARD: max(0.0, step_s - backward_s - update_s), BACKWARD: backward_s, UPDATE: update_s}
    return StepParts(step_s=step_s, parts=parts)


def named(found: StepComparison, name: str) -> StepComparison:
    """The comparison under the name of the script that was given."""
    return replace(found, name=name)
