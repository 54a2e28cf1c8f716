"""Scripts that `echelon adapt` has changed: they run, alone and on workers, and print the same."""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import shapes
from echelon.adapt.adapt import adapt
from echelon.adapt.text import ScriptText

_NUMBER = re.compile(r"-?\d+\.\d+")


def run_script(text):
    """Runs a script in this worker, as its launcher would; what it printed."""
    import echelon
    from echelon.train import join

    path = Path(f"script-{os.environ['RANK']}.py")
    path.write_text(text)
    sessions = []
    made = join.join

    def joined(**options):
        sessions.append(made(record=False, round_timeout_s=90, **options))
        return sessions[-1]

    printed = io.StringIO()
    sys.argv = [str(path)]
    join.join = joined
    try:
        with contextlib.redirect_stdout(printed):
            runpy.run_path(str(path), run_name="__main__")
        assert len(sessions) == 1
        assert isinstance(sessions[0], echelon.Session)
    finally:
        join.join = made
        for session in sessions:
            session.close()
    return printed.getvalue()


def _adapted(text: str) -> str:
    result = adapt(ScriptText(text), where="script.py")
    assert not result.needs_a_person, result.findings
    return result.text


def _assert_same(printed: str, other: str) -> None:
    """The same words, and numbers that agree to the rounding of sums."""
    assert _NUMBER.sub("#", printed) == _NUMBER.sub("#", other)
    numbers = [[float(one) for one in _NUMBER.findall(text)] for text in (printed, other)]
    assert numbers[0] == pytest.approx(numbers[1], rel=2e-4, abs=2e-4)


@pytest.mark.parametrize("name", shapes.SAME)
def test_adapted_script_prints_the_same_alone_and_on_two_workers(warm_pool, name):
    text = _adapted(shapes.SAME[name])
    (alone,) = warm_pool.run(1, run_script, text)
    workers = warm_pool.run(2, run_script, text)
    assert alone.strip()
    for printed in workers:
        _assert_same(printed, alone)


def test_adapted_ddp_script_trains_as_one_process_with_the_batch_of_all_workers(warm_pool):
    text = _adapted(shapes.DDP)
    leader, other = warm_pool.run(2, run_script, text)
    (whole,) = warm_pool.run(1, run_script, text.replace("batch_size=4", "batch_size=8"))
    assert other == ""
    _assert_same(leader, whole)


@pytest.mark.parametrize("name", ["accelerate", "fabric"])
def test_adapted_script_of_another_library_runs_without_it(warm_pool, name):
    text = _adapted(shapes.SHAPES[name])
    assert f"import {name}" not in text
    leader, other = warm_pool.run(2, run_script, text)
    assert leader.count("\n") == 2
    assert other == ""
    assert name != "accelerate" or leader.count(" of 25 right") == 2  # every sample once, on all workers


@pytest.mark.timeout(600)
def test_written_script_runs_under_echelon_run_and_alone(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(shapes.FUNCTIONS)
    environment = {**os.environ, "COLUMNS": "80", "NO_COLOR": "1", "OMP_NUM_THREADS": "1"}

    def run(*command: str) -> str:
        return subprocess.run(
            [sys.executable, *command],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            check=True,
            timeout=240,
        ).stdout

    assert run("-m", "echelon", "adapt", "train.py", "--write") == ""
    together = run("-m", "echelon", "run", "--workers", "2", "train.py", "--save")
    assert (tmp_path / "net.pt").is_file()
    _assert_same(run("train.py"), together)
    assert "epoch 1\n" in together
