"""Columns of Arrow as arrays: numbers as they are, lists of one length as one array, others as objects."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from echelon.data.columns import Arrays, BadValue

if TYPE_CHECKING:
    import pyarrow as pa


def each_as_arrays(batches: Iterable[pa.RecordBatch], *, keep_missing: bool) -> Iterator[Arrays]:
    """Every batch as arrays by column; without `keep_missing` a null raises BadValue."""
    for batch in batches:
        if batch.num_rows:
            yield {
                name: _array(name, column, keep_missing)
                for name, column in zip(batch.schema.names, batch.columns, strict=True)
            }


def _array(name: str, column: pa.Array, keep_missing: bool) -> npt.NDArray[Any]:
    import pyarrow as pa
    from pyarrow import types

    if column.null_count and not keep_missing:
        row = int(np.argmax(column.is_null().to_numpy(zero_copy_only=False)))
        fix = "fill or drop such rows, or give to_tensors= a function that handles them"
        raise BadValue(name, row, "has no value", fix)
    kind = column.type
    if isinstance(column, pa.FixedShapeTensorArray):
        return np.asarray(column.to_numpy_ndarray())
    if types.is_dictionary(kind):
        return _array(name, column.dictionary_decode(), keep_missing)
    if types.is_decimal(kind):
        return np.asarray(column.cast(pa.float64()).to_numpy(zero_copy_only=False))
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return _lists(name, column, keep_missing)
    # Ray's tensor columns are extension arrays whose `to_numpy` has the tensors' shape.
    return np.asarray(column.to_numpy(zero_copy_only=False))


def _lists(name: str, column: pa.Array, keep_missing: bool) -> npt.NDArray[Any]:
    import pyarrow.compute as pc

    lengths = np.asarray(pc.list_value_length(column).to_numpy(zero_copy_only=False))
    if len(lengths) and not column.null_count and (lengths == lengths[0]).all():
        length = int(lengths[0])
        try:
            values = _array(name, column.flatten(), keep_missing)
        except BadValue as bad:
            raise BadValue(name, bad.row // length, "has no value in a list", bad.fix) from None
        return values.reshape(len(column), length, *values.shape[1:])
    rows = np.empty(len(column), object)
    for row, value in enumerate(column):
        rows[row] = np.asarray(value.as_py()) if value.is_valid else None
    return rows
