"""Parts that tasks wrote become one catalogue; a wrong row is named by its number in the whole table."""

from __future__ import annotations

import numpy as np
import pytest

from echelon.data.collect import collect
from echelon.data.columns import select
from echelon.data.write import WrittenPart, write_part
from echelon.errors import DataError


def part(folder, *arrays, column="v"):
    return write_part(
        [{column: array} for array in arrays], select([column], column, None, None), str(folder)
    )


def test_chunks_are_in_the_order_of_the_parts_and_empty_parts_do_not_matter(tmp_path):
    parts = [WrittenPart(), part(tmp_path, np.arange(3)), WrittenPart(), part(tmp_path, np.arange(2))]
    catalogue = collect(parts, str(tmp_path))
    assert catalogue.starts == [0, 3, 5]
    assert [chunk.name for chunk in catalogue.chunks] == [p.chunks[0].name for p in (parts[1], parts[3])]


def test_the_row_counts_from_the_beginning_of_the_table(tmp_path):
    bad = part(tmp_path, np.zeros(4), np.array([1.0, np.nan]))
    with pytest.raises(DataError) as caught:
        collect([part(tmp_path, np.zeros(10)), bad], str(tmp_path))
    assert caught.value.where == "loader_of, column 'v', row 15"


def test_the_first_wrong_row_of_several_parts_is_named(tmp_path):
    first, second = part(tmp_path, np.array(["a"])), part(tmp_path, np.array([np.nan]))
    with pytest.raises(DataError, match="holds text"):
        collect([first, second], str(tmp_path))


def test_parts_that_differ_in_shape_or_type_are_refused(tmp_path):
    whole = part(tmp_path, np.zeros((3, 2)))
    with pytest.raises(
        DataError, match="column 'v' has 3 values, but 2 values in the rows before"
    ) as caught:
        collect([whole, part(tmp_path, np.zeros((3, 3)))], str(tmp_path))
    assert caught.value.where.endswith("row 3")
    with pytest.raises(DataError, match="tensor x is int64, but x is float32 in the rows before"):
        collect([whole, part(tmp_path, np.zeros((3, 2), int))], str(tmp_path))


def test_a_task_that_is_tried_again_disturbs_nobody(tmp_path):
    tried, again = part(tmp_path, np.arange(3)), part(tmp_path, np.arange(3))
    assert tried.chunks[0].name != again.chunks[0].name
    assert collect([again], str(tmp_path)).rows == 3
