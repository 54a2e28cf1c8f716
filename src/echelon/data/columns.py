"""Which columns become which tensors, and what is wrong with a value? Pure: arrays in, arrays out.

    columns="image"        x is that column: float32 or int64 as its numbers are, in its own shape
    columns=["a", "b"]     x is one float32 matrix: a number takes one column, a list its length
    label="y"              y, by the same rules
    to_tensors=function    the function's result, whatever the columns hold

A missing value is a null or NaN. Rows are counted from 0, in the order of the table.
"""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from echelon.data.chunk import Form
from echelon.errors import ConfigError, UnknownName

Arrays = Mapping[str, npt.NDArray[Any]]
ToTensors = Callable[[dict[str, npt.NDArray[Any]]], Any]
_FILL = "fill or drop such rows, or give to_tensors= a function that handles them"
_CAST = "leave the column out with columns=, turn it into numbers, or give to_tensors= a function that does"


class BadValue(Exception):
    """A value that cannot become part of a tensor. The row counts from the beginning of the arrays.

    `what` goes on after the column's name; without a column it is a whole sentence.
    """

    def __init__(self, column: str, row: int, what: str, fix: str) -> None:
        super().__init__(column, row, what, fix)
        self.column = column
        self.row = row
        self.what = what
        self.fix = fix


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The columns of x and of y. Alone, a column keeps its type and shape; several are one matrix."""

    x: tuple[str, ...]
    y: tuple[str, ...] = ()
    x_alone: bool = False
    y_alone: bool = False
    to_tensors: ToTensors | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """The columns that are read, in order."""
        return self.x + self.y


@dataclass(frozen=True, slots=True, kw_only=True)
class LaidOut:
    """The tensors of some rows as arrays, and the shape that a row has in each column."""

    form: Form
    arrays: dict[str, npt.NDArray[Any]]
    shapes: dict[str, tuple[int, ...]]


def select(
    known: Sequence[str],
    columns: str | Sequence[str] | None,
    label: str | Sequence[str] | None,
    to_tensors: ToTensors | None,
) -> Selection:
    """What the user chose of the columns that there are."""
    if to_tensors is not None and label is not None:
        raise ConfigError(
            "label and to_tensors are both given",
            where="loader_of",
            fix="let to_tensors return the label as well, as in (x, y)",
        )
    y = _named(label, "label")
    x = _named(columns, "columns") if columns is not None else tuple(n for n in known if n not in y)
    for name in x + y:
        if name not in known:
            raise UnknownName("column", name, known, where="loader_of")
    double = [name for name, count in Counter([*x, *y]).items() if count > 1]
    double += [name for name, count in Counter(known).items() if count > 1 and name in x + y]
    if double:
        raise ConfigError(
            f"column {double[0]!r} is there twice",
            where="loader_of, columns and label",
            fix="name each column once; the label is not one of columns",
        )
    if not x:
        raise ConfigError("no columns are left for x", where="loader_of", fix="name some with columns=")
    alone = isinstance(columns, str), isinstance(label, str)
    return Selection(x=x, y=y, x_alone=alone[0], y_alone=alone[1], to_tensors=to_tensors)


def _named(names: str | Sequence[str] | None, what: str) -> tuple[str, ...]:
    if names is None:
        return ()
    listed = (names,) if isinstance(names, str) else tuple(names)
    if not all(isinstance(name, str) for name in listed):
        raise ConfigError(
            f"{what} is {names!r}", where=f"loader_of, {what}", fix="give a name, or a list of names"
        )
    return listed


def lay_out(arrays: Arrays, selection: Selection) -> LaidOut:
    """The tensors of these rows. Raises BadValue for the first value that does not fit."""
    if selection.to_tensors is not None:
        return _by_function(arrays, selection.to_tensors)
    numbers = {name: _numbers(name, arrays[name]) for name in selection.names}
    out = {"x": _joined([numbers[name] for name in selection.x], selection.x_alone)}
    if selection.y:
        out["y"] = _joined([numbers[name] for name in selection.y], selection.y_alone)
    shapes = {name: array.shape[1:] for name, array in numbers.items()}
    return LaidOut(form="tuple" if selection.y else "one", arrays=out, shapes=shapes)


def _joined(parts: list[npt.NDArray[Any]], alone: bool) -> npt.NDArray[Any]:
    if alone:
        return parts[0]
    rows = len(parts[0])
    return np.concatenate([part.reshape(rows, -1).astype(np.float32) for part in parts], axis=1)


def _numbers(name: str, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The column as float32 or int64."""
    if array.dtype.kind == "O":
        array = _stacked(name, array)
    if array.dtype.kind not in "fiub":
        raise BadValue(name, 0, f"holds {_said(array)}, which is not a number", _CAST)
    if array.dtype.kind == "f":
        _refuse(name, np.isnan(array), "has no value", _FILL)
        with np.errstate(over="ignore"):
            small = array.astype(np.float32)
        _refuse(name, np.isinf(small) & ~np.isinf(array), "is too large for float32", "scale the column")
        return small
    if array.dtype == np.uint64:
        _refuse(name, array > np.iinfo(np.int64).max, "is too large for int64", "scale the column")
    return array.astype(np.int64)


