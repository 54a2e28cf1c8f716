"""A stream of rows becomes chunks, in the process of the source's task. Nothing here needs torch.

A chunk has a name of its own, so a task that is tried again disturbs nobody; only chunks that a successful
task reports are in the catalogue. What is wrong with a value is reported as well, not raised: the driver
knows the number of the row in the whole table, and raises.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from echelon.data.chunk import Chunk, Form, TensorSpec, this_host
from echelon.data.columns import Arrays, BadValue, LaidOut, Selection, lay_out, pad_fix, unequal

CHUNK_BYTES = 64 << 20  # a task holds about twice as much


@dataclass(frozen=True, slots=True, kw_only=True)
class RowProblem:
    """What is wrong with a row, counted from the task's first. Without a column: with the whole row."""

    column: str
    row: int
    what: str
    fix: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenPart:
    """What one task wrote, in the order of its rows; of the rows before a problem, if it met one."""

    chunks: tuple[Chunk, ...] = ()
    form: Form = "one"
    tensors: tuple[TensorSpec, ...] = ()
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    problem: RowProblem | None = None

    @property
    def rows(self) -> int:
        """How many rows were written."""
        return sum(chunk.rows for chunk in self.chunks)


def write_part(
    batches: Iterable[Arrays], selection: Selection, folder: str, *, chunk_bytes: int = CHUNK_BYTES
) -> WrittenPart:
    """Write a task's rows, given as arrays by column."""
    writer = _ChunkWriter(Path(folder), chunk_bytes)
    rows = 0
    problem = None
    try:
        for arrays in batches:
            writer.add(lay_out(arrays, selection))
            rows = writer.rows
        writer.flush()
    except BadValue as bad:
        problem = RowProblem(column=bad.column, row=rows + bad.row, what=bad.what, fix=bad.fix)
    except OSError as error:
        what = f"the rows cannot be written to {folder} on {this_host()}: {error.strerror or error}"
        problem = RowProblem(column="", row=rows, what=what, fix="give loader_of another folder=")
    return WrittenPart(
        chunks=tuple(writer.chunks),
        form=writer.form,
        tensors=writer.tensors,
        shapes=writer.shapes,
        problem=problem,
    )


class _ChunkWriter:
    def __init__(self, folder: Path, chunk_bytes: int) -> None:
        self.chunks: list[Chunk] = []
        self.form: Form = "one"
        self.tensors: tuple[TensorSpec, ...] = ()
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.rows = 0
        self._folder = folder
        self._chunk_bytes = chunk_bytes
        self._held: list[dict[str, npt.NDArray[Any]]] = []
        self._held_bytes = 0

    def add(self, laid: LaidOut) -> None:
        """Take some rows, and write those that fill a chunk."""
        tensors = tuple(
            TensorSpec(name=name, dtype=array.dtype.name, shape=array.shape[1:])
            for name, array in laid.arrays.items()
        )
        if not self.tensors:
            self.form, self.tensors, self.shapes = laid.form, tensors, laid.shapes
        wrong = disagreement(self.shapes, self.tensors, laid.shapes, tensors)
        if wrong is not None:
            raise BadValue(wrong[0], 0, wrong[1], pad_fix())
        rows = len(next(iter(laid.arrays.values())))
        row_bytes = max(1, sum(array.nbytes for array in laid.arrays.values()) // max(1, rows))
        step = max(1, self._chunk_bytes // row_bytes)
        for start in range(0, rows, step):
            part = {name: array[start : start + step] for name, array in laid.arrays.items()}
            self._held.append(part)
            self._held_bytes += sum(array.nbytes for array in part.values())
            if self._held_bytes + row_bytes > self._chunk_bytes:
                self.flush()
        self.rows += rows

    def flush(self) -> None:
        """Write the rows that are held as a chunk."""
        from safetensors.numpy import save

        if not self._held:
            return
        names = self._held[0].keys()
        whole = {
            name: np.ascontiguousarray(np.concatenate([part[name] for part in self._held]))
            for name in names
        }
        self._held, self._held_bytes = [], 0
        content = save(whole)
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        name = f"{uuid.uuid4().hex}.safetensors"
        unfinished = self._folder / f"{name}.part"
        unfinished.write_bytes(content)
        unfinished.rename(self._folder / name)
        self.chunks.append(
            Chunk(
                name=name,
                host=this_host(),
                rows=len(next(iter(whole.values()))),
                size_bytes=len(content),
                checksum=xxhash.xxh3_64_hexdigest(content),
            )
        )


def disagreement(
    shapes: dict[str, tuple[int, ...]],
    tensors: tuple[TensorSpec, ...],
    other_shapes: dict[str, tuple[int, ...]],
    others: tuple[TensorSpec, ...],
) -> tuple[str, str] | None:
    """The column in which later rows differ from earlier ones, and how; None if they agree."""
    for column, shape in shapes.items():
        if column in other_shapes and other_shapes[column] != shape:
            return column, unequal(other_shapes[column], shape)
    for before, after in zip(tensors, others, strict=False):
        if before != after:
            kinds = f"{after.dtype}, but {before.name} is {before.dtype} in the rows before"
            return "", f"tensor {after.name} is {kinds}"
    if len(tensors) != len(others):
        return "", f"there are {len(others)} tensors, but {len(tensors)} in the rows before"
    return None
