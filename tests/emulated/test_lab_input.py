"""A script in a lab has the launcher's terminal, as one without a lab has."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from terminal import Terminal

LAB = """
name = "asks"
[[node]]
name = "n"
count = 2
link = "200mbit"
"""

SCRIPT = """
import os, sys
print(os.popen("stty size", "r").read().split(), flush=True)
print("read", repr(sys.stdin.readline()), flush=True)
"""


@pytest.mark.usefixtures("can_emulate")
def test_worker_in_a_lab_knows_the_terminal_and_the_leader_reads_it(tmp_path: Path) -> None:
    (tmp_path / "lab.toml").write_text(LAB)
    (tmp_path / "script.py").write_text(SCRIPT)
    argv = [sys.executable, "-m", "echelon", "run", "--lab", "lab.toml", "script.py"]
    shown = Terminal(argv, cwd=tmp_path, env={**os.environ, "NO_COLOR": "1"}, width=90, height=20)
    try:
        shown.until("['20', '90']")
        shown.press("bob\n")
        assert shown.end() == 0, shown.shown
    finally:
        shown.close()
    assert "read 'bob\\n'" in shown.shown
    (log,) = tmp_path.glob("runs/*/logs/rank-1.log")
    assert log.read_text() == "['20', '90']\nread ''\n"
