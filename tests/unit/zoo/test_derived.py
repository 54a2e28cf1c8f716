"""Cached arrays are made once, even if several processes ask at the same time."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from echelon.zoo.derived import Arrays, derived_arrays


def test_arrays_are_made_once_when_several_ask_at_the_same_time(data_home: Path) -> None:
    source = data_home / "source"
    source.write_bytes(b"12345")
    barrier = threading.Barrier(4)
    made: list[int] = []

    def make() -> Arrays:
        made.append(1)
        time.sleep(0.2)  # long enough for the others to find an empty cache
        return {"a": np.arange(10, dtype=np.uint8)}

    def ask() -> list[int]:
        barrier.wait(timeout=90)
        return derived_arrays("thing", source, ("a",), make)["a"].tolist()

    with ThreadPoolExecutor(4) as pool:
        answers = [future.result() for future in [pool.submit(ask) for _ in range(4)]]
    assert made == [1]
    assert answers == [list(range(10))] * 4


def test_changing_an_array_does_not_change_the_cache(data_home: Path) -> None:
    source = data_home / "source"
    source.touch()

    def ask() -> np.ndarray:
        return derived_arrays("thing", source, ("a",), lambda: {"a": np.zeros(3, np.uint8)})["a"]

    ask()[:] = 7
    assert ask().tolist() == [0, 0, 0]


def test_with_a_full_disk_the_arrays_are_used_without_caching(
    data_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    source = data_home / "source"
    source.touch()

    def no_space(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "save", no_space)
    kept = derived_arrays("thing", source, ("a",), lambda: {"a": np.ones(3, np.uint8)})
    assert kept["a"].tolist() == [1, 1, 1]
    assert "No space left on device" in caplog.text
    assert [file.name for file in (tmp_path / "cache" / "echelon" / "derived").iterdir()] == ["thing.lock"]
