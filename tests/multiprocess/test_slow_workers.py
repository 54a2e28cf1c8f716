"""A worker that slows the others down is left out without being killed, and comes back when it is well."""

from __future__ import annotations

import subprocess
import sys

import pytest
from tests.losses import pid_of, run, slowed


def test_a_worker_that_is_20_times_slower_is_left_out_and_comes_back_into_the_pass(tmp_path):
    words = ("--leave-out", "median-mad")
    outcome = run(tmp_path, "shm", [], respawn=3, script=slowed(2, 5, 8), words=words)
    assert (outcome.code, outcome.wrong) == (0, []), outcome.output
    assert "rank 2 was left out: a step took it" in outcome.output
    assert "rank 2 is back after" in outcome.output
    assert "done with 4 workers" in outcome.output
    assert pid_of(tmp_path, 2) == int((tmp_path / "pid-2").read_text()), "the process was not killed"


def test_flexible_without_servers_leaves_the_first_worker_out_and_a_new_process_comes_to_a_later_epoch(
    tmp_path,
):
    words = ("--sync", "flexible", "--shares", "equal")
    outcome = run(tmp_path, "tcp", [], respawn=3, script=slowed(0, 5, 8, anew=True), words=words)
    assert (outcome.code, outcome.wrong) == (0, []), outcome.output
    assert "sync flexible without servers: a slow worker is left out" in outcome.output
    assert "rank 0 was left out: a step took it" in outcome.output
    assert "rank 0 is well, and is started again for this epoch" in outcome.output
    assert "rank 0 is back after" in outcome.output
    assert "done with 4 workers" in outcome.output


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--leave-out", "median-mad"], "only of a run that goes on without them"),
        (["--leave-out", "fast", "--min-workers", "1"], "fast"),
        (["--leave-out", "median-mad", "--min-workers", "1", "--codec", "dgc"], "--codec dgc"),
        (["--sync", "flexible(transfer=median-mad)"], "only at a server"),
        (["--sync", "flexible", "--leave-out", "absolute"], "both say who is slow"),
    ],
)
def test_what_cannot_leave_out_workers_is_refused_before_the_start(tmp_path, words, said):
    script = tmp_path / "train.py"
    script.write_text("raise SystemExit('it was started')")
    command = [sys.executable, "-m", "echelon", "run", "--workers", "2", *words, str(script)]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=90)
    assert ended.returncode == 2, ended
    assert said in ended.stderr
    assert "it was started" not in ended.stderr
