"""Tables of real engines, Spark and Ray, on this machine: their tasks write, workers without them read."""

from __future__ import annotations

import importlib.util
import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import echelon
import engine_program
from echelon.errors import DataError, UnknownName

ROWS = engine_program.ROWS
NEEDS = {"spark": ("pyspark", "pyarrow", "pandas"), "ray": ("ray", "pyarrow")}
pytestmark = pytest.mark.timeout(900)


class Left:
    """What an engine's program left."""

    def __init__(self, engine: str, folder: Path) -> None:
        self.engine = engine
        self.folder = folder

    def __getitem__(self, name: str):
        return pickle.loads((self.folder / f"{name}.pickle").read_bytes())


@pytest.fixture(scope="module", params=NEEDS)
def left(request, tmp_path_factory):
    absent = [name for name in NEEDS[request.param] if importlib.util.find_spec(name) is None]
    if absent:
        pytest.skip(f"{absent[0]} is not installed")
    folder = tmp_path_factory.mktemp(request.param)
    paths = [str(Path(echelon.__file__).parents[1]), str(Path(engine_program.__file__).parent)]
    environment = {
        **os.environ,
        "SPARK_LOCAL_IP": "127.0.0.1",
        "PYSPARK_PYTHON": sys.executable,
        "PYTHONPATH": os.pathsep.join(paths),
        "HOME": str(folder),  # Ray keeps a token there
    }
    command = [sys.executable, engine_program.__file__, request.param, str(folder)]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return Left(request.param, folder)


def drawn(data):
    """The rows that this worker draws in two epochs; it has no engine."""
    assert not {"pyspark", "ray", "pyarrow"} & set(sys.modules)
    with echelon.join(record=False, seed=3, shares=(3, 1), round_timeout_s=90) as session:
        loader = session.prepare(data)
        return [[int(y) for _, batch in loader for y in batch] for _ in range(2)]


def test_workers_without_the_engine_draw_each_row_once_per_epoch(warm_pool, left):
    first, second = warm_pool.run(2, drawn, left["rows"])
    for one, other in zip(first, second, strict=True):
        assert sorted(one + other) == list(range(ROWS))
        assert 2.9 < len(one) / len(other) < 3.1
    assert first[0] != first[1]


def test_rows_are_in_the_table_s_order_with_its_lists_vectors_and_tensors(left):
    dataset = left["rows"].dataset
    assert len(dataset.catalogue.chunks) >= 5
    x, y = dataset.__getitems__(range(ROWS))
    n = np.arange(ROWS)
    assert (y.dtype, y.tolist()) == (torch.int64, n.tolist())
    if left.engine == "spark":
        expected = np.stack([n / 2, n, n * 2, n, np.ones(ROWS), n], axis=1)
    else:
        expected = np.stack([np.stack([n, n * 2]), np.stack([n, n * 3])]).transpose(2, 0, 1)
        assert x.dtype == torch.int64
    assert np.array_equal(x.numpy(), expected.astype(x.numpy().dtype))


def test_a_missing_value_is_named_by_its_row_in_the_whole_table(left):
    error, row = left["null"], {"spark": 777, "ray": 77}[left.engine]
    assert isinstance(error, DataError)
    assert error.message == "column 'a' has no value"
    assert error.where == f"loader_of, column 'a', row {row}"


def test_lists_of_another_length_in_a_later_partition_are_named(left):
    assert left["lengths"].message == "column 'v' has 2 values, but 1 value in the rows before"
    assert left["lengths"].where.endswith("row 500")


def test_a_function_of_the_user_runs_in_the_tasks_of_the_engine(left):
    batch = left["function"].dataset.__getitems__(range(1000))
    assert batch["n"].tolist() == list(range(1000))
    assert set(batch["pid"].tolist()).isdisjoint({os.getpid()})
    assert len(left["function"].dataset.catalogue.chunks) == 4


def test_an_empty_table_is_refused(left):
    assert isinstance(left["empty"], DataError)
    assert "no rows" in left["empty"].message


def test_what_fails_in_the_engine_is_told_in_its_own_words(left):
    assert isinstance(left["broken"], DataError)
    name = left.engine.capitalize()
    assert left["broken"].message.startswith(f"{name} could not write the data: ")
    assert "no such luck" in left["broken"].message


def test_an_unknown_column_names_the_nearest_one(left):
    assert isinstance(left["unknown"], UnknownName)
    assert left["unknown"].nearest == "half"
