"""Every sync policy trains on four processes, loses no gradient and no sample, and decides as recorded."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

import echelon
from echelon.observe.events import Arrived, Decided, Noted, read_events
from echelon.plan.plan import Plan
from echelon.simulate.recorded import replay_run
from echelon.zoo.dataset import DATASETS
from echelon.zoo.model import MODELS
from served import ServedRun, take_part

WORKERS = 4
EPOCHS = 4


@dataclass(frozen=True)
class Setting:
    """How a policy is used on digits; `servers` as many as it needs, or more."""

    servers: int = 0
    lr: float = 0.05
    momentum: float = 0.9
    groups: tuple[tuple[int, ...], ...] = ()


# Policies that apply each gradient alone step four times per batch, so they use smaller steps.
SETTINGS = {
    "full": Setting(),
    "none": Setting(),
    "percentage(0.5)": Setting(servers=2),
    "flexible": Setting(servers=1),
    "backup(1)": Setting(servers=3),
    "async": Setting(servers=2, momentum=0.5),
    "bounded-delay(2)": Setting(servers=1),
    "delay-compensated": Setting(servers=1, momentum=0.5),
    "smooth-switch(step=40)": Setting(servers=2, lr=0.03),
    "elastic-averaging": Setting(),
    "elastic-averaging(asynchronous=true)": Setting(servers=1),
    "gossip": Setting(),
    "local(4)": Setting(),
    "local(periods=[2, 8])": Setting(groups=((0, 1), (2, 3))),
    "downpour(2, 2)": Setting(servers=1, lr=0.06, momentum=0.0),
    "hogwild": Setting(momentum=0.5),
}
SERVED = [sync for sync, setting in SETTINGS.items() if setting.servers]


def work(name, *args):
    return take_part(globals()[name], *args)


class Numbered(Dataset):
    """Samples with their numbers."""

    def __init__(self, data):
        self._data = data

    def __len__(self):
        return len(self._data)

    def __getitem__(self, index):
        x, y = self._data[index]
        return x, y, index


@dataclass
class Ended:
    """A worker's results: samples drawn in each epoch, and accuracy and weights after each."""

    drawn: list[list[int]]
    evaluated: list[list[int]]
    accuracy: list[float]
    weights: list[torch.Tensor]


def flat(model):
    return torch.cat([p.detach().reshape(-1).clone() for p in model.parameters()])


def digits(lr, momentum):
    with echelon.join() as session:
        torch.manual_seed(session.rank)
        splits = DATASETS.build("digits").load()
        model = MODELS.build("mlp(width=64, depth=1)").build(splits.spec)
        optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)
        train = DataLoader(Numbered(splits.train), batch_size=32, shuffle=True)
        test = DataLoader(Numbered(splits.test), batch_size=100)
        model, optimizer, train, test = session.prepare(model, optimizer, train, test)
        ended = Ended([], [], [], [])

        def evaluate():
            right = torch.zeros(2)
            with torch.no_grad():
                for x, y, number in test:
                    ended.evaluated[-1] += number.tolist()
                    right += torch.tensor([float((model(x).argmax(1) == y).sum()), float(len(y))])
            session.all_reduce(right)
            ended.accuracy.append(float(right[0] / right[1]))

        for _ in session.epochs(EPOCHS):
            ended.drawn.append([])
            ended.evaluated.append([])
            for x, y, number in train:
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
                ended.drawn[-1] += number.tolist()
            ended.weights.append(flat(model))
            evaluate()
        ended.weights.append(flat(model))
        ended.evaluated.append([])
        evaluate()
        return ended


@dataclass
class Run:
    """A run on digits and its results."""

    cluster: ServedRun
    setting: Setting
    workers: list[Ended]
    kept: list[Any]


@pytest.fixture(scope="module")
def run_of(warm_pool, tmp_path_factory):
    """Runs, by their policy; each is made once."""
    made: dict[str, Run] = {}

    def get(sync):
        if sync not in made:
            setting = SETTINGS[sync]
            folder = tmp_path_factory.mktemp("run")
            cluster = ServedRun(
                folder, workers=WORKERS, servers=setting.servers, sync=sync, groups=setting.groups, seed=3
            )
            workers, kept = cluster.run(warm_pool, work, "digits", setting.lr, setting.momentum)
            made[sync] = Run(cluster, setting, workers, kept)
        return made[sync]

    return get


@pytest.mark.parametrize("sync", SETTINGS)
def test_a_policy_trains_digits_on_four_workers(run_of, sync):
    run = run_of(sync)
    accuracy = run.workers[0].accuracy[-1]
    assert all(worker.accuracy[-1] == accuracy for worker in run.workers), "of all workers together"
    depends_on_timing = sync in SERVED or sync in ("none", "hogwild")
    assert accuracy > (0.8 if depends_on_timing else 0.95)


