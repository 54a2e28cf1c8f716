"""What the workers of a check write down, and how it is read again.

    request.json              what to run, and for how many steps
    rank-N.msgpack            all notes of one worker, written anew after every step
    before-K.safetensors      the weights before the first step of optimizer K; rank 0 only
    step-I.safetensors        gradients and weights after the I-th optimizer step; rank 0 only
    draws.jsonl, states.bin   the random tensors drawn alone, and the generators' states before each

Of a large tensor a sample of its elements is kept, always the same ones, and its norm.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    import numpy as np


class CheckRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What each worker of a side runs.

    draws      the folder of the side whose random draws are repeated
    doubles    compute in 64 bits
    alternate  where the script shares out data of its own: rank 0 has every N-th row, not the first ones
    """

    program: list[str]
    steps: int
    draws: str = ""
    doubles: bool = False
    alternate: bool = False


class LossNote(msgspec.Struct, frozen=True, kw_only=True):
    """The value on which `backward()` was called, and this worker's weight in the mean over all workers."""

    value: float
    weight: float


class StepNote(msgspec.Struct, frozen=True, kw_only=True):
    """One step of one optimizer.

    optimizer  its index, in the order in which optimizers first stepped
    number     how many steps it has taken
    losses     one for each backward pass since the last step
    samples    how many samples those passes were over; None if no loader handed any out
    settings   the numbers of each parameter group, such as the learning rate
    digests    one for each parameter: of its values after the step
    """

    optimizer: int
    number: int
    losses: list[LossNote]
    samples: int | None
    settings: list[dict[str, float]]
    digests: list[str]


class OptimizerNote(msgspec.Struct, frozen=True, kw_only=True):
    """An optimizer: its class, its parameters' names, and those that belong to no prepared model."""

    kind: str
    names: list[str]
    unprepared: list[str]


class UnalignedDraw(msgspec.Struct, frozen=True, kw_only=True):
    """A random draw that could not be made the same alone and on workers; `step` counts from 0."""

    step: int
    place: str
    what: str
    why: str


class WorkerNotes(msgspec.Struct, kw_only=True):
    """All notes of one worker.

    workers    how many take part in its session; 0 if the script has not joined
    loss       what `prepare` was told that the loss is: mean or sum
    local      normalisation layers that use the statistics of this worker's samples only
    unshared   places in the script where a loader that was not prepared handed out training batches
    batch      share and size of the last batch of a prepared loader
    seeds      the arguments of torch.manual_seed, with their places
    half       whether anything was computed in 16 bits
    picks      whether integers were drawn, or numpy or Python drew: samples may be chosen by chance
    guessed    places of draws for data that the script shares out by itself: how was assumed
    """

    rank: int
    workers: int = 0
    sync: str = ""
    codec: str = ""
    models: int = 0
    loss: str = "mean"
    local: list[str] = []
    unshared: list[str] = []
    batch: tuple[int, int] | None = None
    seeds: list[tuple[int, str]] = []
    half: bool = False
    saves: int = 0
    unaligned: list[UnalignedDraw] = []
    picks: bool = False
    guessed: list[str] = []
    remarks: list[str] = []
    optimizers: list[OptimizerNote] = []
    steps: list[StepNote] = []


def request_file(folder: Path) -> Path:
    """Where a side's request is."""
    return folder / "request.json"


def notes_file(folder: Path, rank: int) -> Path:
    """Where one worker's notes are."""
    return folder / f"rank-{rank}.msgpack"


def before_file(folder: Path, optimizer: int) -> Path:
    """Where the weights before an optimizer's first step are."""
    return folder / f"before-{optimizer}.safetensors"


def step_file(folder: Path, index: int) -> Path:
    """Where gradients and weights of one optimizer step are."""
    return folder / f"step-{index}.safetensors"


def write_request(folder: Path, request: CheckRequest) -> None:
    """Write a side's request."""
    request_file(folder).write_bytes(msgspec.json.encode(request))


def read_request(folder: Path) -> CheckRequest:
    """Read a side's request."""
    return msgspec.json.decode(request_file(folder).read_bytes(), type=CheckRequest)


def write_notes(folder: Path, notes: WorkerNotes) -> None:
    """Write one worker's notes, whole or not at all: it may be killed at any time."""
    file = notes_file(folder, notes.rank)
    file.with_suffix(".tmp").write_bytes(msgspec.msgpack.encode(notes))  # JSON has no NaN
    file.with_suffix(".tmp").rename(file)


def read_notes(folder: Path, rank: int) -> WorkerNotes:
    """One worker's notes; empty ones if it has written none."""
    file = notes_file(folder, rank)
    if not file.exists():
        return WorkerNotes(rank=rank)
    return msgspec.msgpack.decode(file.read_bytes(), type=WorkerNotes)


def read_arrays(file: Path) -> Mapping[str, np.ndarray[Any, Any]]:
    """The arrays of a file of tensors."""
    from safetensors.numpy import load_file

    return load_file(file)
