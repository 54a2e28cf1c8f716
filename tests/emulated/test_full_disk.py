"""A disk that is full in the middle of a run: training goes on, the cause is said, the exit code is 0."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from echelon.checkpoint.store import read_newest

SCRIPT = """
import pathlib, torch, echelon
session = echelon.join()
model = torch.nn.Linear(3, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
model, optimizer = session.prepare(model, optimizer)
for _ in range(300):
    optimizer.zero_grad()
    model(torch.ones(4, 3)).mean().backward()
    optimizer.step()
    print("x" * 1000, flush=True)
pathlib.Path(f"done-{session.rank}").touch()
"""


@pytest.mark.usefixtures("_machine_can_emulate")  # root, for the mount
def test_a_full_disk_does_not_end_training(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(disk)], check=True)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "echelon", "run", "--workers", "2", "--runs", str(disk), "script.py"],
            cwd=tmp_path, env={**os.environ, "COLUMNS": "200"}, capture_output=True, text=True, timeout=120,
            check=False,
        )  # fmt: skip
    finally:
        subprocess.run(["umount", str(disk)], check=True)
    assert done.returncode == 0, done.stderr
    (said,) = [line for line in done.stderr.splitlines() if "the record is not complete" in line]
    assert "No space left on device" in said
    assert "training was not affected" in said
    assert "--out" not in done.stderr
    assert sorted(path.name for path in tmp_path.glob("done-*")) == ["done-0", "done-1"]


SAVES = """
import contextlib, pathlib, time, torch, echelon
from torch.utils.data import DataLoader, TensorDataset
from echelon.checkpoint.store import read_newest
session = echelon.join()
model = torch.nn.Linear(100, 100)
optimizer = torch.optim.AdamW(model.parameters())
loader = DataLoader(TensorDataset(torch.ones(400, 100)), batch_size=4)
model, optimizer, loader = session.prepare(model, optimizer, loader)
for _ in session.epochs(1):
    for (x,) in loader:
        optimizer.zero_grad()
        model(x).mean().backward()
        optimizer.step()
        if session.step == 55 and session.is_leader:
            while read_newest(pathlib.Path("disk/saved"), lambda state: None).step < 50:
                time.sleep(0.01)  # it is written in the background
            with contextlib.suppress(OSError), open("disk/filler", "wb", buffering=0) as filler:
                while True:
                    filler.write(bytes(4096))
pathlib.Path(f"done-{session.rank}").touch()
"""


@pytest.mark.usefixtures("_machine_can_emulate")  # root, for the mount
def test_a_disk_that_fills_up_leaves_the_last_checkpoints_and_training_goes_on(tmp_path):
    (tmp_path / "script.py").write_text(SAVES)
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(disk)], check=True)
    options = ["--workers", "2", "--checkpoint", "disk/saved", "--checkpoint-every", "25steps"]
    try:
        done = subprocess.run(
            [sys.executable, "-m", "echelon", "run", *options, "script.py"],
            cwd=tmp_path, env={**os.environ, "COLUMNS": "200"}, capture_output=True, text=True, timeout=120,
            check=False,
        )  # fmt: skip
        newest = read_newest(disk / "saved", lambda state: None)
    finally:
        subprocess.run(["umount", str(disk)], check=True)
    assert done.returncode == 0, done.stderr
    assert (
        "the checkpoint cannot be written: No space left on device; training goes on"
        in done.stdout + done.stderr
    )
    assert (newest.step, newest.rejected) == (50, {})
    assert sorted(path.name for path in tmp_path.glob("done-*")) == ["done-0", "done-1"]
