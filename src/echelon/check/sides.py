"""Runs one side of a check as `echelon run` would, and reads what its workers noted."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from echelon.check.compare import Arrays, SideNotes
from echelon.check.notes import (
    CheckRequest,
    before_file,
    read_arrays,
    read_notes,
    step_file,
    write_request,
)
from echelon.config.resolve import Resolved
from echelon.config.schema import RunSettings
from echelon.observe.events import AnyEvent, StepEnded
from echelon.observe.run_folder import RunFolder
from echelon.plan.plan import Plan
from echelon.start.run import RunResult, Target, run


class CheckWatcher(Protocol):
    """Shows how far a check is."""

    def begin(self, side: str) -> None:
        """A side is started."""

    def running(self, side: str) -> None:
        """Its workers have joined."""

    def stepped(self, side: str, step: int) -> None:
        """It has taken so many steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSide:
    """How a side ended, and what was noted."""

    result: RunResult
    notes: SideNotes

    @property
    def interrupted(self) -> bool:
        """Whether it was ended by Ctrl-C."""
        return self.result.failure is None and self.result.code != 0


class _Following:
    """What the launcher tells of a run, passed on."""

    def __init__(self, side: str, watcher: CheckWatcher) -> None:
        self._side = side
        self._watcher = watcher

    def starting(self, folder: RunFolder, plan: Plan, notes: Sequence[str]) -> None:
        self._watcher.begin(self._side)

    def joined(self, seconds: float) -> None:
        self._watcher.running(self._side)

    def output(self, data: bytes) -> None:
        return

    def events(self, events: Sequence[AnyEvent]) -> None:
        steps = [event.step + 1 for event in events if isinstance(event, StepEnded) and event.rank == 0]
        if steps:
            self._watcher.stepped(self._side, max(steps))


def run_side(
    folder: Path, side: str, request: CheckRequest, workers: int, shares: str, watcher: CheckWatcher
) -> RunSide:
    """Run a side in a folder of its own, with settings of its own: echelon.toml is not read."""
    folder.mkdir(parents=True)
    write_request(folder, request)
    settings = RunSettings(workers=workers, runs=str(folder / "runs"), shares=shares)
    target = Target(argv=["-m", "echelon.check.worker", str(folder)], name="check")
    result = run(Resolved(settings, {}), target, _Following(side, watcher))
    return RunSide(result=result, notes=read_side(folder, workers))


def read_side(folder: Path, workers: int) -> SideNotes:
    """What the workers of a side noted."""

    @functools.lru_cache(maxsize=2)
    def after(index: int) -> Arrays:
        return read_arrays(step_file(folder, index))

    @functools.lru_cache(maxsize=8)
    def before(optimizer: int) -> Arrays:
        return read_arrays(before_file(folder, optimizer))

    notes = [read_notes(folder, rank) for rank in range(workers)]
    return SideNotes(workers=notes, after=after, before=before)
