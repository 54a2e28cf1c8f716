"""The experiment in examples/ runs in its lab."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"
ONE = "shares by speed"


def test_lab_experiment_prints_a_row_for_each_variant(lab_prefix: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [
            sys.executable,
            EXAMPLES / "lab_experiment.py",
            "--epochs",
            "1",
            "--batch",
            "480",
            "--runs",
            tmp_path,
            "--only",
            ONE,
        ],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    header, row = done.stdout.splitlines()
    assert header.split() == ["variant", "samples/s", "accuracy"]
    assert row.startswith(ONE)
