"""How long is a step with DDP and with Echelon, and what is the difference made of?

Starts the workers, and computes from their times. Of a step on one worker, with the clock of the machine:

    own computing   begun -> computed: forward and backward until the last gradient
    waiting         until the last worker has computed its gradients
    communication   from then until `backward()` returns: what backward did not hide
    update          the optimizer's step

`alone` has no communication: what own computing takes longer than it is the price of hooks, copies,
statistics of batch normalisation, and of cores shared with communication.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median

from echelon.bench.step_notes import (
    Side,
    StepRequest,
    TimedStep,
    WorkerNote,
    read_notes,
    read_progress,
    write_request,
)
from echelon.config.resolve import Resolved
from echelon.config.schema import RunSettings
from echelon.errors import LaunchError
from echelon.observe.events import AnyEvent
from echelon.observe.run_folder import RunFolder
from echelon.plan.plan import Plan
from echelon.start.run import Target, run

Progress = Callable[[str, float], None]


COMPUTING, WAITING, COMMUNICATION, UPDATE = "computing", "waiting", "communication", "update"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepParts:
    """How long a step takes, and what it consists of: seconds by part, in their order."""

    step_s: float
    parts: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepComparison:
    """A step by side; `batch` is that of all workers, 0 if it is not known."""

    name: str
    workers: int
    batch: int
    threads: int
    sides: dict[str, StepParts]

    def ratio(self, side: str = "echelon", to: str = "ddp") -> float:
        """A side's step against another's; below 1 is faster."""
        return self.sides[side].step_s / self.sides[to].step_s

    def samples_per_s(self, side: str) -> float:
        """Samples of all workers."""
        return self.batch / self.sides[side].step_s


class _Showing:
    """What the launcher tells of a run, as a part that is done."""

    def __init__(self, folder: Path, name: str, progress: Progress) -> None:
        self._folder, self._name, self._progress = folder, name, progress

    def starting(self, folder: RunFolder, plan: Plan, notes: Sequence[str]) -> None:
        self._progress(f"{self._name}: starting {len(plan.workers)} workers", 0.0)

    def joined(self, seconds: float) -> None:
        self._progress(f"{self._name}: warming up", 0.0)

    def output(self, data: bytes) -> None:
        """Nothing of interest."""

    def events(self, events: Sequence[AnyEvent]) -> None:
        done = read_progress(self._folder)
        if done:
            self._progress(f"{self._name}: training in turns", done)


def measure_step(
    request: StepRequest, *, workers: int | None, lab: str | None, progress: Progress
) -> StepComparison:
    """Train a model in turns, on workers of this machine or of a lab."""
    with tempfile.TemporaryDirectory(prefix="echelon-bench-") as root:
        folder = Path(root)
        write_request(folder, request)
        settings = RunSettings(workers=workers, lab=lab, runs=str(folder / "runs"), name="bench")
        target = Target(argv=["-m", "echelon.bench.step_worker", str(folder)], name="bench")
        ended = run(Resolved(settings, {}), target, _Showing(folder, request.model, progress))
        if ended.failure is not None:
            raise LaunchError(
                f"rank {ended.failure.rank} failed while {request.model} was measured: "
                f"{ended.failure.cause}",
                where="echelon bench step",
                fix="echelon doctor looks for what is wrong with this machine",
            )
        if ended.code:
            raise KeyboardInterrupt
        return compared(request.model, read_notes(folder, ended.workers))


def compared(name: str, notes: Sequence[WorkerNote]) -> StepComparison:
    """What the workers' times say."""
    sides: dict[str, StepParts] = {}
    for at, one in enumerate(notes[0].sides):
        by_worker = [note.sides[at].turns for note in notes]
        turns = list(zip(*by_worker, strict=True))
        sides[one.side] = _typical(one.side, [list(zip(*turn, strict=True)) for turn in turns])
    return StepComparison(
        name=name,
        workers=len(notes),
        batch=sum(note.batch for note in notes),
        threads=notes[0].threads,
        sides=sides,
    )


def _typical(side: Side, turns: Sequence[Sequence[tuple[TimedStep, ...]]]) -> StepParts:
    """The median of turns, each with the mean of its steps and workers."""
    return median_of([_parts_of_turn(side, turn) for turn in turns])


def median_of(found: Sequence[StepParts]) -> StepParts:
    """The median of each part."""
    return StepParts(
        step_s=median(one.step_s for one in found),
        parts={name: median(one.parts[name] for one in found) for name in found[0].parts},
    )


def _parts_of_turn(side: Side, turn: Sequence[tuple[TimedStep, ...]]) -> StepParts:
    ended = max(one.ended for one in turn[-1])
    step_s = (ended - min(one.begun for one in turn[0])) / len(turn)
    waiting, communication = [], []
    for workers in turn:
        last = max(one.computed for one in workers)
        for one in workers:
            # A worker that needs nobody, such as one that trains alone, waits for nobody.
            waited = 0.0 if side == "alone" else min(last, one.reduced) - one.computed
            waiting.append(waited)
            communication.append(one.reduced - one.computed - waited)
    steps = [one for workers in turn for one in workers]
    parts = {
        COMPUTING: fmean(one.computed - one.begun for one in steps),
        WAITING: fmean(waiting),
        COMMUNICATION: fmean(communication),
        UPDATE: fmean(one.ended - one.reduced for one in steps),
    }
    return StepParts(step_s=step_s, parts=parts)
