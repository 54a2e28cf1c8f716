"""A worker that is late by 300 ms in every step is named: whatever is trained, and wherever it is late.

Rank 1 sleeps, in one of five places. The others wait for it at rounds, in batch normalisation, at averages
of weights, or because a server's policy makes them wait.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import echelon
from echelon.observe.follow import read_run
from echelon.observe.run_folder import RunFolder
from echelon.observe.summary import Summary, summarise
from echelon.observe.verdict import verdict
from echelon.zoo.dataset import SampleSpec
from echelon.zoo.model import MODELS
from echelon.zoo.task import loss_of
from served import ServedRun, take_part

LATE_S = 0.3
STEPS = 3
PER_WORKER = 2


def classify(*shape: int) -> SampleSpec:
    return SampleSpec(shape=shape, dtype="float32", classes=10, task="classify")


TOKENS = SampleSpec(shape=(8,), dtype="int64", classes=20, task="next-token")
SAMPLES = {
    "char-lstm": TOKENS,
    "char-transformer": TOKENS,
    "cnn": classify(3, 32, 32),
    "har-cnn": classify(9, 128),
    "lenet": classify(1, 28, 28),
    "mlp": classify(20),
    "normalised": classify(20),
    "resnet18": classify(3, 32, 32),
}
# Hundreds of megabytes for each worker. Workers meet in them as in cnn: only in rounds.
TOO_LARGE = ("alexnet", "vgg16")


def work(name: str, *args: Any) -> Any:
    return take_part(globals()[name], *args)


class Sleepy(Dataset):
    """Data whose every sample takes a while."""

    def __init__(self, data: TensorDataset, sample_s: float) -> None:
        self._data = data
        self._sample_s = sample_s

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: int) -> Any:
        time.sleep(self._sample_s)
        return self._data[index]


def data_of(sample: SampleSpec, count: int) -> TensorDataset:
    if sample.task == "next-token":
        tokens = torch.randint(sample.classes, (count, *sample.shape))
        return TensorDataset(tokens, tokens)
    return TensorDataset(torch.randn(count, *sample.shape), torch.randint(sample.classes, (count,)))


def model_of(name: str, sample: SampleSpec) -> nn.Module:
    if name == "normalised":
        return nn.Sequential(nn.Linear(20, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 10))
    return MODELS.build(name).build(sample)


def sleep(*_: object) -> None:
    time.sleep(LATE_S)


def train(where: str, name: str, options: dict[str, Any]) -> str:
    """A few steps in which rank 1 is late in one place; returns the run's folder."""
    with echelon.join(round_timeout_s=90, **options) as session:
        torch.manual_seed(0)
        late = session.rank == 1
        sample = SAMPLES[name]
        model = model_of(name, sample)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        batch = PER_WORKER * session.world_size
        data = Sleepy(
            data_of(sample, STEPS * batch), LATE_S / PER_WORKER if late and where == "data" else 0.0
        )
        if late and where == "forward":
            model.register_forward_pre_hook(sleep)
        loader = DataLoader(data, batch_size=batch, shuffle=True)
        model, optimizer, loader = session.prepare(model, optimizer, loader)
        if late and where == "optimizer":
            optimizer.register_step_pre_hook(sleep)
        loss_fn = loss_of(sample)
        for _ in session.epochs(1):
            for x, y in loader:
                optimizer.zero_grad()
                loss = loss_fn(model(x), y)
                if late and where == "between":
                    sleep()
                loss.backward()
                optimizer.step()
                if late and where == "script":
                    sleep()
    assert session.folder is not None
    return str(session.folder.path)


def observed(folder: str | Path) -> Summary:
    return summarise(read_run(RunFolder(Path(folder))))


def blamed(text: str) -> set[int]:
    """The ranks that a verdict names as those that the others wait for."""
    told = r"Rank (\d+) .*?(?:arrived last|kept the others|was much|stood still|had no)"
    return {
        int(rank)
        for pattern in (told, r"(?:because|mostly for) rank (\d+)")
        for rank in re.findall(pattern, text)
    }


def test_every_model_of_the_zoo_is_tried_or_too_large():
    assert set(MODELS.names()) == (set(SAMPLES) - {"normalised"}) | set(TOO_LARGE)


@pytest.mark.parametrize("name", SAMPLES)
def test_the_late_worker_is_named_for_every_model(warm_pool, tmp_path, name):
    folder, _ = warm_pool.run(2, train, "forward", name, {"runs": str(tmp_path)})
    assert blamed(verdict(observed(folder))) == {1}


