"""The path of a Parquet file, or of a folder of them; read by pyarrow in this process, part by part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from echelon.data.arrow_columns import each_as_arrays
from echelon.data.source import DataSource, WriteJob, need
from echelon.data.write import WrittenPart, write_part
from echelon.errors import DataError

if TYPE_CHECKING:
    import pyarrow.dataset


@dataclass(frozen=True, slots=True, kw_only=True)
class ParquetSource(DataSource):
    """The path of a Parquet file, or of a folder of Parquet files."""

    name: ClassVar[str] = "parquet"

    def accepts(self, table: Any) -> bool:
        """Any path: what is wrong with it is said when it is read."""
        return isinstance(table, (str, Path))

    def columns(self, table: Any) -> Sequence[str]:
        """The names in the files' schema."""
        return list(_files(table).schema.names)

    def write(self, table: Any, job: WriteJob) -> Sequence[WrittenPart]:
        """In this process; files in the order of their names."""
        batches = _files(table).to_batches(columns=list(job.selection.names))
        arrays = each_as_arrays(batches, keep_missing=job.selection.to_tensors is not None)
        return [write_part(arrays, job.selection, job.folder)]


def _files(path: str | Path) -> pyarrow.dataset.Dataset:
    need("spark", "pyarrow")
    from pyarrow import ArrowException, dataset

    if "://" not in str(path) and not Path(path).exists():
        raise DataError(f"there is no {path}", where="loader_of", fix="give the path of Parquet files")
    try:
        return dataset.dataset(str(path), format="parquet")
    except (ArrowException, OSError) as error:
        raise DataError(
            f"{path} cannot be read as Parquet: {error}",
            where="loader_of",
            fix="give the path of Parquet files, or of a folder that loader_of wrote",
        ) from error
