"""A log on a full disk: prints succeed, and other errors are still errors."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from echelon.start.log_file import LogFile


def test_a_full_disk_takes_everything_and_raises_nothing():
    with Path("/dev/full").open("wb") as full:
        stream = io.TextIOWrapper(io.BufferedWriter(LogFile(full.fileno(), "wb", closefd=False)))
        for _ in range(100):
            stream.write("x" * 1000 + "\n")
            stream.flush()


def test_what_fits_is_written(tmp_path):
    with LogFile(tmp_path / "log", "wb") as log:
        assert log.write(b"some text") == 9
    assert (tmp_path / "log").read_bytes() == b"some text"


def test_another_error_is_raised(tmp_path):
    with (tmp_path / "log").open("wb") as file:
        log = LogFile(file.fileno(), "wb", closefd=False)
    with pytest.raises(OSError, match="Bad file descriptor"):
        log.write(b"x")