@pytest.mark.parametrize(
    ("options", "where", "advice"),
    [
        ({"transport": "tcp"}, "between", "a sleep, a lock"),
        ({"transport": "c10d"}, "data", "look at its data loader"),
        ({"transport": "shm"}, "script", "in the script's own code"),
        ({"overlap": "step"}, "between", "a sleep, a lock"),
        ({"codec": "top-k(ratio=0.5)"}, "optimizer", "in its optimizer"),
    ],
)
def test_the_late_worker_is_named_although_all_wait_in_batch_normalisation(
    warm_pool, tmp_path, options, where, advice
):
    folder, _ = warm_pool.run(2, train, where, "normalised", {"runs": str(tmp_path), **options})
    summary = observed(folder)
    text = verdict(summary)
    assert blamed(text) == {1}
    assert summary.meet_often
    assert advice in text


@pytest.mark.parametrize("sync", ["local(1)", "local(2)", "elastic-averaging(period=2)", "gossip"])
def test_the_late_worker_is_named_where_weights_are_averaged(warm_pool, tmp_path, sync):
    folder, _ = warm_pool.run(2, train, "data", "mlp", {"runs": str(tmp_path), "sync": sync})
    summary = observed(folder)
    assert blamed(verdict(summary)) == {1}
    assert summary.rounds == (STEPS // 2 if "2" in sync else STEPS)
    assert (summary.sync is None) == (sync == "local(1)")


@pytest.mark.parametrize(
    "sync",
    [
        "backup(0)",
        "bounded-delay(1)",
        "percentage(1.0)",
        "flexible",
        "smooth-switch(step=1, waiting=true)",
    ],
)
def test_the_late_worker_is_named_where_a_server_makes_workers_wait(warm_pool, tmp_path, sync):
    run = ServedRun(tmp_path, workers=2, servers=1, sync=sync)
    run.run(warm_pool, work, "train", "data", "mlp", {})
    assert blamed(verdict(observed(tmp_path))) == {1}


@pytest.mark.parametrize(
    ("sync", "servers"), [("levels(full, local(2))", 0), ("levels(full, backup(0))", 1), ("gossip", 0)]
)
def test_the_late_worker_is_named_inside_its_group(warm_pool, tmp_path, sync, servers):
    run = ServedRun(tmp_path, workers=4, servers=servers, sync=sync, groups=((0, 1), (2, 3)))
    run.run(warm_pool, work, "train", "between", "mlp", {})
    assert blamed(verdict(observed(tmp_path))) == {1}


# Starved of a core ------------------------------------------------------------------------------------

CORES = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
MEASURED = Path("/proc/thread-self/schedstat").exists()


@contextmanager
def busy(core: int, count: int = 2) -> Iterator[None]:
    """Programs that compute on one core all the time."""
    code = f"import os; os.sched_setaffinity(0, [{core}])\nwhile True: pass"
    hogs = [subprocess.Popen([sys.executable, "-S", "-c", code]) for _ in range(count)]
    try:
        yield
    finally:
        for hog in hogs:
            hog.kill()
        for hog in hogs:
            hog.wait(90)


def compute(core: int, runs: str) -> str:
    """Train in a thread of its own, since nobody but root can take back what rank 1 does to itself."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(_compute, core, runs).result()


def _compute(core: int, runs: str) -> str:
    """Steps that need a core; that of rank 1 is used by programs with a higher priority."""
    # Whether layers send factors is decided once, in the first step, where workers wait for each other too.
    with echelon.join(round_timeout_s=90, runs=runs, factors="never") as session:
        torch.manual_seed(0)
        torch.set_num_threads(1)
        model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 10))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        data = TensorDataset(torch.randn(2048, 256), torch.randint(10, (2048,)))
        loader = DataLoader(data, batch_size=256, shuffle=True)
        model, optimizer, loader = session.prepare(model, optimizer, loader)
        if session.rank == 1:
            os.sched_setaffinity(0, [core])
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 12)
        for _ in session.epochs(1):
            for x, y in loader:
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
    assert session.folder is not None
    return str(session.folder.path)


@pytest.mark.skipif(not MEASURED, reason="this system has no /proc/thread-self/schedstat")
@pytest.mark.skipif(len(CORES) < 2, reason="there is one core only")
def test_a_worker_whose_core_is_taken_by_other_programs_is_named_as_starved(warm_pool, tmp_path):
    with busy(CORES[0]):
        folder, _ = warm_pool.run(2, compute, CORES[0], str(tmp_path))
    summary = observed(folder)
    text = verdict(summary)
    assert re.match(r"Rank 1 \(.*?\) had no core for \d+ % of its time and cost the others ", text), text
    assert "share" not in text
