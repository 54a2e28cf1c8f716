"""`echelon bench step` as it is called: real workers, a moment each."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

SCRIPT = """
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from beside import WIDTH


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(128, WIDTH), torch.randint(4, (128,)))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    model = DistributedDataParallel(nn.Linear(WIDTH, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(100):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
"""


@pytest.fixture
def bench(tmp_path):
    """`echelon bench step` with these options, in an empty folder."""

    def call(*words):
        env = {**os.environ, "NO_COLOR": "1", "TMPDIR": str(tmp_path)}
        command = [sys.executable, "-m", "echelon", "bench", "step", *words]
        return subprocess.run(
            command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120, check=False
        )

    return call


def test_a_model_is_trained_both_ways_and_the_parts_add_up(bench, tmp_path):
    ended = bench("--model", "embedding", "--seconds", "0.1", "--json")
    assert ended.returncode == 0, ended.stderr
    (found,) = json.loads(ended.stdout)
    assert (found["name"], found["workers"], found["batch"]) == ("embedding", 2, 128)
    assert set(found["sides"]) == {"alone", "ddp", "echelon"}
    for side in found["sides"].values():
        assert all(part >= 0 for part in side["parts"].values())
        assert sum(side["parts"].values()) <= 1.5 * side["step_s"]
    assert found["ratio"] == pytest.approx(
        found["sides"]["echelon"]["step_s"] / found["sides"]["ddp"]["step_s"]
    )
    assert "embedding: warming up" in ended.stderr, "progress is shown"
    assert not list(tmp_path.glob("echelon*")), "nothing is left behind"


def test_a_script_with_ddp_is_measured_against_its_adapted_copy(bench, tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "beside.py").write_text("WIDTH = 8\n")
    ended = bench("--script", "train.py", "--steps", "8")
    assert ended.returncode == 0, ended.stderr
    rows = [line.split() for line in ended.stdout.splitlines()]
    assert [row[0] for row in rows[1:3]] == ["DDP", "Echelon"]
    assert "train.py with DDP: turn 2 of 2" in ended.stderr
    left = [path for path in tmp_path.iterdir() if "echelon" in path.name or path.name == "runs"]
    assert not left, "neither copies nor records are left"
    assert (tmp_path / "train.py").read_text() == SCRIPT
