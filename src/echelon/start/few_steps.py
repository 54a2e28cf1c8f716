"""A few steps of a run, and then no more: to learn what a step takes, or what a script's step costs.

The run is ended as soon as every worker has made enough steps, and its record is removed.
"""

from __future__ import annotations

import shutil
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from echelon.config.resolve import Resolved, resolve
from echelon.config.schema import RunSettings, TrainSettings
from echelon.errors import ConfigError, LaunchError
from echelon.observe.events import AnyEvent, LayoutsPredicted, StepEnded
from echelon.observe.follow import read_run
from echelon.observe.plan_view import measured_step_s
from echelon.observe.run_folder import RunFolder
from echelon.plan.job import ComputeCost, JobProfile
from echelon.plan.plan import Plan
from echelon.simulate.recorded_job import recorded_job
from echelon.start.run import Target, run

_PROFILE_STEPS = 25
_MANY_EPOCHS = 1000
_SHARES = "3,1"  # two points of a line: what a step costs, and what each sample adds


class _Enough(Exception):
    """Every worker has made enough steps."""


class _Counting:
    """Shows nothing, and ends the run when there are enough steps."""

    def __init__(self, steps: int) -> None:
        self.folder: RunFolder | None = None
        self._steps = steps
        self._workers = 0
        self._seen: Counter[int] = Counter()

    def starting(self, folder: RunFolder, plan: Plan, notes: Sequence[str]) -> None:
        self.folder, self._workers = folder, len(plan.workers)

    def joined(self, seconds: float) -> None:
        """Not shown."""

    def output(self, data: bytes) -> None:
        """Not shown."""

    def events(self, events: Sequence[AnyEvent]) -> None:
        self._seen.update(event.rank for event in events if isinstance(event, StepEnded))
        if sum(count >= self._steps for count in self._seen.values()) == self._workers:
            raise _Enough


def steps_of(
    schema: type[RunSettings], given: Mapping[str, Any], target: Target, steps: int
) -> tuple[list[AnyEvent], Plan]:
    """The events of a run's first steps, and its plan."""
    return steps_of_run(resolve(schema, given), target, steps)


def steps_of_run(
    resolved: Resolved[RunSettings], target: Target, steps: int
) -> tuple[list[AnyEvent], Plan]:
    """The same for settings that are resolved already."""
    root = Path(tempfile.mkdtemp(prefix="echelon-steps-"))
    watcher = _Counting(steps)
    try:
        settings = replace(resolved.settings, runs=str(root), name="steps")
        try:
            ended = run(Resolved(settings, resolved.origins), target, watcher)
        except _Enough:
            ended = None
        if ended is not None and ended.failure is not None:
            raise LaunchError(
                f"{target.name} failed on rank {ended.failure.rank}: {ended.failure.cause}",
                where=target.name,
                fix=f"see what it says: echelon run --workers 2 {target.name}",
            )
        if watcher.folder is None:
            raise LaunchError(f"{target.name} did not start", where=target.name)
        return list(read_run(watcher.folder)), Plan.read(watcher.folder.plan)
    finally:
        shutil.rmtree(root, ignore_errors=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class TriedRun:
    """A few steps of a run: the median of a step, the samples in one, the layouts that it has ranked."""

    step_s: float
    samples: int
    layouts: LayoutsPredicted | None = None


def tried(settings: RunSettings, origins: Mapping[str, str], target: Target, steps: int) -> TriedRun:
    """A run that is ended after a few steps; nothing is saved or planned."""
    settings = replace(settings, checkpoint=None, checkpoint_every=None, checkpoint_best=None)
    if isinstance(settings, TrainSettings):
        settings = replace(settings, epochs=max(settings.epochs, _MANY_EPOCHS))
    events, _ = steps_of_run(Resolved(settings, origins), replace(target, plans=False), steps)
    found = [event for event in events if isinstance(event, StepEnded)]
    begins = [event.start for event in found if event.rank == 0]
    # In its first steps a run also measures links, tries factors and moves shares.
    step_s = measured_step_s(begins[len(begins) // 2 :])
    if step_s is None:
        raise ConfigError(
            f"{target.name} made too few steps to measure",
            where=target.name,
            fix="let it make more steps, or call echelon.join() and session.prepare() in it",
        )
    return TriedRun(
        step_s=step_s,
        samples=max(1, sum(event.share for event in found if event.step == 1)),
        layouts=next((event for event in events if isinstance(event, LayoutsPredicted)), None),
    )


def timed_step_s(schema: type[RunSettings], given: Mapping[str, Any], target: Target, steps: int) -> float:
    """The median time of a step of a run that is ended after so many."""
    events, _ = steps_of(schema, given, target, steps)
    begins = [event.start for event in events if isinstance(event, StepEnded) and event.rank == 0]
    measured_s = measured_step_s(begins)
    if measured_s is None:
        raise LaunchError(f"{target.name} made only {len(begins)} steps", where=target.name)
    return measured_s


def profile_script(script: str, args: Sequence[str]) -> JobProfile:
    """What a step of a script costs on this machine, with one thread, from a few steps of two workers.

    The workers have unlike shares, so that what a step costs and what each sample adds can be told apart.
    """
    given = {"workers": 2, "threads": 1, "shares": _SHARES}
    target = Target(argv=[script, *args], name=Path(script).stem)
    events, plan = steps_of(RunSettings, given, target, _PROFILE_STEPS)
    if not any(isinstance(event, StepEnded) for event in events):
        raise ConfigError(
            f"{script} made no step that was recorded",
            where=script,
            fix="call echelon.join() and session.prepare() in it, or give --model or --cluster",
        )
    found = recorded_job(events, plan, name=Path(script).stem)
    one, other = (_seconds(events, rank) for rank in (0, 1))
    per_sample_s = max((one[1] - other[1]) / max(one[0] - other[0], 1e-9), 1e-9)
    fixed_s = max(0.0, min(one[1] - per_sample_s * one[0], one[1]))
    cost = ComputeCost(fixed_s=fixed_s, per_sample_s=per_sample_s, apply_s=found.job.cost.apply_s)
    return JobProfile(name=found.job.name, batch=found.job.batch, cost=cost, layers=found.job.layers)


def _seconds(events: Sequence[AnyEvent], rank: int) -> tuple[float, float]:
    """A worker's usual share, and what computing it takes, without the first steps."""
    steps = [event for event in events if isinstance(event, StepEnded) and event.rank == rank]
    share = Counter(step.share for step in steps).most_common(1)[0][0]
    alike = [step.data_s + step.compute_s for step in steps[len(steps) // 5 :] if step.share == share]
    return float(share), median(alike)