@pytest.mark.parametrize("sync", [sync for sync in SETTINGS if sync != "none"])
def test_all_workers_have_the_same_weights_after_every_epoch(run_of, sync):
    first, *others = run_of(sync).workers
    for other in others:
        for one, another in zip(first.weights, other.weights, strict=True):
            assert torch.equal(one, another)


def test_workers_that_never_synchronise_are_averaged_at_the_end_and_the_record_says_so(run_of):
    run = run_of("none")
    last = torch.stack([worker.weights[-2] for worker in run.workers])
    assert float((last[0] - last[1]).abs().max()) > 0.01
    for worker in run.workers:
        torch.testing.assert_close(worker.weights[-1], last.mean(0), rtol=1e-5, atol=1e-6)
    said = [e.text for e in read_events(run.cluster.folder.events_of(0)) if isinstance(e, Noted)]
    assert any("the weights of 4 workers were averaged only at the end" in text for text in said)
    assert "averaged once" in Plan.read(run.cluster.folder.plan).reasons["average"]


@pytest.mark.parametrize("sync", SETTINGS)
def test_exactly_one_worker_draws_each_sample_of_an_epoch(run_of, sync):
    run = run_of(sync)
    splits = DATASETS.build("digits").load()
    for index in range(EPOCHS):
        drawn = Counter(number for worker in run.workers for number in worker.drawn[index])
        assert drawn == Counter(range(len(splits.train)))
        seen = Counter(number for worker in run.workers for number in worker.evaluated[index])
        assert seen == Counter(range(len(splits.test)))


@pytest.mark.parametrize("sync", SERVED)
def test_evaluation_data_is_split_the_same_with_and_without_a_server(run_of, sync):
    """Every worker has its quarter of every batch, in order."""
    served, full = run_of(sync), run_of("full")
    for one, other in zip(served.workers, full.workers, strict=True):
        assert one.evaluated == other.evaluated


@pytest.mark.parametrize("sync", SERVED)
def test_every_push_is_applied_or_dropped_exactly_once(run_of, sync):
    run = run_of(sync)
    record = run.cluster.record()
    kinds = ("gradient", "delta", "weights")
    pushed = [(e.worker, e.step) for e in record if isinstance(e, Arrived) and e.kind in kinds]
    settled = [
        (worker, step)
        for event in record
        if isinstance(event, Decided) and event.what == "apply"
        for worker, step, _ in event.parts
    ]
    settled += [(e.worker, e.step) for e in record if isinstance(e, Decided) and e.what == "drop"]
    assert len(pushed) > 4
    assert Counter(settled) == Counter(pushed)
    assert max(Counter(pushed).values()) == 1
    assert [kept.waiting for kept in run.kept] == [0] * run.setting.servers
    applied = sum(isinstance(e, Decided) and e.what == "apply" for e in record)
    assert {version for kept in run.kept for version in kept.versions.values()} == {applied}


@pytest.mark.parametrize("sync", SERVED)
def test_the_record_of_a_run_replays_decision_by_decision(run_of, sync):
    run = run_of(sync)
    replayed = replay_run(run.cluster.folder, lr=run.setting.lr)
    assert replayed.mismatch is None, str(replayed.mismatch)
    assert replayed.decisions >= replayed.arrivals / 2 > 20


# One property at a time --------------------------------------------------------------------------


def steps_without_learning(count):
    """Weights that differ between workers, and steps that change them only by averaging."""
    with echelon.join(record=False) as session:
        model = nn.Linear(3, 2).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        model, optimizer = session.prepare(model, optimizer)
        with torch.no_grad():
            for p in model.parameters():
                p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(session.rank)))
        seen = [flat(model)]
        for _ in range(count):
            model(torch.ones(2, 3).double()).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(flat(model))
        return torch.stack(seen)


@pytest.mark.parametrize("graph", ["ring", "matching", "complete"])
def test_gossip_keeps_the_mean_and_shrinks_the_spread_of_weights(warm_pool, tmp_path, graph):
    cluster = ServedRun(tmp_path, workers=WORKERS, sync=f"gossip({graph})")
    seen = torch.stack(cluster.run(warm_pool, work, "steps_without_learning", 12)[0])
    mean, spread = seen.mean(0), seen.std(0).norm(dim=1)
    torch.testing.assert_close(mean, mean[0].expand_as(mean), rtol=1e-12, atol=1e-12)
    assert float(spread[0]) > 1
    assert float(spread[-1]) < 0.01 * float(spread[0])


