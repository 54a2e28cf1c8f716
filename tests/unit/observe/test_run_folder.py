"""A run's folder is new, has fixed paths, and can be found again."""

from __future__ import annotations

import re

import pytest

from echelon.errors import ConfigError
from echelon.observe.run_folder import RunFolder


def test_a_run_folder_is_named_by_time_and_name_and_has_its_subfolders(tmp_path):
    run = RunFolder.create(tmp_path / "deep" / "runs", "demo")
    assert re.fullmatch(r"\d{8}-\d{6}-demo", run.name)
    assert run.path == tmp_path / "deep" / "runs" / run.name
    assert all(folder.is_dir() for folder in (run.events, run.logs, run.errors))


def test_runs_of_the_same_second_get_different_folders(tmp_path):
    runs = [RunFolder.create(tmp_path, "demo") for _ in range(5)]
    assert len({run.path for run in runs}) == 5


def test_the_files_of_a_run_have_fixed_paths(tmp_path):
    run = RunFolder(tmp_path / "r")
    places = [
        run.config,
        run.plan,
        run.summary,
        run.events_of(0),
        run.events_of(-1),
        run.log_of(3),
        run.error_of(3),
    ]
    assert [str(place.relative_to(run.path)) for place in places] == [
        "config.toml",
        "plan.toml",
        "summary.json",
        "events/rank-0.jsonl",
        "events/launcher.jsonl",
        "logs/rank-3.log",
        "errors/rank-3.json",
    ]


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("a b/c", "a-b-c"),
        ("../../etc", "etc"),
        ("", "run"),
        ("///", "run"),
        ("é", "run"),
        ("v1.2", "v1.2"),
        ("x" * 99, "x" * 60),
    ],
)
def test_any_name_gives_a_folder_inside_the_root(tmp_path, name, part):
    run = RunFolder.create(tmp_path, name)
    assert run.path.parent == tmp_path
    assert run.name[16:] == part


def test_a_run_is_found_by_path_by_name_and_as_the_latest(tmp_path, monkeypatch):
    first, second = (RunFolder.create(tmp_path / "runs", "demo") for _ in range(2))
    monkeypatch.chdir(tmp_path)
    assert RunFolder.find(str(first.path)) == first
    assert RunFolder.find(f"runs/{first.name}") == first
    assert RunFolder.find(first.name) == first
    assert RunFolder.find("latest") == second


def test_folders_that_are_not_runs_are_never_the_latest(tmp_path):
    run = RunFolder.create(tmp_path, "demo")
    (tmp_path / "zzz").mkdir()
    assert RunFolder.find("latest", tmp_path) == run


@pytest.mark.parametrize("text", ["latest", "demo", "/nowhere/at/all"])
def test_without_any_run_the_error_says_so(tmp_path, text):
    with pytest.raises(ConfigError, match="no run in") as caught:
        RunFolder.find(text, tmp_path / "runs")
    assert caught.value.message == f"there is no run {text!r}"


def test_an_unknown_run_is_an_error_that_names_recent_runs(tmp_path):
    runs = [RunFolder.create(tmp_path, f"demo{i}") for i in range(5)]
    with pytest.raises(ConfigError) as caught:
        RunFolder.find("demo9", tmp_path)
    assert runs[4].name in caught.value.fix
    assert runs[0].name not in caught.value.fix


def test_a_root_that_is_a_file_is_an_error_with_a_fix(tmp_path):
    (tmp_path / "runs").touch()
    with pytest.raises(ConfigError, match="cannot create a run folder") as caught:
        RunFolder.create(tmp_path / "runs", "demo")
    assert caught.value.where == str(tmp_path / "runs")
    assert "--runs" in caught.value.fix
