"""A Dataset of Ray: each block is written by a task of Ray, on a machine that has it.

Blocks keep their order, which Ray does not promise by itself. Tasks need Echelon, numpy and pyarrow.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from echelon.data.arrow_columns import each_as_arrays
from echelon.data.source import DataSource, WriteJob, engine_failed, need
from echelon.data.write import WrittenPart, write_part

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True, slots=True, kw_only=True)
class RaySource(DataSource):
    """A Dataset of Ray Data, with its tensor columns."""

    name: ClassVar[str] = "ray"

    def accepts(self, table: Any) -> bool:
        """Without Ray Data imported, nothing is a Dataset of it."""
        ray = sys.modules.get("ray.data")
        return ray is not None and isinstance(table, ray.Dataset)

    def columns(self, table: Any) -> Sequence[str]:
        """The names in its schema, for which Ray may have to compute a first row."""
        try:
            return list(table.columns() or ())
        except Exception as error:
            raise engine_failed("Ray", error) from error

    def write(self, table: Any, job: WriteJob) -> Sequence[WrittenPart]:
        """In one execution of Ray Data, of which only the reports come back."""
        need("ray", "pyarrow")
        try:
            chosen = table.select_columns(list(job.selection.names))
            written = chosen.map_batches(_task(job), batch_format="pyarrow", batch_size=None)
            with _in_order(written):
                told = written.take_all()
        except Exception as error:
            raise engine_failed("Ray", error) from error
        return [msgspec.json.decode(row["told"], type=WrittenPart) for row in told]


def _task(job: WriteJob) -> Callable[[pa.Table], pa.Table]:
    """What a task does with a block: it writes the rows, and returns one row about them."""

    def write(block: pa.Table) -> pa.Table:
        import pyarrow as pa

        keep_missing = job.selection.to_tensors is not None
        arrays = each_as_arrays(block.to_batches(), keep_missing=keep_missing)
        part = write_part(arrays, job.selection, job.folder)
        return pa.table({"told": [msgspec.json.encode(part).decode()]})

    return write


@contextmanager
def _in_order(dataset: Any) -> Iterator[None]:
    """Let Ray keep the order of blocks; the option belongs to the user, and is put back."""
    options = dataset.context.execution_options
    before = options.preserve_order
    options.preserve_order = True
    try:
        yield
    finally:
        options.preserve_order = before
