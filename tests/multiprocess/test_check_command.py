"""Real `echelon check`: what it prints, its exit codes, and that it leaves nothing behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

HEAD = """
import os, sys, torch, echelon
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

session = echelon.join()
assert ("RANK" in os.environ) == (session.world_size > 1)  # alone is as without a launcher
print("printed", sys.argv[1:], flush=True)
loader = DataLoader(TensorDataset(torch.randn(40, 8), torch.randn(40, 1)), batch_size=8, shuffle=True)
model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.2), nn.Linear(8, 1))
optimizer = torch.optim.Adam(model.parameters())
model, optimizer, loader = session.prepare(model, optimizer, loader)
"""

# It does not seed, and it catches what ends it.
STUBBORN = (
    HEAD
    + """
for epoch in session.epochs(1000):
    for x, y in loader:
        try:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
        except BaseException:
            print("caught", flush=True)
    torch.save(model.state_dict(), "model.pt")
"""
)

WRITTEN_SIZE = (
    HEAD
    + """
for x, y in loader:
    ((model(x) - y) * torch.ones(8, 1)).square().mean().backward()
    optimizer.step()
"""
)

ALONE = """
import sys, torch
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
while True:
    model(torch.ones(4, 2)).sum().backward()
    optimizer.step()
"""

SLEEPS = """
import time, echelon, pathlib
session = echelon.join()
pathlib.Path('../joined').touch()
time.sleep(250)
"""


@pytest.fixture
def folder(tmp_path) -> Path:
    (tmp_path / "temporary").mkdir()
    (tmp_path / "work").mkdir()
    return tmp_path / "work"


def _start(folder: Path, text: str, *words: str) -> subprocess.Popen[str]:
    (folder / "train.py").write_text(text)
    return subprocess.Popen(
        [sys.executable, "-m", "echelon", "check", *words],
        cwd=folder,
        env={
            **os.environ,
            "COLUMNS": "100",
            "NO_COLOR": "1",
            "TMPDIR": str(folder.parent / "temporary"),
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _ended(folder: Path, process: subprocess.Popen[str]) -> tuple[str, str]:
    """What it printed; nothing is left but the script."""
    try:
        out, err = process.communicate(timeout=240)
    finally:
        process.kill()
    assert [file.name for file in folder.iterdir()] == ["train.py"]
    assert not [file for file in (folder.parent / "temporary").iterdir() if "echelon" in file.name]
    return out, err


def test_a_script_that_computes_the_same_is_said_to_and_its_output_is_not_shown(folder):
    process = _start(
        folder, STUBBORN, "train.py", "--workers", "3", "--json", "--steps", "6", "--epochs", "9"
    )
    out, err = _ended(folder, process)
    report = json.loads(out)
    assert process.returncode == 0, out + err
    assert report["outcome"] == "same"
    assert report["text"].startswith("the same to ")
    assert report["text"].endswith("6 steps of train.py, alone and on 3 workers")
    assert 0 < report["difference"] < 1e-5
    assert [step["step"] for step in report["steps"]] == [1, 2, 3, 4, 5, 6]
    assert any("its own files are as they were" in note for note in report["notes"])
    assert "printed" not in err
    assert err.splitlines() == [
        "alone: starting",
        "alone: 6 steps",
        "3 workers: starting",
        "3 workers: 6 steps",
    ]


def test_a_script_that_fails_on_workers_shows_its_error_and_the_batch_size_that_is_written_into_it(folder):
    process = _start(folder, WRITTEN_SIZE, "train.py")
    out, err = _ended(folder, process)
    assert process.returncode == 1, out + err
    assert 'File "train.py", line 15, in <module>' in out
    assert "echelon/check/" not in out
    assert "train.py runs alone, and fails on 2 workers: RuntimeError: The size of tensor a (4)" in out
    assert "cause: the error names 8, the size of the whole batch, and 4, this worker's share" in out
    assert "fix:   take the size from the batch, x.size(0)" in out


def test_a_script_without_echelon_is_ended_after_its_steps_and_told_so(folder):
    process = _start(folder, ALONE, "train.py")
    out, err = _ended(folder, process)
    assert process.returncode == 1, out + err
    assert "train.py does not call echelon.join(): every worker would do the whole job by itself" in out


def test_a_script_that_fails_alone_shows_what_it_printed(folder):
    process = _start(folder, "import sys; print('usage: so'); sys.exit(3)", "train.py")
    out, err = _ended(folder, process)
    assert process.returncode == 1, out + err
    assert out.splitlines() == [
        "usage: so",
        "train.py fails alone: ended with exit code 3 and no exception",
        "  fix:   run it alone, and fix what it says",
    ]


def test_ctrl_c_ends_a_check_and_all_its_processes(folder):
    process = _start(folder, SLEEPS, "train.py")
    deadline = time.monotonic() + 120
    while not (folder.parent / "joined").exists():
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    out, err = _ended(folder, process)
    assert process.returncode == 130, out + err
    assert "interrupted" in out
