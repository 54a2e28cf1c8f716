"""What `loader_of` returns: a small loader that other processes can open, and a folder that goes away."""

from __future__ import annotations

import gc
import os
import pickle
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import echelon
from echelon.data import write
from echelon.data.collect import collect
from echelon.data.columns import select
from echelon.errors import ConfigError, DataError, UnknownName


def numbers(count=10):
    return {"n": np.arange(count)}


def folder_of(data):
    return Path(data.dataset.catalogue.folder)


def test_a_pickled_loader_is_small_and_reads_the_same_rows():
    with echelon.loader_of({"n": np.arange(200_000)}, columns="n", batch_size=64) as data:
        text = pickle.dumps(data)
        assert len(text) < 10_000
        copy = pickle.loads(text)
        assert sorted(torch.cat(list(copy)).tolist()) == list(range(200_000))
        copy.close()
        assert folder_of(data).exists(), "only the process that wrote the chunks removes them"


@pytest.mark.parametrize("end", [lambda data: data.close(), lambda data: None])
def test_a_temporary_folder_goes_with_the_loader(end):
    data = echelon.loader_of(numbers(), batch_size=2)
    folder = folder_of(data)
    assert folder.is_dir()
    end(data)
    del data
    gc.collect()
    assert not folder.exists()


def test_a_temporary_folder_goes_when_the_program_ends_and_a_fork_does_not_remove_it():
    program = (
        "import os, sys, echelon\n"
        "data = echelon.loader_of({'n': [1, 2, 3]}, batch_size=2)\n"
        "folder = data.dataset.catalogue.folder\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    sys.exit(0)\n"
        "os.waitpid(child, 0)\n"
        "print(os.path.isdir(folder), folder)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    there, folder = done.stdout.split()
    assert there == "True"
    assert not Path(folder).exists()


def test_nothing_is_left_of_a_table_that_was_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(DataError):
        echelon.loader_of({"n": ["a"]}, batch_size=2)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_of_the_user_is_as_empty_as_before_if_the_table_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(write.write_part, "__kwdefaults__", {"chunk_bytes": 100_000})
    with pytest.raises(DataError):
        echelon.loader_of({"v": [[1.0, 2.0]] * 70_000 + [[1.0]]}, batch_size=2, folder=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_rows_that_cannot_be_written_are_told_with_the_machine(tmp_path):
    (tmp_path / "file").write_text("")
    batches = [{"a": np.arange(3)}]
    part = write.write_part(batches, select(["a"], "a", None, None), str(tmp_path / "file" / "below"))
    with pytest.raises(
        DataError, match=f"the rows cannot be written to .* on {socket.gethostname()}: Not a"
    ):
        collect([part], "")


def test_a_folder_of_the_user_is_kept_and_can_be_opened_again_elsewhere(tmp_path):
    data = echelon.loader_of(numbers(), columns="n", batch_size=4, folder=tmp_path / "table", shuffle=False)
    rows = torch.cat(list(data)).tolist()
    data.close()
    moved = (tmp_path / "table").rename(tmp_path / "moved")
    again = echelon.loader_of(moved, batch_size=3, shuffle=False)
    assert torch.cat(list(again)).tolist() == rows == list(range(10))
    with pytest.raises(ConfigError, match="columns cannot be chosen for data that is already written"):
        echelon.loader_of(moved, batch_size=3, columns="n")


def test_a_folder_that_is_in_use_is_refused(tmp_path):
    echelon.loader_of(numbers(), batch_size=4, folder=tmp_path)
    with pytest.raises(ConfigError, match="is not empty"):
        echelon.loader_of(numbers(), batch_size=4, folder=tmp_path)


def test_a_folder_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="the folder cannot be used"):
        echelon.loader_of(numbers(), batch_size=4, folder=tmp_path / "file" / "below")


def test_a_damaged_catalogue_is_named(tmp_path):
    (tmp_path / "catalogue.json").write_text("{")
    with pytest.raises(DataError, match="the catalogue cannot be read"):
        echelon.loader_of(tmp_path, batch_size=4)


@pytest.mark.parametrize("harm", [lambda path: path.unlink(), lambda path: os.truncate(path, 20)])
def test_a_chunk_that_is_gone_or_cut_is_named_with_its_rows_and_machine(tmp_path, harm):
    data = echelon.loader_of(numbers(), batch_size=4, folder=tmp_path)
    chunk = data.dataset.catalogue.chunks[0]
    harm(tmp_path / chunk.name)
    with pytest.raises(DataError) as caught:
        next(iter(data))
    assert f"{chunk.name} (rows 0 to 9) cannot be read" in caught.value.message
    assert chunk.host in caught.value.message
    assert "a folder that all machines see" in caught.value.fix


def test_a_chunk_with_other_content_is_named_as_damaged(tmp_path):
    data = echelon.loader_of(numbers(), batch_size=4, folder=tmp_path)
    chunk = data.dataset.catalogue.chunks[0]
    (tmp_path / chunk.name).write_bytes(b"\xff" * chunk.size_bytes)
    with pytest.raises(DataError, match="is damaged"):
        next(iter(data))


@pytest.mark.parametrize(
    ("table", "options", "error", "text"),
    [
        ({"n": []}, {}, DataError, "the data has no rows"),
        ({}, {}, DataError, "the data has no columns and no rows"),
        ({"n": [1], "m": [1, 2]}, {}, DataError, "column 'm' has 2 rows, 'n' has 1"),
        (42, {}, ConfigError, "loader_of cannot read a builtins.int"),
        ({"n": [1]}, {"folder": "s3://bucket/x"}, ConfigError, "is not a path of the file system"),
        ([1, 2], {}, ConfigError, "loader_of cannot read a builtins.list"),
        ({"n": [1]}, {"batch_size": 0}, ConfigError, "batch_size is 0"),
        ({"n": [1]}, {"batch_size": 1.5}, ConfigError, "batch_size is 1.5"),
        ({"n": [1]}, {"order": "nera"}, UnknownName, "unknown order 'nera'"),
    ],
)
def test_what_cannot_be_read_is_refused(table, options, error, text):
    with pytest.raises(error, match=text):
        echelon.loader_of(table, **{"batch_size": 2, **options})


def test_without_pyarrow_a_path_names_the_extra_to_install(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(DataError, match="needs the package pyarrow") as caught:
        echelon.loader_of(tmp_path, batch_size=2)
    assert ".[spark]" in caught.value.fix


def test_processes_that_load_data_open_the_chunks_for_themselves():
    with echelon.loader_of(numbers(100), columns="n", batch_size=7, num_workers=2) as data:
        assert sorted(torch.cat(list(data)).tolist()) == list(range(100))


def test_alone_near_rows_are_all_rows():
    with echelon.loader_of(numbers(100), columns="n", batch_size=7, order="near") as data:
        assert sorted(torch.cat(list(data)).tolist()) == list(range(100))


def test_data_that_differs_has_another_fingerprint_and_its_place_does_not_matter(tmp_path):
    one = echelon.loader_of(numbers(), batch_size=2, folder=tmp_path / "one").dataset.catalogue
    same = echelon.loader_of(numbers(), batch_size=2, folder=tmp_path / "same").dataset.catalogue
    other = echelon.loader_of(numbers(11), batch_size=2, folder=tmp_path / "other").dataset.catalogue
    assert one.fingerprint == same.fingerprint != other.fingerprint
