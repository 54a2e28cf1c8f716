"""`echelon runs` on folders that runs of different ends have left."""

import json
import time
from pathlib import Path

import pytest

from echelon.observe.events import LAUNCHER, Evaluated, RunEnded, RunStarted, encode
from echelon.observe.run_folder import RunFolder
from echelon.observe.summary import write_summary
from echelon.plan.plan import PlanRequest, make_plan


def _write(file: Path, *events) -> None:
    file.write_bytes(b"".join(encode(event) + b"\n" for event in events))


@pytest.fixture
def runs(tmp_path) -> Path:
    """An older run that ended, and a newer one that goes on and has no plan yet."""
    root = tmp_path / "runs"
    ended = RunFolder(root / "b-ended").with_subfolders()
    started = RunStarted(t=1e9, rank=LAUNCHER, run="b-ended", command=["x"], world_size=2, sync="async")
    _write(ended.events_of(LAUNCHER), started, RunEnded(t=1e9 + 5, rank=LAUNCHER, outcome="completed"))
    _write(ended.events_of(0), Evaluated(t=1e9, rank=0, epoch=0, step=1, loss=0.5, accuracy=0.9, samples=3))
    plan = make_plan("b-ended", ["here"] * 2, PlanRequest(sync="async", codec="fp16"), cores=1)
    ended.plan.write_text(plan.to_toml())
    write_summary(ended)
    going_on = RunFolder(root / "a-going-on").with_subfolders()
    started = RunStarted(t=2e9, rank=LAUNCHER, run="a-going-on", command=["x"], world_size=3, sync="full")
    _write(going_on.events_of(LAUNCHER), started)
    (root / "no-run").mkdir()
    return root


def test_runs_are_listed_newest_first_with_their_figures(echelon, runs):
    ended = echelon("runs")
    assert ended.code == 0, ended.err
    head, *rows = ended.out.splitlines()
    assert head.split()[:2] == ["run", "started"]
    assert [row.split()[0] for row in rows] == ["a-going-on", "b-ended"]
    assert "unfinished" in rows[0]
    for figure in (
        "async, fp16",
        "0.5",
        "90.0 %",
        "completed",
        time.strftime("%d %b", time.localtime(1e9)),
    ):
        assert figure in rows[1]


def test_runs_as_json_have_all_figures(echelon, runs):
    newest, oldest = json.loads(echelon("runs", "--json").out)
    assert (newest["name"], newest["workers"], newest["outcome"]) == ("a-going-on", 3, "unfinished")
    assert newest["started"] == 2e9
    assert newest["accuracy"] is None
    assert (oldest["sync"], oldest["codec"], oldest["test_loss"]) == ("async", "fp16", 0.5)
    written = sum(file.stat().st_size for file in (runs / "b-ended").rglob("*") if file.is_file())
    assert oldest["size_bytes"] == written


def test_another_folder_can_be_named_and_may_be_empty(echelon, runs, tmp_path):
    assert "a-going-on" in echelon("runs", "--runs", str(runs)).out
    ended = echelon("runs", "--runs", "nowhere")
    assert (ended.code, ended.out) == (0, "no runs in nowhere\n")
    assert json.loads(echelon("runs", "--runs", "nowhere", "--json").out) == []


def test_listing_runs_does_not_write_to_them(echelon, runs):
    echelon("runs")
    assert not RunFolder(runs / "a-going-on").summary.exists()
