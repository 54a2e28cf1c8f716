"""What `echelon bench step` asks of its workers, and what they note: files in a folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec

Side = Literal["alone", "ddp", "echelon", "local"]


class StepRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A model, how long to measure, and what: `local` is Echelon with batch normalisation as in DDP."""

    model: str
    seconds: float
    sides: tuple[Side, ...] = ("alone", "ddp", "echelon")


class TimedStep(msgspec.Struct, frozen=True, kw_only=True):
    """One step of one worker, on a clock that the workers of a machine share.

    `begun`: before forward. `computed`: this worker's last gradient is there. `reduced`: `backward()` has
    returned. `ended`: the optimizer has stepped.
    """

    begun: float
    computed: float
    reduced: float
    ended: float


class SideNote(msgspec.Struct, frozen=True, kw_only=True):
    """The steps of one side on one worker, turn by turn."""

    side: Side
    turns: list[list[TimedStep]]


class WorkerNote(msgspec.Struct, frozen=True, kw_only=True):
    """What one worker has measured."""

    rank: int
    batch: int
    threads: int
    sides: list[SideNote]


def write_request(folder: Path, request: StepRequest) -> None:
    """Write what is asked."""
    (folder / "request.json").write_bytes(msgspec.json.encode(request))


def read_request(folder: Path) -> StepRequest:
    """Read what is asked."""
    return msgspec.json.decode((folder / "request.json").read_bytes(), type=StepRequest)


def write_note(folder: Path, note: WorkerNote) -> None:
    """Write what one worker has measured."""
    (folder / f"worker-{note.rank}.json").write_bytes(msgspec.json.encode(note))


def read_notes(folder: Path, workers: int) -> Sequence[WorkerNote]:
    """What all workers have measured, by rank."""
    files = [folder / f"worker-{rank}.json" for rank in range(workers)]
    return [msgspec.json.decode(file.read_bytes(), type=WorkerNote) for file in files]


def write_progress(folder: Path, done: float) -> None:
    """Write how much is done, from 0 to 1: whole, since somebody reads it."""
    (folder / "progress.tmp").write_text(f"{done:.3f}", encoding="ascii")
    (folder / "progress.tmp").rename(folder / "progress")


def read_progress(folder: Path) -> float:
    """How much is done."""
    file = folder / "progress"
    return float(file.read_text(encoding="ascii")) if file.exists() else 0.0
