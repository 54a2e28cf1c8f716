"""A DataFrame of Spark: each partition is written by a task of Spark, on the machine of its executor.

Partitions are in the order that `collect()` has. An executor's Python needs Echelon, numpy and pyarrow.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from echelon.data.arrow_columns import each_as_arrays
from echelon.data.source import DataSource, WriteJob, engine_failed, need
from echelon.data.write import WrittenPart, write_part

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True, slots=True, kw_only=True)
class SparkSource(DataSource):
    """A DataFrame of Spark; vectors of Spark ML count as lists."""

    name: ClassVar[str] = "spark"

    def accepts(self, table: Any) -> bool:
        """Without pyspark imported, nothing is a DataFrame of it."""
        spark = sys.modules.get("pyspark.sql")
        return spark is not None and isinstance(table, spark.DataFrame)

    def columns(self, table: Any) -> Sequence[str]:
        """The names in its schema."""
        return list(table.columns)

    def write(self, table: Any, job: WriteJob) -> Sequence[WrittenPart]:
        """In one job of Spark."""
        need("spark", "pyarrow", "pandas")
        chosen = table.select(*_expressions(table, job.selection.names))
        try:
            told = chosen.mapInArrow(_task(job), "told string").collect()
        except Exception as error:
            raise engine_failed("Spark", error) from error
        return [msgspec.json.decode(row["told"], type=WrittenPart) for row in told]


def _task(job: WriteJob) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """What a task does with its partition: it writes the rows, and yields one row about them."""

    def write(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import pyarrow as pa

        named = (batch.rename_columns(job.selection.names) for batch in batches)
        arrays = each_as_arrays(named, keep_missing=job.selection.to_tensors is not None)
        part = write_part(arrays, job.selection, job.folder)
        yield pa.RecordBatch.from_pydict({"told": [msgspec.json.encode(part).decode()]})

    return write


def _expressions(table: Any, names: Sequence[str]) -> list[Any]:
    """The columns, vectors of Spark ML as arrays. Numbered, for mapInArrow refuses names with dots."""
    from pyspark.sql.functions import col

    chosen = [col("`" + name.replace("`", "``") + "`") for name in names]
    ml = sys.modules.get("pyspark.ml.linalg")
    vectors = set()
    if ml is not None:  # where it is not imported, nothing is a vector
        vectors = {field.name for field in table.schema if isinstance(field.dataType, ml.VectorUDT)}
    if vectors & set(names):
        from pyspark.ml.functions import vector_to_array

        pairs = zip(names, chosen, strict=True)
        chosen = [vector_to_array(column) if name in vectors else column for name, column in pairs]
    return [column.alias(f"c{index}") for index, column in enumerate(chosen)]
