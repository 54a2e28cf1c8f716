"""`--local auto` as it is called: how a machine is used is measured, kept, and measured again on drift."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import torch
from torch import nn

import echelon

session = echelon.join()
data = torch.utils.data.TensorDataset(torch.randn(2048, 8), torch.randint(4, (2048,)))
loader = torch.utils.data.DataLoader(data, batch_size=16)
model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = session.prepare(model, optimizer, loader)
for x, y in loader:
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
print("trained by", session.world_size)
"""
TRAIN = ("train", "--local", "auto", "--model", "mlp(8, 1)", "--epochs", "1", "--batch", "128")


@pytest.fixture
def echelon(tmp_path):
    """`echelon` with these words, in an empty folder and with an empty cache."""

    def call(*words):
        env = {**os.environ, "NO_COLOR": "1", "TMPDIR": str(tmp_path), "ECHELON_CACHE": str(tmp_path / "c")}
        command = [sys.executable, "-m", "echelon", *words]
        return subprocess.run(
            command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120, check=False
        )

    return call


def test_a_way_is_measured_kept_followed_and_forgotten_when_runs_become_slower(echelon, tmp_path):
    first = echelon(*TRAIN)
    assert first.returncode == 0, first.stdout + first.stderr
    assert "measuring for up to 5 s" in first.stdout
    assert "--local auto: " in first.stdout
    (file,) = [one for one in (tmp_path / "c" / "probe").iterdir() if "local way" in one.read_text()]
    entry = json.loads(file.read_text())
    kept = json.loads(entry["text"])
    assert kept["run_rate"] > 0, "the first run leaves how fast it was"
    (folder,) = (tmp_path / "runs").iterdir()
    config = (folder / "config.toml").read_text()
    assert f"workers = {kept['way'].get('processes', 1)}\n" in config, "the run follows the way"
    assert 'local = "none"' in config, "a resumed run does not measure again"
    # A run a thousand times slower than the first: as if the machine had changed.
    kept |= {"way": {"processes": 2, "threads": 1}, "run_rate": 1000 * kept["run_rate"]}
    kept["rates"]["2 processes x 1 thread"] = 1.0
    file.write_text(json.dumps(entry | {"text": json.dumps(kept)}))
    second = echelon(*TRAIN)
    assert second.returncode == 0, second.stderr
    assert "starting 2 workers, 1 thread each" in second.stdout
    assert "(from an earlier run)" in second.stdout
    assert "--local auto measures again next time" in second.stdout
    assert not file.exists()
    assert not list(tmp_path.glob("echelon*")), "nothing is left behind"


def test_a_script_is_started_with_each_way_and_chunks_that_it_refuses_are_left_out(echelon, tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    ended = echelon("run", "--local", "auto", "train.py")
    assert ended.returncode == 0, ended.stderr
    assert "starting train a few times" in ended.stderr
    assert "(measured)" in ended.stderr
    assert ended.stdout.count("trained by") == 1, "trials print nothing"
    assert len(list((tmp_path / "runs").iterdir())) == 1, "trials leave no records"
    assert Path(tmp_path / "train.py").read_text() == SCRIPT


def test_options_that_say_how_a_machine_is_used_contradict_it(echelon):
    ended = echelon("run", "--local", "auto", "--threads", "1", "x.py")
    assert ended.returncode != 0
    ended = echelon(*TRAIN, "--workers", "2")
    assert ended.returncode == 2
    assert "--workers is what --local auto measures" in ended.stderr
    assert "leave out --workers, or --local auto" in ended.stderr
    ended = echelon(*TRAIN, "--hosts", "a:1,b:1")
    assert "--hosts does not go with --local auto" in ended.stderr
