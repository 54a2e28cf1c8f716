"""`echelon run --checkpoint-every`, SIGTERM, `echelon resume`: with real launchers and workers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from echelon.checkpoint.folder import newest_step
from echelon.checkpoint.store import read_newest

ECHELON = (sys.executable, "-m", "echelon")
ENVIRONMENT = {**os.environ, "COLUMNS": "200", "NO_COLOR": "1"}

# The step waits for the file `go` from the tenth on, so that a signal always finds the run under way.
SCRIPT = """
import pathlib, sys, time, torch, echelon
from torch.utils.data import DataLoader, TensorDataset
session = echelon.join()
torch.manual_seed(session.rank)
model = torch.nn.Linear(3, 2)
optimizer = torch.optim.AdamW(model.parameters())
loader = DataLoader(TensorDataset(torch.ones(80, 3)), batch_size=4, shuffle=True)
model, optimizer, loader = session.prepare(model, optimizer, loader)
for epoch in session.epochs(2):
    for (x,) in loader:
        optimizer.zero_grad()
        model(x).mean().backward()
        optimizer.step()
        if session.step >= 10 and not pathlib.Path("go").exists():
            time.sleep(0.02)
print("ended at", session.step, "with", sys.argv[1], flush=True)
"""


def until(condition, what):
    deadline = time.monotonic() + 90
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def echelon(folder, *words):
    return subprocess.run(
        [*ECHELON, *words],
        cwd=folder,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    return tmp_path


def test_a_run_ended_by_sigterm_says_how_to_go_on_and_resume_goes_on(folder):
    options = ["--workers", "2", "--checkpoint-every", "4steps", "--checkpoint-keep", "2"]
    run = subprocess.Popen(
        [*ECHELON, "run", *options, "script.py", "an argument"],
        cwd=folder, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    kept = folder / "runs"
    try:
        until(lambda: any((newest_step(p) or 0) >= 8 for p in kept.glob("*/checkpoints")), "a checkpoint")
        run.send_signal(signal.SIGTERM)
        said, _ = run.communicate(timeout=90)
    finally:
        run.kill()
        run.wait()
    assert run.returncode == 75, said
    (record,) = kept.iterdir()
    step = read_newest(record / "checkpoints", lambda state: None).step
    assert f"stopped by SIGTERM after a last checkpoint at step {step}, in runs/" in said
    assert f"go on: echelon resume runs/{record.name}" in said

    (folder / "go").touch()
    resumed = echelon(folder, "resume", f"runs/{record.name}", "--workers", "3")
    assert resumed.returncode == 0, resumed.stderr
    assert resumed.stdout.endswith("ended at 40 with an argument\n")
    assert f"again, in {folder}: script.py 'an argument'" in resumed.stderr
    assert f"continues at step {step}" in resumed.stderr
    assert read_newest(record / "checkpoints", lambda state: None).step == 40
    (newer,) = [one for one in kept.iterdir() if one != record]
    assert str(record / "checkpoints") in (newer / "config.toml").read_text(), "it can be resumed again"


def test_a_run_that_cannot_be_resumed_says_why(folder):
    (folder / "short.py").write_text("print('no checkpoints')")
    assert echelon(folder, "run", "short.py").returncode == 0
    refused = echelon(folder, "resume")
    assert refused.returncode == 2
    assert "saved no checkpoints by itself" in refused.stderr
    (record,) = (folder / "runs").iterdir()
    (record / "command.json").unlink()
    refused = echelon(folder, "resume", record.name)
    assert refused.returncode == 2
    assert "does not say what it ran" in refused.stderr


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("--checkpoint-every", "often"), "'often' is not a time, steps or epochs"),
        (("--checkpoint-best", "f1"), "'f1' does not say which checkpoint is the best"),
        (("--checkpoint-keep", "0"), "--checkpoint-keep"),
        (("--checkpoint", "script.py"), "--checkpoint"),
    ],
)
def test_wrong_settings_of_checkpoints_are_refused_before_workers_start(folder, words, text):
    refused = echelon(folder, "run", *words, "script.py")
    assert refused.returncode == 2
    assert text in refused.stderr
    assert not (folder / "runs").exists()
