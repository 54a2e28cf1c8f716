"""Fixtures for data sets and models: an empty data folder, and one thread."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch


@pytest.fixture
def data_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder that ECHELON_DATA names, with a cache folder next to it."""
    folder = tmp_path / "data"
    folder.mkdir()
    monkeypatch.setenv("ECHELON_DATA", str(folder))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return folder


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Small models are fastest on one thread, especially on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
