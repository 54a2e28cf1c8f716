"""Columns become tensors of the stated types and shapes; what does not fit is named by column and row."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import echelon
from echelon.data import write
from echelon.data.columns import select
from echelon.data.write import write_part
from echelon.errors import ConfigError, DataError, UnknownName


def ragged(*rows):
    array = np.empty(len(rows), object)
    array[:] = rows
    return array


def batch_of(table, **options):
    with echelon.loader_of(table, batch_size=100, shuffle=False, **options) as data:
        return next(iter(data))


TABLE = {
    "a": np.arange(3, dtype=np.int32),
    "b": np.array([0.5, 1.5, 2.5]),
    "v": np.arange(6.0).reshape(3, 2),
    "y": np.array([1, 0, 1]),
}


def test_a_list_of_columns_is_one_matrix_of_numbers_and_lists_side_by_side():
    x, y = batch_of(TABLE, label="y")
    assert x.dtype == torch.float32
    assert x.tolist() == [[0, 0.5, 0, 1], [1, 1.5, 2, 3], [2, 2.5, 4, 5]]
    assert (y.dtype, y.tolist()) == (torch.int64, [1, 0, 1])


@pytest.mark.parametrize(
    ("values", "dtype", "shape"),
    [
        (np.arange(3, dtype=np.uint8), torch.int64, (3,)),
        (np.array([True, False, True]), torch.int64, (3,)),
        (np.zeros(3, np.float16), torch.float32, (3,)),
        (np.zeros((3, 2, 4)), torch.float32, (3, 2, 4)),
        (ragged([1, 2], [3, 4], [5, 6]), torch.int64, (3, 2)),
        (torch.zeros(3, 2), torch.float32, (3, 2)),
    ],
)
def test_a_column_alone_keeps_its_kind_of_number_and_its_shape(values, dtype, shape):
    x = batch_of({"x": values}, columns="x")
    assert (x.dtype, tuple(x.shape)) == (dtype, shape)


def test_several_labels_are_a_matrix_and_a_missing_label_leaves_x_alone():
    _, y = batch_of(TABLE, columns=["v"], label=["a", "b"])
    assert y.tolist() == [[0, 0.5], [1, 1.5], [2, 2.5]]
    assert isinstance(batch_of(TABLE, columns=["v"]), torch.Tensor)


@pytest.mark.parametrize(
    ("made", "kind"),
    [
        (lambda columns: torch.from_numpy(columns["b"]), torch.Tensor),
        (lambda columns: (columns["b"], columns["a"] > 1), tuple),
        (lambda columns: {"b": columns["b"], "a": columns["a"]}, dict),
    ],
)
def test_a_function_of_the_user_decides_what_a_batch_is(made, kind):
    batch = batch_of(TABLE, to_tensors=made)
    assert isinstance(batch, kind)
    b = batch if kind is torch.Tensor else batch[0] if kind is tuple else batch["b"]
    assert b.tolist() == [0.5, 1.5, 2.5]


def test_a_function_gets_text_and_lists_of_any_length():
    table = {"words": np.array(["to", "be", "or"]), "tokens": ragged([1], [2, 3], [])}
    lengths = batch_of(
        table,
        to_tensors=lambda c: np.array(
            [len(w) + len(t) for w, t in zip(c["words"], c["tokens"], strict=True)]
        ),
    )
    assert lengths.tolist() == [3, 4, 2]


@pytest.mark.parametrize(
    ("column", "row", "text", "values"),
    [
        ("v", 2, "has 3 values, but 2 values in the rows before", ragged([1, 2], [3, 4], [5, 6, 7])),
        ("v", 1, "has no value", ragged([1, 2], None, [5, 6])),
        ("v", 1, "has no value in a list", ragged([1, 2], [None, 1], [5, 6])),
        ("v", 1, "has no value", np.array([1, np.nan, 2])),
        ("v", 0, "holds text, which is not a number", np.array(["a", "b", "c"])),
        ("v", 0, "holds a date or time, which is not a number", np.zeros(3, "datetime64[s]")),
        ("v", 1, "is too large for float32", np.array([1, 1e300, 1])),
        ("v", 2, "is too large for int64", np.array([1, 1, 2**63], np.uint64)),
    ],
)
def test_a_value_that_does_not_fit_is_named_by_column_and_row(column, row, text, values):
    with pytest.raises(DataError) as caught:
        echelon.loader_of({"a": np.arange(3), "v": values}, batch_size=2)
    assert caught.value.message == f"column {column!r} {text}"
    assert caught.value.where == f"loader_of, column {column!r}, row {row}"
    assert caught.value.fix


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (lambda c: c["c"], r"to_tensors raised KeyError: 'c' .*test_columns.py, line \d+"),
        (lambda c: c["a"][:2], "to_tensors returned 2 rows for 3"),
        (lambda c: torch.tensor(1.0), "to_tensors returned no rows for 3"),
        (lambda c: ["text"], "to_tensors returned str"),
        (lambda c: (), "to_tensors returned nothing"),
    ],
)
def test_a_function_that_fails_or_returns_something_else_is_named(function, text):
    with pytest.raises(DataError, match=text):
        echelon.loader_of({"a": np.arange(3)}, batch_size=2, to_tensors=function)


def test_the_row_is_that_of_the_table_also_behind_other_batches():
    selection = select(["v"], "v", None, None)
    parts = [{"v": np.zeros((5, 2))}, {"v": np.zeros((4, 2))}, {"v": np.zeros((1, 3))}]
    part = write_part(parts, selection, "nowhere")
    assert part.problem is not None
    assert (part.problem.row, part.problem.what) == (9, "has 3 values, but 2 values in the rows before")


def test_rows_that_fill_several_chunks_stay_in_order(tmp_path, monkeypatch):
    monkeypatch.setattr(write.write_part, "__kwdefaults__", {"chunk_bytes": 64})
    data = echelon.loader_of(
        {"n": np.arange(100)}, columns="n", batch_size=7, folder=tmp_path, shuffle=False
    )
    chunks = data.dataset.catalogue.chunks
    assert [chunk.rows for chunk in chunks] == [8] * 12 + [4]
    assert torch.cat(list(data)).tolist() == list(range(100))
    assert data.dataset[-1].item() == 99


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"columns": ["a", "a"]}, "column 'a' is there twice"),
        ({"columns": ["a"], "label": "a"}, "column 'a' is there twice"),
        ({"label": "y", "to_tensors": dict}, "label and to_tensors are both given"),
        ({"columns": [1]}, "columns is \\[1\\]"),
        ({"columns": []}, "no columns are left for x"),
    ],
)
def test_choices_of_columns_that_contradict_themselves_are_refused(options, text):
    with pytest.raises(ConfigError, match=text):
        echelon.loader_of(TABLE, batch_size=2, **options)


def test_an_unknown_column_names_the_nearest_one():
    with pytest.raises(UnknownName, match="did you mean 'price'"):
        echelon.loader_of({"price": [1.0], "area": [2.0]}, label="prise", batch_size=1)
