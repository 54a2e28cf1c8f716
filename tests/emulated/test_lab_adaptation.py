"""A run that is told nothing finds sites and slow processors, and stays exact."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from echelon.observe.events import CollectiveChanged, SharesChanged, StageAssigned, read_events
from echelon.observe.run_folder import RunFolder

SCRIPT = """
import sys
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import echelon

session = echelon.join(seed=1)
torch.manual_seed(0)
width, steps, work = map(int, sys.argv[1:])
square = torch.ones(128, 128)
data = torch.randn(32 * steps, width)
model = nn.Sequential(nn.Linear(width, 512), nn.ReLU(), nn.Linear(512, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loader = DataLoader(TensorDataset(data, data[:, :8]), batch_size=32, shuffle=True)
model, optimizer, loader = session.prepare(model, optimizer, loader, factors="never")
for x, y in loader:
    for _ in range(work * len(x)):
        square @ square
    optimizer.zero_grad()
    nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()
weights = model.state_dict()
if session.is_leader:
    torch.save(weights, "weights.pt")
"""

NODE = '[[node]]\nname = "{name}"\nsite = "{site}"\ncpu = {cpu}\nlink = "1gbit"\n'


def run(folder, lab, *words, options=()):
    """The events of rank 0, and the weights."""
    (folder / "lab.toml").write_text(lab)
    (folder / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "echelon", "run", *options]
    if lab:
        command += ["--lab", "lab.toml"]
    done = subprocess.run(
        [*command, "train.py", *words], cwd=folder, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    weights = torch.load(folder / "weights.pt")
    return list(read_events(RunFolder.find("latest", folder / "runs").events_of(0))), weights


@pytest.fixture
def alone(tmp_path):
    """The weights that one process finds."""

    def weights(*words):
        folder = tmp_path / "alone"
        folder.mkdir()
        return run(folder, "", *words)[1]

    return weights


def assert_alike(weights, expected):
    for name, value in expected.items():
        torch.testing.assert_close(weights[name], value, rtol=1e-3, atol=1e-5)


@pytest.mark.usefixtures("_machine_can_emulate")
def test_sites_are_found_in_mixed_order_and_sums_are_taken_inside_them_first(tmp_path, alone):
    nodes = [("east-0", "east"), ("west-0", "west"), ("east-1", "east"), ("west-1", "west")]
    lab = "".join(NODE.format(name=name, site=site, cpu=0.4) for name, site in nodes)
    lab += '[[uplink]]\nbetween = ["east", "west"]\nrate = "60mbit"\n'
    events, weights = run(tmp_path, lab, "256", "12", "0")
    changes = [event for event in events if isinstance(event, CollectiveChanged)]
    assert changes, "nothing was arranged"
    assert changes[0].step == 0
    assert "ranks 0,2 and 1,3 are 2 sites" in changes[0].reason
    assert sorted(map(sorted, changes[0].groups)) == [[0, 2], [1, 3]]
    assert 0 < changes[0].expected_s < changes[0].before_s
    assert_alike(weights, alone("256", "12", "0"))


@pytest.mark.usefixtures("_machine_can_emulate")
def test_the_first_dimension_of_a_layout_stays_inside_sites_in_mixed_order(tmp_path, alone):
    nodes = [("east-0", "east"), ("west-0", "west"), ("east-1", "east"), ("west-1", "west")]
    lab = "".join(NODE.format(name=name, site=site, cpu=0.4) for name, site in nodes)
    lab += '[[uplink]]\nbetween = ["east", "west"]\nrate = "60mbit"\n'
    events, weights = run(
        tmp_path, lab, "64", "6", "0", options=["--parallel", "pipeline(stages=2) * data"]
    )
    (assigned,) = [event for event in events if isinstance(event, StageAssigned)]
    assert assigned.ranks == [0, 2]
    assert_alike(weights, alone("64", "6", "0"))


@pytest.mark.usefixtures("_machine_can_emulate")
def test_slow_processors_get_smaller_shares(tmp_path, alone):
    cpus = {"fast": 0.8, "slow-0": 0.1, "slow-1": 0.1}
    lab = "".join(NODE.format(name=name, site="main", cpu=cpu) for name, cpu in cpus.items())
    events, weights = run(tmp_path, lab, "64", "60", "6")
    shares = [event for event in events if isinstance(event, SharesChanged)]
    assert shares, "shares did not change"
    assert shares[0].before == [11, 11, 10]
    assert shares[-1].shares[0] > 16
    assert_alike(weights, alone("64", "60", "0"))
