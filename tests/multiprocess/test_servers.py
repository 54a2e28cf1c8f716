"""Servers in processes of their own, as `echelon run --servers` starts them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

from echelon.config.schema import RunSettings
from echelon.errors import ConfigError
from echelon.observe.events import StepEnded, read_events

SCRIPT = """
import sys, time, torch
from torch import nn
import echelon

session = echelon.join(round_timeout_s=90)
torch.manual_seed(session.rank)
model = nn.Sequential(nn.Linear(64, 300), nn.Tanh(), nn.Linear(300, 2)).double()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
model, optimizer = session.prepare(model, optimizer, overlap=sys.argv[1])
for step in range(int(sys.argv[2])):
    x = torch.randn(6, 64, generator=torch.Generator().manual_seed(10 * step + session.rank)).double()
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
    if int(sys.argv[2]) > 100:
        time.sleep(0.05)
most = session.all_reduce(torch.tensor([-3 - session.rank]), "max")
torch.save([model.state_dict(), most], f"rank-{session.rank}.pt")
"""


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "echelon", "run", *words]


def trained(folder: Path, *words: str) -> list[list]:
    folder.mkdir()
    (folder / "script.py").write_text(SCRIPT)
    run = command("--workers", "2", *words, "script.py", "step", "5")
    done = subprocess.run(run, cwd=folder, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return [torch.load(file) for file in sorted(folder.glob("rank-*.pt"))]


def test_training_is_the_same_with_and_without_servers(tmp_path: Path) -> None:
    alone = trained(tmp_path / "alone")
    served = trained(tmp_path / "served", "--servers", "2")
    assert len(alone) == len(served) == 2
    for name, value in served[0][0].items():
        assert torch.equal(value, served[1][0][name])
        torch.testing.assert_close(value, alone[0][0][name], rtol=1e-9, atol=1e-12)
    assert [int(most) for _, most in served] == [-3, -3]


def _has_stepped(runs: Path) -> bool:
    files = runs.glob("*/events/rank-0*")
    return any(isinstance(event, StepEnded) for file in files for event in read_events(file))


def test_a_server_that_dies_is_named_and_ends_the_run(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    with subprocess.Popen(
        command("--workers", "2", "--servers", "1", "script.py", "backward", "1000"),
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as run:
        deadline = time.monotonic() + 120
        logs = tmp_path / "runs"
        while not _has_stepped(logs) and time.monotonic() < deadline:
            if run.poll() is not None:
                raise AssertionError(f"the run has ended: {run.communicate()[0]}")
            time.sleep(0.1)
        server = next(
            child
            for child in psutil.Process(run.pid).children(recursive=True)
            if "echelon.server.process" in child.cmdline()
        )
        os.kill(server.pid, signal.SIGKILL)
        said, _ = run.communicate(timeout=120)
    assert run.returncode != 0
    assert "rank 2" in said


@pytest.mark.parametrize("options", [{"transport": "c10d"}, {"collective": "ring"}, {"transport": "shm"}])
def test_servers_with_another_transport_or_collective_are_refused(options: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"servers (sum over TCP|use Echelon.s own transports)"):
        RunSettings(workers=2, servers=1, **options)  # type: ignore[arg-type]