def _refuse(name: str, wrong: npt.NDArray[np.bool_], what: str, fix: str) -> None:
    if wrong.any():
        rows = wrong.reshape(len(wrong), -1).any(axis=1)
        raise BadValue(name, int(rows.argmax()), what, fix)


def _stacked(name: str, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Lists of one length as one array."""
    first: tuple[int, ...] | None = None
    rows = []
    for row, value in enumerate(array):
        if value is None or value is np.ma.masked:
            raise BadValue(name, row, "has no value", _FILL)
        try:
            one = np.asarray(value)
        except ValueError:  # lists of lists of different lengths
            one = np.empty(0, object)
        if one.dtype.kind not in "fiub":
            missing = one.dtype.kind == "O" and any(part is None for part in one.flat)
            what = "has no value in a list" if missing else f"holds {_said(one)}, which is not a number"
            raise BadValue(name, row, what, _FILL if missing else _CAST)
        if first is None:
            first = one.shape
        if one.shape != first:
            raise BadValue(name, row, unequal(one.shape, first), _PAD)
        rows.append(one)
    return np.stack(rows) if rows else array.astype(np.float32)


_PAD = "make all rows of one length, or give to_tensors= a function that pads them"


def unequal(shape: tuple[int, ...], before: tuple[int, ...]) -> str:
    """What is wrong if a row has another shape than the rows before."""
    return f"has {_size(shape)}, but {_size(before)} in the rows before"


def pad_fix() -> str:
    """What helps against rows of unequal length."""
    return _PAD


def _size(shape: tuple[int, ...]) -> str:
    if not shape:
        return "a single number"
    return f"{' x '.join(str(length) for length in shape)} value{'' if shape == (1,) else 's'}"


def _said(array: npt.NDArray[Any]) -> str:
    kinds = {"U": "text", "S": "bytes", "M": "a date or time", "m": "a duration", "c": "complex numbers"}
    if array.dtype.kind != "O":
        return kinds.get(array.dtype.kind, str(array.dtype))
    first = next((value for value in array.flat if value is not None), None)
    return f"values of type {type(first).__name__}" if first is not None else "lists of unequal lengths"


def _by_function(arrays: Arrays, function: ToTensors) -> LaidOut:
    """What the user's function makes of the rows."""
    rows = len(next(iter(arrays.values())))
    try:
        made = function(dict(arrays))
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        what = f"to_tensors raised {type(error).__name__}: {error} ({last.filename}, line {last.lineno})"
        raise BadValue("", 0, what, "correct the function; it gets a dict of arrays") from error
    if isinstance(made, Mapping):
        form, parts = "dict", {str(key): value for key, value in made.items()}
    elif isinstance(made, (tuple, list)):
        form, parts = "tuple", {str(index): value for index, value in enumerate(made)}
    else:
        form, parts = "one", {"0": made}
    out = {name: _as_array(name, value, rows) for name, value in parts.items()}
    if not out:
        raise BadValue("", 0, "to_tensors returned nothing", "return a tensor, a tuple of them, or a dict")
    shapes = {f"result {name}": array.shape[1:] for name, array in out.items()}
    return LaidOut(form=form, arrays=out, shapes=shapes)  # type: ignore[arg-type]


def _as_array(name: str, value: Any, rows: int) -> npt.NDArray[Any]:
    if hasattr(value, "detach"):  # a tensor, of a torch that need not be imported here
        value = value.detach().cpu().numpy()
    if not isinstance(value, np.ndarray) or value.dtype.kind not in "fiub":
        kind = value.dtype if isinstance(value, np.ndarray) else type(value).__name__
        raise BadValue(
            "", 0, f"to_tensors returned {kind} as result {name}", "return tensors, or arrays of numbers"
        )
    if value.ndim == 0 or len(value) != rows:
        size = "no rows" if value.ndim == 0 else f"{len(value)} rows"
        what = f"to_tensors returned {size} for {rows}, as result {name}"
        raise BadValue("", 0, what, "return one row for each")
    return value
