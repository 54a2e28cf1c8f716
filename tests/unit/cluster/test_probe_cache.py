"""What was measured before is used only for what it depends on, and never causes an error."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from echelon.cluster import probe_cache


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ECHELON_CACHE", str(tmp_path))
    return tmp_path / "probe"


def test_entry_is_found_by_its_key_until_it_is_too_old() -> None:
    probe_cache.keep("machine a", "text", now=100.0)
    found = probe_cache.cached("machine a", within_s=10.0, now=105.0)
    assert found is not None
    assert found.text == "text"
    assert probe_cache.cached("machine a", within_s=10.0, now=111.0) is None
    assert probe_cache.cached("machine a", within_s=10.0, now=99.0) is None  # the clock was set back


def test_entry_of_another_machine_is_never_used(folder: Path) -> None:
    probe_cache.keep("machine a", "text", now=100.0)
    assert probe_cache.cached("machine b", within_s=10.0, now=100.0) is None
    # Even if its file has this machine's name: the key inside counts.
    (file,) = folder.iterdir()
    content = file.read_bytes()
    probe_cache.keep("machine b", "other", now=100.0)
    (mine,) = [each for each in folder.iterdir() if each != file]
    mine.write_bytes(content)
    assert probe_cache.cached("machine b", within_s=10.0, now=100.0) is None


@pytest.mark.parametrize("damage", [b"", b"{", b"[1]", b'{"key": 1}', b"\xff\xfe"])
def test_damaged_entry_is_measured_again(folder: Path, damage: bytes) -> None:
    probe_cache.keep("machine a", "text", now=100.0)
    (file,) = folder.iterdir()
    file.write_bytes(damage)
    assert probe_cache.cached("machine a", within_s=10.0, now=100.0) is None


def test_entry_that_is_forgotten_is_gone() -> None:
    probe_cache.keep("machine a", "text", now=100.0)
    probe_cache.forget("machine a")
    probe_cache.forget("machine a")
    assert probe_cache.cached("machine a", within_s=10.0, now=100.0) is None


def test_folder_that_cannot_be_written_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    monkeypatch.setenv("ECHELON_CACHE", str(blocked))
    probe_cache.keep("machine a", "text")
    assert probe_cache.cached("machine a", within_s=10.0) is None


def test_entry_is_json_that_a_person_can_read(folder: Path) -> None:
    probe_cache.keep("machine a", "text", now=1.0)
    (file,) = folder.iterdir()
    assert msgspec.json.decode(file.read_bytes()) == {"key": "machine a", "at": 1.0, "text": "text"}
