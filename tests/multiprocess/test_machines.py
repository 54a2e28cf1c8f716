"""Workers on machines with several networks: they use addresses that work, and errors name the pair."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from machines import Machines, missing

SOURCE = Path(__file__).parents[2] / "src"

TRAIN = """
import torch, echelon
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

session = echelon.join()
torch.manual_seed(0)
data = torch.randn(90, 4)
loader = DataLoader(TensorDataset(data, data.sum(1, keepdim=True)), batch_size=30)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = session.prepare(model, optimizer, loader)
for epoch in session.epochs(2):
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
print("trained on", session.world_size)
"""


@pytest.fixture
def build(tmp_path):
    """Builds machines; afterwards no process of theirs is left."""
    if lacking := missing():
        pytest.skip(lacking)
    made = []

    def make(names, networks, **options):
        folder = tmp_path / "machines"
        folder.mkdir()
        made.append(Machines(folder, SOURCE, names, networks, **options))
        (tmp_path / "train.py").write_text(TRAIN)
        return made[-1]

    yield make
    for machines in made:
        until = time.monotonic() + 90
        while left := machines.processes():
            assert time.monotonic() < until, left
            time.sleep(0.1)
        machines.close()


def run(machines, tmp_path, hosts, *words):
    return machines.run(
        ["run", "--on", machines.launcher, "--hosts", hosts, *words, "--copy", "train.py"], tmp_path
    )


def test_machines_that_share_no_network_but_one_for_each_pair_train(build, tmp_path):
    machines = build("abc", {"10.1.0": "ab", "10.2.0": "ac", "10.3.0": "bc"})
    done = run(machines, tmp_path, "a,b,c")
    assert done.returncode == 0, done.stderr
    assert "trained on 3" in done.stdout


def test_a_pair_that_cannot_connect_is_named_with_address_and_cause_before_anything_starts(build, tmp_path):
    machines = build("abc", {"10.1.0": "abc"})
    machines.ip("c", "route add blackhole 10.1.0.2")
    done = run(machines, tmp_path, "a,b,c")
    assert done.returncode != 0
    assert "c cannot connect to b (" in done.stderr
    assert "10.1.0.2 port " in done.stderr
    assert "a route of type blackhole for it" in done.stderr
    assert "where: c to b, port " in done.stderr
    assert not (tmp_path / "runs").exists()


def test_doctor_says_which_pair_cannot_connect_in_which_direction_and_why(build, tmp_path):
    machines = build("abc", {"10.1.0": "abc"})
    machines.ip("c", "route add prohibit 10.1.0.2")
    words = ["doctor", "--on", machines.launcher, "--hosts", "a,b,c", "--port", "29500"]
    done = machines.run([*words, "--json"], tmp_path)
    assert done.returncode == 1, done.stdout
    findings = [one for one in json.loads(done.stdout)["findings"] if one["topic"] == "connections"]
    found = {one["subject"]: one for one in findings}
    assert {name for name, one in found.items() if one["level"] == "problem"} == {"b to c", "c to b"}
    assert "a route of type prohibit there, forbids it" in found["c to b"]["text"]
    assert "10.1.0.3 port " in found["b to c"]["text"]
    assert "no answer within 5 s: a firewall drops it" in found["b to c"]["text"]
    assert found["to a"]["text"].startswith("b, c to 10.1.0.1 (eth1); port 29500, ")
    assert found["to b"]["text"].startswith("a to 10.1.0.2 (eth1); port ")


def test_a_server_serves_machines_of_one_host_name_that_share_no_network(build, tmp_path):
    networks = {"10.1.0": "ab", "10.2.0": "ac", "10.3.0": "bc"}
    machines = build("abc", networks, host_name="ubuntu")
    done = run(machines, tmp_path, "a,b,c", "--servers", "1", "--sync", "async")
    assert done.returncode == 0, done.stderr
    assert "async: the server made " in done.stderr
