"""Finding data files, and the errors for missing ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from echelon.errors import DataError
from echelon.zoo.locate import cache_folder, data_folder, locate, locate_given


def test_echelon_data_names_the_data_folder(data_home: Path) -> None:
    assert data_folder() == data_home


def test_without_echelon_data_the_cache_folder_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ECHELON_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert data_folder() == tmp_path / "echelon" / "data"


def test_without_xdg_cache_home_the_cache_is_in_the_home_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_folder() == tmp_path / ".cache" / "echelon"


def test_a_relative_xdg_cache_home_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", "elsewhere")
    assert cache_folder() == tmp_path / ".cache" / "echelon"


def test_echelon_data_that_is_not_a_folder_is_an_error_naming_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECHELON_DATA", "/nowhere/at/all")
    with pytest.raises(DataError) as caught:
        data_folder()
    assert "/nowhere/at/all" in caught.value.where


def test_the_first_spelling_that_exists_is_used(data_home: Path) -> None:
    (data_home / "b.gz").touch()
    (data_home / "b").touch()
    assert locate("x", [["a", "b.gz", "b"]]) == [data_home / "b.gz"]


def test_error_lists_only_the_missing_files_and_their_folder(data_home: Path) -> None:
    (data_home / "set").mkdir()
    (data_home / "set" / "here").touch()
    with pytest.raises(DataError) as caught:
        locate("set", [["set/here"], ["set/gone.gz", "set/gone"]])
    assert "1 of 2" in caught.value.message
    assert f"gone.gz into {data_home / 'set'}" in caught.value.fix
    assert "here" not in caught.value.fix


def test_a_given_path_is_tried_directly_before_the_data_folder(
    data_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (data_home / "mine").touch()
    assert locate_given("x", "mine") == data_home / "mine"
    (tmp_path / "mine").touch()
    assert locate_given("x", "mine") == tmp_path / "mine"


def test_a_given_path_that_does_not_exist_is_an_error_naming_both_places(data_home: Path) -> None:
    with pytest.raises(DataError) as caught:
        locate_given("x", "mine")
    assert str(data_home) in caught.value.where
    assert str(Path.cwd()) in caught.value.where
