"""A DataFrame of pandas, which is in the memory of this process."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from echelon.data.source import DataSource, WriteJob
from echelon.data.write import WrittenPart, write_part

_ROWS = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class PandasSource(DataSource):
    """A DataFrame of pandas; missing values are its NaN, None and NA."""

    name: ClassVar[str] = "pandas"

    def accepts(self, table: Any) -> bool:
        """Without pandas imported, nothing is a DataFrame of it."""
        pandas = sys.modules.get("pandas")
        return pandas is not None and isinstance(table, pandas.DataFrame)

    def columns(self, table: Any) -> Sequence[str]:
        """The names of its columns, as text."""
        return [str(name) for name in table.columns]

    def write(self, table: Any, job: WriteJob) -> Sequence[WrittenPart]:
        """In this process."""
        position = {str(name): index for index, name in enumerate(table.columns)}
        chosen = {name: table.iloc[:, position[name]] for name in job.selection.names}
        batches = (
            {name: _array(column.iloc[start : start + _ROWS]) for name, column in chosen.items()}
            for start in range(0, len(table), _ROWS)
        )
        return [write_part(batches, job.selection, job.folder)]


def _array(column: Any) -> Any:
    """Types of pandas' own have NA, which numpy does not know."""
    if hasattr(column.dtype, "na_value") and column.isna().any():
        return column.to_numpy(dtype=object, na_value=None)
    return column.to_numpy()
