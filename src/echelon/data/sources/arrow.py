"""A Table of pyarrow, which is in the memory of this process."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from echelon.data.arrow_columns import each_as_arrays
from echelon.data.source import DataSource, WriteJob
from echelon.data.write import WrittenPart, write_part


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrowSource(DataSource):
    """A Table or RecordBatch of pyarrow."""

    name: ClassVar[str] = "arrow"

    def accepts(self, table: Any) -> bool:
        """Without pyarrow imported, nothing is a Table of it."""
        arrow = sys.modules.get("pyarrow")
        return arrow is not None and isinstance(table, (arrow.Table, arrow.RecordBatch))

    def columns(self, table: Any) -> Sequence[str]:
        """The names in its schema."""
        return list(table.schema.names)

    def write(self, table: Any, job: WriteJob) -> Sequence[WrittenPart]:
        """In this process."""
        chosen = table.select(list(job.selection.names))
        batches = chosen.to_batches() if hasattr(chosen, "to_batches") else [chosen]
        arrays = each_as_arrays(batches, keep_missing=job.selection.to_tensors is not None)
        return [write_part(arrays, job.selection, job.folder)]
