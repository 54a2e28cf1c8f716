"""A run in a lab measures its links, uses them for its decisions, and records the reasons."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from echelon.observe.events import BucketReduced, LinkMeasured, StepEnded, read_events

LAB = """
name = "engine"
[[node]]
name = "n"
count = 2
link = "200mbit"
"""

SCRIPT = """
import sys
import torch
from torch import nn
import echelon

session = echelon.join(round_timeout_s=120)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = session.prepare(model, optimizer)
for step in range(4):
    optimizer.zero_grad()
    model(torch.ones(4, 512)).square().sum().backward()
    optimizer.step()
"""


@pytest.mark.usefixtures("can_emulate")
def test_a_run_decides_by_measured_links_and_records_the_reasons(tmp_path: Path) -> None:
    (tmp_path / "engine.toml").write_text(LAB)
    (tmp_path / "script.py").write_text(SCRIPT)
    run = [sys.executable, "-m", "echelon", "run", "--lab", "engine.toml", "--overlap", "step", "script.py"]
    done = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (folder,) = (tmp_path / "runs").iterdir()
    plan = tomllib.loads((folder / "plan.toml").read_text())
    assert {"links", "buckets", "collective", "factors"} <= plan["reasons"].keys()
    assert "direct" in plan["reasons"]["collective"]
    assert "1 of 2 linear layers" in plan["reasons"]["factors"]  # 4 rows of 1024 values for 512 x 512
    for file in sorted((folder / "events").glob("rank-*")):
        events = list(read_events(file))
        (link,) = [event for event in events if isinstance(event, LinkMeasured)]
        assert 0 < link.bytes_per_s < 2 * 25e6
        ways = [event.how for event in events if isinstance(event, BucketReduced)]
        assert ways.count("factors") == 3  # the first round only profiles
        assert len([event for event in events if isinstance(event, StepEnded)]) == 4
