"""The tutorials are true: their commands are run, and print what the documents show.

Blocks that begin with ```console are run; what may differ is said in `tests/documents.py`.
"""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

import machines
from documents import ROOT, Block, Command, console, fits

TUTORIALS = ROOT / "docs" / "tutorials"
_PROGRAMS = {"echelon": "-m echelon", "python": "", "torchrun": "-m torch.distributed.run"}


@pytest.fixture
def shell(tmp_path):
    """Runs a command line in an empty folder; `echelon`, `python` and `torchrun` are of this Python."""
    programs = tmp_path / "programs"
    folder = tmp_path / "folder"
    programs.mkdir()
    folder.mkdir()
    for name, module in _PROGRAMS.items():
        file = programs / name
        file.write_text(f'#!/bin/sh\nexec "{sys.executable}" {module} "$@"\n', encoding="utf-8")
        file.chmod(file.stat().st_mode | stat.S_IXUSR)
    environment = {
        **os.environ,
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "100",
        "NO_COLOR": "1",
    }

    def run(command: str) -> str:
        ended = subprocess.run(
            [*run.inside, "sh", "-c", command],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            check=False,
        )
        return ended.stdout.decode()

    run.folder = folder
    run.programs = programs
    run.inside = []  # a command that runs others somewhere else
    return run


@pytest.fixture
def two_machines(shell, tmp_path):
    """Has the shell's commands run where ssh reaches the machines desk and tower."""
    if lacking := machines.missing():
        pytest.skip(lacking)
    folder = tmp_path / "machines"
    folder.mkdir()
    made = machines.Machines(folder, ROOT / "src", ["desk", "tower"], {"192.168.1": ["desk", "tower"]})
    ssh = shell.programs / "ssh"
    ssh.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {folder}/client "$@"\n', encoding="utf-8")
    ssh.chmod(ssh.stat().st_mode | stat.S_IXUSR)
    shell.inside = ["ip", "netns", "exec", made.space("")]
    yield
    made.close()


def _run(document: Path, shell) -> None:
    ran = 0
    for part in console(document):
        if isinstance(part, Block):
            (shell.folder / part.title).write_text(part.text, encoding="utf-8")
        elif isinstance(part, Command):
            printed = shell(part.text)
            assert fits(part.expected, printed), (
                f"{document.name}, block of line {part.line}\n$ {part.text}\n"
                f"--- the document shows\n{part.expected}\n--- it printed\n{printed}"
            )
            ran += 1
    assert ran


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "name", ["first-script", "adapting", "unequal-machines", "stragglers", "thin-links"]
)
def test_tutorial_prints_what_it_shows(shell, name):
    _run(TUTORIALS / f"{name}.md", shell)


@pytest.mark.timeout(300)
@pytest.mark.usefixtures("two_machines")
def test_tutorial_of_two_machines_prints_what_it_shows(shell):
    _run(TUTORIALS / "two-machines.md", shell)


LATE = "Rank 1 (vm) arrived last in 7 % of rounds and cost the others 8 ms, 6 % of the run; do. record: a"
BUSY = (
    "Waiting for late workers cost 9.6 ms, 55 % of the run, but no single worker is the reason. Most often "
    "late: rank {} (vm), last in 86 % of rounds; rank {} (vm), last in 14 % of rounds. So. record: a"
)


@pytest.mark.parametrize(
    ("expected", "printed", "fit"),
    [
        ("accuracy 98.1 %", "accuracy 98.1 %\n", True),
        ("accuracy 98.1 %", "accuracy 98.2 %\n", False),
        ("184 steps in 3.3 s, 3,504 samples/s", "184 steps in 871 ms, 12 samples/s", True),
        ("184 steps in 3.3 s", "185 steps in 3.3 s", False),
        ("record: runs/20261115-205543-demo", "record: runs/20261116-000000-demo", True),
        ("record: runs/20261115-205543-demo", "record: runs/20261116-000000-other", False),
        ("a\n...\nz", "a\nb\nc\nz", True),
        ("a\n...\nz", "a\nb\nc", False),
        ("a\n...\nz", "a\nz", True),
        (
            "Rank 1 (vm) arrived last in 77 % of rounds",
            "Rank 1 (node-7) arrived\nlast in 8 % of rounds",
            True,
        ),
        ("Rank 1 (vm) arrived last", "Rank 0 (vm) arrived last", False),
        (LATE, BUSY.format(1, 0), True),
        (LATE, BUSY.format(0, 1), False),
        ("one\ntwo", "one\n\n  two\n", True),
    ],
)
def test_output_fits_if_only_times_names_and_what_is_left_out_differ(expected, printed, fit):
    assert fits(expected, printed) is fit


def test_in_a_table_of_workers_only_times_may_differ():
    table = """
  rank  node  share  samples/s  compute    wait      sent  last  held up
 ───────────────────────────────────────────────────────────────────────
     0  vm       28      1,724   1.37 s  1.55 s   34.1 MB   7 %   0.12 s
"""
    other = """
  rank  node         share  samples/s  compute     wait     sent   last  held up
 ────────────────────────────────────────────────────────────────────────────────
     0  another-one     28         17  11.37 s  1.55 ms  34.1 MB  100 %   9.12 s
"""
    assert fits(table, other)
    assert not fits(table, other.replace("28", "29"))
