"""`--local auto`: how a machine is used is measured by real processes, kept, and measured again later."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from echelon.config.resolve import resolve
from echelon.config.schema import RunSettings, TrainSettings
from echelon.errors import ConfigError
from echelon.start import local_choice
from echelon.start.local_choice import chosen_way
from echelon.start.run import Target

SCRIPT = """
import torch
from torch import nn

import echelon

session = echelon.join()
data = torch.utils.data.TensorDataset(torch.randn(1024, 8), torch.randint(4, (1024,)))
loader = torch.utils.data.DataLoader(data, batch_size=8)
model = nn.Linear(8, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = session.prepare(model, optimizer, loader)
for x, y in loader:
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
print("trained by", session.world_size)
"""
TARGET = Target(argv=["-m", "echelon.train.job"], name="mlp")


def test_a_way_is_measured_once_and_again_after_a_run_that_was_clearly_slower(monkeypatch, tmp_path):
    monkeypatch.setenv("ECHELON_CACHE", str(tmp_path))
    monkeypatch.setattr(local_choice, "LIMIT_S", 0.5)
    given = {"local": "auto", "model": "mlp(8, 1)", "batch": 64}
    said: list[str] = []

    def choose():
        return chosen_way(resolve(TrainSettings, given), TARGET, said.append)

    first = choose()
    assert first.kept is not None, first.notes
    settings, way = first.resolved.settings, first.kept.way
    assert (settings.workers, settings.threads) == (way.processes, way.threads_a_process)
    assert (settings.local, settings.parallel) == ("none", way.layout), "a resumed run does not measure"
    assert first.notes[0].endswith("(measured)")
    first.seen(SimpleNamespace(samples_per_s=1000.0), said.append)
    second = choose()
    assert second.notes[0].endswith("(from an earlier run)")
    assert second.resolved.settings == settings
    assert len(said) == 1, "nothing is measured"
    second.seen(SimpleNamespace(samples_per_s=900.0), said.append)
    assert choose().kept == second.kept, "runs differ a little"
    second.seen(SimpleNamespace(samples_per_s=100.0), said.append)
    assert "100 samples/s, 1000 before: --local auto measures again" in said[-1]
    assert local_choice._from_cache(second.key) is None


def test_a_script_is_started_with_each_way_and_then_trains_once(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    env = {**os.environ, "NO_COLOR": "1", "TMPDIR": str(tmp_path), "ECHELON_CACHE": str(tmp_path / "c")}
    ended = subprocess.run(
        [sys.executable, "-m", "echelon", "run", "--local", "auto", "train.py"],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert "starting train a few times" in ended.stderr
    assert "(measured)" in ended.stderr
    assert ended.stdout.count("trained by") == 1, "trials print nothing"
    assert len(list((tmp_path / "runs").iterdir())) == 1, "trials leave no records"
    assert not list(tmp_path.glob("echelon*")), "nothing is left behind"


@pytest.mark.parametrize(
    ("option", "value", "why"),
    [
        ("workers", 2, "--workers is what --local auto measures"),
        ("hosts", "a:1,b:1", "--hosts does not go with --local auto"),
    ],
)
def test_options_that_say_how_machines_are_used_contradict_it(option, value, why):
    resolved = resolve(RunSettings, {"local": "auto", option: value})
    with pytest.raises(ConfigError, match=why) as raised:
        chosen_way(resolved, TARGET, print)
    assert f"leave out --{option}" in raised.value.fix


def test_a_script_that_cannot_be_measured_starts_as_without_it(monkeypatch):
    def fails(*_):
        raise ConfigError("the script made too few steps")

    monkeypatch.setattr(local_choice, "_few_steps", fails)
    found = chosen_way(resolve(RunSettings, {"local": "auto"}), Target(argv=[], name="x"), print)
    assert (found.resolved.settings.local, found.resolved.settings.workers) == ("none", None)
    assert "too few steps; torch's own threads are used" in found.notes[0]


PINNED = """
import os

import torch
from torch import nn

import echelon

session = echelon.join()
model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(), nn.Linear(8, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = session.prepare(model, optimizer)
nn.functional.cross_entropy(model(torch.ones(4, 8)), torch.zeros(4, dtype=torch.long)).backward()
optimizer.step()
users = torch.zeros(1024)
users[list(os.sched_getaffinity(0))] = 1
users = session.all_reduce(users)
session.print("workers of a core at most", int(users.max()), "cores", int((users > 0).sum()))
"""


def test_workers_have_cores_of_their_own_and_compute_in_threads(tmp_path):
    (tmp_path / "pinned.py").write_text(PINNED)
    layout = ["--parallel", "threads(replicas=2) * data", "--threads", "2"]
    ended = subprocess.run(
        [sys.executable, "-m", "echelon", "run", "--workers", "2", "--pin", "cores", *layout, "pinned.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    cores = len(os.sched_getaffinity(0))
    assert f"workers of a core at most {1 if cores > 1 else 2} cores {cores}" in ended.stdout