def test_groups_average_more_often_than_all_workers_do(warm_pool, tmp_path):
    cluster = ServedRun(tmp_path, workers=WORKERS, sync="local(periods=[2, 4])", groups=((0, 2), (1, 3)))
    seen = cluster.run(warm_pool, work, "steps_without_learning", 4)[0]
    begun = [worker[0] for worker in seen]
    for one, other in ((0, 2), (1, 3)):
        torch.testing.assert_close(seen[one][1], begun[one], rtol=0, atol=0)
        torch.testing.assert_close(seen[one][2], (begun[one] + begun[other]) / 2)
        assert torch.equal(seen[one][2], seen[other][2])
    assert not torch.equal(seen[0][2], seen[1][2])
    for worker in seen:
        torch.testing.assert_close(worker[4], torch.stack(begun).mean(0))


def write_to_shared_memory():
    with echelon.join(record=False) as session:
        model = nn.Linear(3, 2)
        model, _ = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        with torch.no_grad():
            for rank in range(session.world_size):
                if session.rank == rank:
                    model.weight[0, rank % 3] = 10 + rank
                    model.bias[1] += 1 + rank
                session.barrier()
        seen = model.weight.detach().clone(), model.bias.detach().clone()
        session.barrier()
    with torch.no_grad():
        model.weight.fill_(float(session.rank))  # its own again
    return *seen, float(model.weight[1, 1].detach())


def test_hogwild_workers_share_memory_until_the_session_ends(warm_pool, tmp_path):
    cluster = ServedRun(tmp_path, workers=3, sync="hogwild")
    seen = cluster.run(warm_pool, work, "write_to_shared_memory")[0]
    for weight, bias, _ in seen:
        assert weight[0].tolist() == [10, 11, 12]
        assert torch.equal(bias, seen[0][1])
    assert [own for _, _, own in seen] == [0.0, 1.0, 2.0]


def train_with_a_slow_worker():
    """The last worker is at least four times slower than the others, on any machine load."""
    with echelon.join() as session:
        data = Subset(Numbered(DATASETS.build("digits").load().train), range(240))
        model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        loader = DataLoader(data, batch_size=12, shuffle=True)
        model, optimizer, loader = session.prepare(model, optimizer, loader)
        drawn = []
        for _ in session.epochs(2):
            for x, y, number in loader:
                begun = time.monotonic()
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
                if session.rank == session.world_size - 1:
                    time.sleep(max(0.05, 3 * (time.monotonic() - begun)))
                drawn.append(number.tolist())
        return drawn, flat(model)


@pytest.mark.parametrize(
    "sync",
    ["flexible(retry=3)", "backup(1)", "percentage(shares=[1.0, 1.0, 0.25])", "bounded-delay(3)"],
)
def test_slow_worker_draws_fewer_samples_and_the_record_replays(warm_pool, tmp_path, sync):
    """The policy leaves it out, drops its gradient or sometimes waits for it; no sample is lost."""
    cluster = ServedRun(tmp_path, workers=3, servers=2, sync=sync)
    (first, second, slow), kept = cluster.run(warm_pool, work, "train_with_a_slow_worker")
    drawn = Counter(number for worker in (first, second, slow) for part in worker[0] for number in part)
    assert drawn == Counter(dict.fromkeys(range(240), 2))
    assert len(slow[0]) < len(first[0])
    assert torch.equal(first[1], slow[1])
    assert torch.equal(first[1], second[1])
    assert replay_run(cluster.folder, lr=0.05).mismatch is None
    assert [one.waiting for one in kept] == [0, 0]


def evaluated():
    with echelon.join(record=False) as session:
        model = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        data = TensorDataset(torch.randn(24, 3, generator=torch.Generator().manual_seed(1)))
        train, test = DataLoader(data, batch_size=8, shuffle=True), DataLoader(data, batch_size=8)
        model, optimizer, train, test = session.prepare(model, optimizer, train, test)
        seen = []
        for _ in session.epochs(2):
            for (x,) in train:
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
            seen.append(flat(model))
            for (_,) in test:
                seen.append(flat(model))
        return torch.stack(seen)


@pytest.mark.parametrize("sync", ["local(4)", "elastic-averaging", "gossip(period=2)"])
def test_evaluation_uses_the_weights_that_the_model_has_after_an_epoch(warm_pool, tmp_path, sync):
    seen = ServedRun(tmp_path, workers=2, sync=sync).run(warm_pool, work, "evaluated")[0]
    assert torch.equal(seen[0], seen[1])
    assert torch.equal(seen[0][1], seen[0][0])
    assert not torch.equal(seen[0][-1], seen[0][0])
