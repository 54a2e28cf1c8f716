"""A dict of arrays or tensors, by the names of columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from echelon.data.source import DataSource, WriteJob
from echelon.data.write import WrittenPart, write_part
from echelon.errors import DataError

_ROWS = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class ArraySource(DataSource):
    """A dict of arrays of one length: NumPy arrays, tensors or lists."""

    name: ClassVar[str] = "arrays"

    def accepts(self, table: Any) -> bool:
        """A mapping whose keys are names."""
        return isinstance(table, Mapping) and all(isinstance(name, str) for name in table)

    def columns(self, table: Any) -> Sequence[str]:
        """Its keys."""
        return list(table)

    def write(self, table: Any, job: WriteJob) -> Sequence[WrittenPart]:
        """In this process."""
        arrays = {name: _as_array(table[name]) for name in job.selection.names}
        lengths = {name: len(array) for name, array in arrays.items()}
        rows = next(iter(lengths.values()))
        for name, length in lengths.items():
            if length != rows:
                raise DataError(
                    f"column {name!r} has {length} rows, {next(iter(lengths))!r} has {rows}",
                    where="loader_of",
                    fix="give arrays of one length",
                )
        batches = (
            {name: array[start : start + _ROWS] for name, array in arrays.items()}
            for start in range(0, rows, _ROWS)
        )
        return [write_part(batches, job.selection, job.folder)]


def _as_array(values: Any) -> np.ndarray[Any, Any]:
    if hasattr(values, "detach"):  # a tensor
        values = values.detach().cpu().numpy()
    try:
        return np.asarray(values)
    except ValueError:  # lists of different lengths
        rows = np.empty(len(values), object)
        rows[:] = list(values)
        return rows
