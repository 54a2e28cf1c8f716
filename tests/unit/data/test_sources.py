"""Tables that are in this process's memory or in files: pandas, Arrow, Parquet."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import echelon
from echelon.data.source import SOURCES, engine_failed, source_of
from echelon.errors import DataError


@pytest.fixture
def arrow():
    return pytest.importorskip("pyarrow", reason="pyarrow is not installed")


@pytest.fixture
def pandas():
    return pytest.importorskip("pandas", reason="pandas is not installed")


def rows_of(table, **options):
    with echelon.loader_of(table, batch_size=7, shuffle=False, **options) as data:
        return [torch.cat(parts) for parts in zip(*data, strict=True)]


def test_a_pandas_frame_becomes_its_rows(pandas):
    frame = pandas.DataFrame({"a": range(20), "v": [[i, i] for i in range(20)], 3: np.arange(20) / 2})
    x, y = rows_of(frame, label="3")
    assert x.tolist() == [[i, i, i] for i in range(20)]
    assert y.tolist() == [i / 2 for i in range(20)]


@pytest.mark.parametrize("values", [[1, None, 3], [1.5, float("nan"), 3]])
@pytest.mark.parametrize("dtype", ["float64", "Float64"])
def test_a_missing_value_of_pandas_is_named(pandas, values, dtype):
    frame = pandas.DataFrame({"a": pandas.Series(values, dtype=dtype)})
    with pytest.raises(DataError, match="column 'a' has no value") as caught:
        echelon.loader_of(frame, batch_size=2)
    assert caught.value.where.endswith("row 1")


def table_of(arrow, count=20):
    return arrow.table(
        {
            "a": arrow.array(range(count), arrow.int16()),
            "list": arrow.array([[i, 1.0] for i in range(count)]),
            "fixed": arrow.array([[i, 2.0] for i in range(count)], arrow.list_(arrow.float32(), 2)),
            "nested": arrow.array([[[i], [3]] for i in range(count)]),
            "y": arrow.array([i % 2 == 0 for i in range(count)]),
        }
    )


def test_an_arrow_table_becomes_its_rows_with_lists_of_all_kinds(arrow):
    x, y = rows_of(arrow.concat_tables([table_of(arrow), table_of(arrow)]).slice(3, 30), label="y")
    expected = [[i, i, 1, i, 2, i, 3] for i in [*range(20), *range(20)][3:33]]
    assert x.tolist() == expected
    assert y.tolist() == [int(row[0] % 2 == 0) for row in expected]


def test_parquet_files_are_read_in_the_order_of_their_names(arrow, tmp_path):
    from pyarrow import parquet

    for index in (1, 0):
        parquet.write_table(table_of(arrow).slice(10 * index, 10), tmp_path / f"{index}.parquet")
    x, _ = rows_of(str(tmp_path), columns=["a"], label="y")
    assert x.flatten().tolist() == list(range(20))
    x, _ = rows_of(tmp_path / "1.parquet", columns=["a"], label="y")
    assert x.flatten().tolist() == list(range(10, 20))


def test_a_path_without_parquet_files_is_named(arrow, tmp_path):
    with pytest.raises(DataError, match="there is no"):
        echelon.loader_of(tmp_path / "absent", batch_size=2)
    (tmp_path / "file.parquet").write_text("text")
    with pytest.raises(DataError, match="cannot be read as Parquet"):
        echelon.loader_of(tmp_path / "file.parquet", batch_size=2)


@pytest.mark.parametrize(
    ("values", "row", "text"),
    [
        ([1, 2, None], 2, "has no value"),
        ([[1], [2, None], [3, 4]], 1, "has no value in a list"),
        ([[1, 2], [None, 3], [3, 4]], 1, "has no value in a list"),
        ([[1], [2], [3, 4]], 2, "has 2 values, but 1 value in the rows before"),
        ([[1], None, [3]], 1, "has no value"),
        (["a", "b", "c"], 0, "holds text, which is not a number"),
    ],
)
def test_a_value_of_arrow_that_does_not_fit_is_named_by_column_and_row(arrow, values, row, text):
    with pytest.raises(DataError) as caught:
        echelon.loader_of(arrow.table({"c": values}), batch_size=2)
    assert caught.value.message == f"column 'c' {text}"
    assert caught.value.where.endswith(f"row {row}")


def test_a_function_of_the_user_gets_missing_values(arrow):
    table = arrow.table({"a": [1.0, None], "words": ["x", None], "lists": [[1], None]})

    def to_tensors(columns):
        assert columns["words"].tolist() == ["x", None]
        assert columns["lists"][1] is None
        return np.nan_to_num(columns["a"], nan=-1)

    with echelon.loader_of(table, batch_size=2, shuffle=False, to_tensors=to_tensors) as data:
        assert next(iter(data)).tolist() == [1, -1]


def test_every_source_says_no_to_what_is_not_its_own():
    for name in SOURCES.names():
        assert not SOURCES.build(name).accepts(object())
    assert source_of({"a": [1]}).name == "arrays"


def test_an_engine_without_echelon_is_told_how_to_get_it():
    error = engine_failed(
        "Spark", RuntimeError("x" * 5000 + "ModuleNotFoundError: No module named 'echelon'")
    )
    assert "install Echelon for the Python of every machine" in error.fix
    assert len(error.message) < 1500
