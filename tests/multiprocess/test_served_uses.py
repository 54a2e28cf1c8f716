"""Unusual training loops with servers, groups or averaging lose no gradient and no sample."""

from __future__ import annotations

import copy
import time
from collections import Counter
from itertools import permutations
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.utils.data import ConcatDataset, DataLoader, Subset, TensorDataset

import echelon
from echelon.checkpoint.store import read_newest
from echelon.errors import ConfigError
from echelon.observe.recorder import Recorder
from echelon.server.coordinator import Coordinator
from echelon.server.protocol import Freed, PushInfo
from echelon.sync import policy as policies
from echelon.sync.families.serve import Invite
from plain import Trained, assert_same, examples, in_session, network, plainly
from served import ServedRun, take_part

EPOCHS = 7
GROUPS = ((0, 2), (1, 3))


def work(name, *args):
    return take_part(globals()[name], *args)


def as_in_one_process(name, *args):
    return take_part(in_session, globals()[name], {}, *args)


def check(pool, folder, sync, script, *args, workers=3, servers=1, **asked):
    """Check that the script ends on these workers as it does in one process."""
    run = ServedRun(folder, workers=workers, servers=servers, sync=sync, **asked)
    trained, kept = run.run(pool, as_in_one_process, script.__name__, *args)
    assert all(isinstance(worker, Trained) for worker in trained)
    assert_same(plainly(script, *args), trained, rtol=1e-9)
    assert [one.waiting for one in kept] == [0] * servers, "no push is undecided"


def flat(model):
    return torch.cat([p.detach().reshape(-1).clone() for p in model.parameters()])


def numbered(count):
    """A data set whose targets are the samples' numbers."""
    return TensorDataset(torch.ones(count, 1), torch.arange(count))


class InOrder(torch.utils.data.Sampler):
    """A shuffled order that is the same with and without Echelon."""

    def __init__(self, count):
        self._order = torch.randperm(count, generator=torch.Generator().manual_seed(5)).tolist()

    def __iter__(self):
        return iter(self._order)

    def __len__(self):
        return len(self._order)


# The beginning -----------------------------------------------------------------------------------


def large():
    """A model so large that the servers need a moment for its weights before the first pull."""
    with echelon.join(record=False) as session:
        torch.manual_seed(0)
        expected = nn.Linear(2000, 2000).double()
        model = copy.deepcopy(expected)
        if session.rank:
            nn.init.ones_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        loader = DataLoader(TensorDataset(torch.ones(4, 2000).double()), batch_size=4, shuffle=True)
        model, optimizer, loader = session.prepare(model, optimizer, loader)
        begun = []
        for (x,) in loader:
            begun.append(torch.equal(flat(model), flat(expected)))
            model(x).sum().backward()
            optimizer.step()
        return begun, torch.equal(flat(model), flat(expected))


def test_all_workers_begin_with_the_leaders_weights_of_a_large_model(warm_pool, tmp_path):
    run = ServedRun(tmp_path, workers=2, servers=1, sync="async")
    (one, one_kept), (other, other_kept) = run.run(warm_pool, work, "large")[0]
    assert one + other == [True] * 2
    assert one_kept
    assert other_kept


# Loops -------------------------------------------------------------------------------------------


def evaluated(session, journal):
    """Evaluate after every second batch."""
    model = network(session)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    data = examples()
    train = DataLoader(data, batch_size=12, sampler=InOrder(len(data)))
    test = DataLoader(Subset(data, range(24)), batch_size=12)
    model, optimizer, train, test = session.prepare(model, optimizer, train, test)
    for _ in session.epochs(EPOCHS):
        for index, (x, y) in enumerate(train):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            journal.note(loss, len(x))
            if index % 2:
                with torch.no_grad():
                    for a, b in test:
                        journal.note(F.cross_entropy(model(a), b), len(a))
    return model


@pytest.mark.parametrize("sync", ["backup(0)", "bounded-delay(0)"])
def test_evaluation_during_an_epoch_does_not_change_training(warm_pool, tmp_path, sync):
    check(warm_pool, tmp_path, sync, evaluated)


def test_evaluation_during_an_epoch_does_not_change_training_with_groups(warm_pool, tmp_path):
    check(warm_pool, tmp_path, 'levels(full, "backup(0)")', evaluated, workers=4, groups=GROUPS)


def skipping(session, journal):
    """Skip the step of every second batch."""
    model = network(session)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    model, optimizer, loader = session.prepare(model, optimizer, DataLoader(examples(), batch_size=12))
    for _ in session.epochs(EPOCHS):
        for index, (x, y) in enumerate(loader):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            journal.note(loss, len(x))
            if index % 2 == 0:
                continue
            optimizer.step()
    return model


@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize("sync", ["backup(0)", "bounded-delay(0)"])
def test_a_backward_without_a_step_is_not_pushed(warm_pool, tmp_path, sync, servers):
    check(warm_pool, tmp_path, sync, skipping, servers=servers)


def clamped(session, journal):
    """Clamp gradients through `.data`; all workers have the same gradients."""
    few = examples(20)
    data = ConcatDataset([Subset(few, range(at, at + 4)) for at in range(0, 20, 4) for _ in range(3)])
    model = network(session)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    model, optimizer, loader = session.prepare(model, optimizer, DataLoader(data, batch_size=12))
    for _ in session.epochs(EPOCHS):
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            for p in model.parameters():
                p.grad.data.clamp_(-0.01, 0.01)
            optimizer.step()
            journal.note(loss, len(x))
    return model


def test_gradients_clamped_through_their_data_are_pushed_clamped(warm_pool, tmp_path):
    check(warm_pool, tmp_path, "backup(0)", clamped)


# Groups ------------------------------------------------------------------------------------------


class One(nn.Module):
    """A model of one weight."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, dtype=torch.float64))

    def forward(self, factor):
        return self.weight.sum() * factor


def gradients_of_groups(steps):
    with echelon.join(record=False) as session:
        model = One()
        model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
        seen = []
        for _ in range(steps):
            optimizer.zero_grad()
            model(session.rank + 1.0).backward()
            seen.append(float(model.weight.grad))
            optimizer.step()
        session.pause()
        return seen


@pytest.mark.parametrize(
    "sync", ['levels(full, "backup(1)")', "levels(full, async)", "levels(full, local(2))"]
)
def test_a_gradient_is_the_mean_of_its_group_only(warm_pool, tmp_path, sync):
    servers = 0 if "local" in sync else 1
    run = ServedRun(tmp_path, workers=4, servers=servers, sync=sync, groups=GROUPS)
    seen = run.run(warm_pool, work, "gradients_of_groups", 3)[0]
    assert seen == [[2.0] * 3, [3.0] * 3, [2.0] * 3, [3.0] * 3]


def slow_group():
    with echelon.join(record=False) as session:
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        loader = DataLoader(numbered(160), batch_size=8, shuffle=True)
        model, optimizer, loader = session.prepare(model, optimizer, loader)
        drawn = []
        for x, number in loader:
            begun = time.monotonic()
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            if session.rank in GROUPS[1]:
                time.sleep(max(0.05, 4 * (time.monotonic() - begun)))
            drawn.append(number.tolist())
        return drawn, flat(model)


def test_slow_group_does_not_delay_another_group(warm_pool, tmp_path):
    run = ServedRun(tmp_path, workers=4, servers=1, sync="levels(full, async)", groups=GROUPS)
    workers = run.run(warm_pool, work, "slow_group")[0]
    steps = [len(drawn) for drawn, _ in workers]
    assert steps[0] == steps[2] > 2 * steps[1] == 2 * steps[3]
    drawn = Counter(number for parts, _ in workers for part in parts for number in part)
    assert drawn == Counter(range(160))
    assert all(torch.equal(weights, workers[0][1]) for _, weights in workers)


def weighed(session, journal, says_so):
    model = network(session)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    model, optimizer, loader = session.prepare(model, optimizer, DataLoader(examples(), batch_size=20))
    for _ in session.epochs(12):
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            if says_so:
                session.weigh(5 * len(x))
            loss.backward()
            optimizer.step()
            journal.note(loss, len(x))
    return model


@pytest.mark.parametrize("says_so", [False, True], ids=["by-samples", "as-said"])
@pytest.mark.parametrize("shares", ["equal", "4,3,2,1"])
def test_groups_are_weighted_by_samples_or_by_session_weigh(warm_pool, tmp_path, shares, says_so):
    sync = 'levels(full, "backup(0)")'
    check(warm_pool, tmp_path, sync, weighed, says_so, workers=4, groups=GROUPS, shares=shares)


def test_groups_that_average_are_weighted_by_session_weigh(warm_pool, tmp_path):
    runs = [
        ServedRun(
            tmp_path / name, workers=4, sync="levels(full, local(2))", groups=GROUPS, shares="4,3,2,1"
        )
        for name in ("said", "unsaid")
    ]
    said = runs[0].run(warm_pool, as_in_one_process, "weighed", True)[0]
    unsaid = runs[1].run(warm_pool, as_in_one_process, "weighed", False)[0]
    for one, other in zip(said, unsaid, strict=True):
        for name, value in one.state.items():
            torch.testing.assert_close(value, other.state[name], rtol=1e-9, atol=1e-10)


# Checkpoints -------------------------------------------------------------------------------------


def averaging(saves):
    with echelon.join(record=False) as session:
        torch.manual_seed(session.rank)
        model = network(session)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        loader = DataLoader(examples(), batch_size=12)
        model, optimizer, loader = session.prepare(model, optimizer, loader)
        seen = []
        for _ in session.epochs(3):
            for index, (x, y) in enumerate(loader):
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
                seen.append(flat(model))
                if saves and index in (0, 3):
                    session.save("saved")
        return torch.stack([*seen, flat(model)])


@pytest.mark.parametrize("sync", ["elastic-averaging(period=3)", "local(3)"])
def test_save_during_an_epoch_does_not_change_training_of_averaging_workers(warm_pool, tmp_path, sync):
    saving = ServedRun(tmp_path / "saving", workers=2, sync=sync).run(warm_pool, work, "averaging", True)[0]
    without = ServedRun(tmp_path / "without", workers=2, sync=sync).run(
        warm_pool, work, "averaging", False
    )[0]
    assert not torch.equal(saving[0][1], saving[1][1]), "workers have different weights"
    for one, other in zip(saving, without, strict=True):
        assert torch.equal(one, other)


def leader_alone(saves, momentum):
    """After the first round the leader is left out of three rounds, and takes its steps alone."""
    with echelon.join(record=False) as session:
        model = One()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=momentum)
        model, optimizer = session.prepare(model, optimizer)
        seen = []
        for _ in range(3):
            optimizer.zero_grad()
            model(session.rank + 1.0).backward()
            optimizer.step()
            seen.append(float(model.weight.detach()))
            if saves:
                session.save("saved")
                seen.append(float(model.weight.detach()))
        session.barrier()  # so that all steps come before the merge
        session.pause()
        return seen


@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_worker_left_out_of_rounds_keeps_its_weights_after_a_save(warm_pool, tmp_path, momentum):
    sync = "percentage(shares=[0.25, 1.0])"
    saving, without = (
        ServedRun(tmp_path / str(saves), workers=2, servers=1, sync=sync).run(
            warm_pool, work, "leader_alone", saves, momentum
        )[0]
        for saves in (True, False)
    )
    assert without[0][1:] != without[1][1:], "alone"
    for one, other in zip(saving, without, strict=True):
        assert one == [weight for weight in other for _ in range(2)]


class Alone:
    """A coordinator of two workers; the first takes part in every fourth round only."""

    def __init__(self):
        rule = policies.POLICIES.build("percentage(shares=[0.25, 1.0])")
        cluster = policies.ClusterInfo(workers=2, servers=1)
        self.coordinator = Coordinator(
            rule.rule(cluster), workers=[0, 1], holders=1, now=time.time, recorder=Recorder(None), rank=2
        )
        self.steps = [0, 0]
        assert not self.push(0)
        assert {order.worker for order in self.push(1) if isinstance(order, Freed)} == {0, 1}

    def push(self, worker):
        step, self.steps[worker] = self.steps[worker], self.steps[worker] + 1
        info = PushInfo(kind="gradient", read=0, samples=1.0, compute_s=0.0, transfer_s=0.0)
        self.coordinator.held(worker, step, 0.0, 0.0)
        return self.coordinator.done(worker, step, info)

    def ask(self, worker):
        step, self.steps[worker] = self.steps[worker], self.steps[worker] + 1
        info = PushInfo(kind="ask", read=0, samples=1.0, compute_s=0.0, transfer_s=0.0)
        return self.coordinator.ask(worker, step, info)


@pytest.mark.parametrize("order", sorted(set(permutations((0, 0, 1, 1)))))
def test_save_ends_no_round_in_any_order_of_resting_workers(order):
    """Each worker takes a step, then rests, twice; the first worker is still not invited."""
    alone = Alone()
    for _ in range(2):
        been = set()
        for worker in order:
            if worker in been:
                assert alone.coordinator.rest(worker) == []
            elif worker:
                assert [one.worker for one in alone.push(1) if isinstance(one, Freed)] == [1]
            else:
                assert not any(isinstance(one, Invite) for one in alone.ask(0))
            been.add(worker)
        for worker in (0, 1):
            alone.coordinator.join(worker)
    alone.push(1)  # ends the third round, so the first worker is invited next
    assert alone.ask(0) == [Invite(0)]


def test_a_resting_worker_leaves_if_another_waits_for_it():
    alone = Alone()
    for _ in range(3):
        alone.push(1)
    assert alone.push(1) == [], "it waits for the first worker"
    assert [order.worker for order in alone.coordinator.rest(0) if isinstance(order, Freed)] == [1]
    assert alone.coordinator.rest(1) == []
    assert alone.coordinator.awaited() == []
    for worker in (0, 1):
        alone.coordinator.join(worker)
    assert alone.coordinator.awaited() == [0, 1]


def test_a_resting_worker_leaves_when_another_begins_to_wait_for_it():
    alone = Alone()
    for _ in range(3):
        alone.push(1)
    alone.coordinator.rest(0)
    assert [order.worker for order in alone.push(1) if isinstance(order, Freed)] == [1]


def saved_and_loaded():
    """Two steps without averaging, then a save and a load."""
    with echelon.join(record=False) as session:
        model = One()
        model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
        for _ in range(2):
            optimizer.zero_grad()
            model(session.rank + 1.0).backward()
            optimizer.step()
        own = float(model.weight.detach())
        session.save("saved")
        session.load("saved")
        held = read_newest(Path("saved"), lambda state: None).state["models"][0]
        return own, float(model.weight.detach()), float(next(iter(held.values())))


def test_a_save_holds_the_average_and_every_worker_goes_on_with_its_own_weights(warm_pool, tmp_path):
    seen = ServedRun(tmp_path, workers=2, sync="local(5)").run(warm_pool, work, "saved_and_loaded")[0]
    assert seen == [(-2.0, -2.0, -3.0), (-4.0, -4.0, -3.0)]


def drawn_again():
    with echelon.join(record=False) as session:
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        loader = DataLoader(numbered(48), batch_size=8, shuffle=True)
        model, optimizer, loader = session.prepare(model, optimizer, loader)

        def go_through():
            drawn = []
            for x, number in loader:
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
                drawn += number.tolist()
            return drawn

        first = go_through()
        session.save("saved")
        saved = flat(model)
        second = go_through()
        session.load("saved")
        loaded = flat(model)
        again = go_through()
        return first, second, again, torch.equal(saved, loaded), torch.equal(flat(model), loaded)


@pytest.mark.parametrize("servers", [1, 2])
def test_all_samples_are_drawn_again_after_loading_an_older_checkpoint(warm_pool, tmp_path, servers):
    run = ServedRun(tmp_path, workers=2, servers=servers, sync="async")
    workers = run.run(warm_pool, work, "drawn_again")[0]
    for index in range(3):
        assert Counter(number for worker in workers for number in worker[index]) == Counter(range(48))
    for *_, same_as_saved, untrained in workers:
        assert same_as_saved
        assert not untrained


# Optimizers --------------------------------------------------------------------------------------


def hooked():
    with echelon.join(record=False) as session:
        model = One()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        calls = []
        optimizer.register_step_pre_hook(lambda *_: calls.append(("before", float(model.weight.detach()))))
        model, optimizer = session.prepare(model, optimizer)
        optimizer.register_step_post_hook(lambda *_: calls.append(("after", float(model.weight.detach()))))
        for _ in range(2):
            optimizer.zero_grad()
            model(1.0).backward()
            optimizer.step()
        session.pause()
        return calls


@pytest.mark.parametrize(("sync", "groups"), [("backup(0)", ()), ('levels(full, "backup(0)")', GROUPS)])
def test_step_hooks_run_around_a_step_of_the_server(warm_pool, tmp_path, sync, groups):
    workers = 4 if groups else 2
    seen = ServedRun(tmp_path, workers=workers, servers=1, sync=sync, groups=groups).run(
        warm_pool, work, "hooked"
    )
    expected = [("before", 0.0), ("after", -1.0), ("before", -1.0), ("after", -2.0)]
    assert seen[0] == [expected] * workers


def added():
    with echelon.join(record=False) as session:
        model = One()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        model, optimizer = session.prepare(model, optimizer)
        model(1.0).backward()
        optimizer.step()
        late = nn.Parameter(torch.zeros(2, dtype=torch.float64))
        optimizer.add_param_group({"params": [late]})
        model(1.0).backward()
        try:
            optimizer.step()
        except ConfigError as error:
            return error.where, error.message
        return None


@pytest.mark.parametrize("sync", ["async", "downpour(2, 2)"])
def test_parameters_added_after_prepare_are_refused(warm_pool, tmp_path, sync):
    run = ServedRun(tmp_path, workers=2, servers=1, sync=sync)
    for where, message in run.run(warm_pool, work, "added")[0]:
        assert where == "optimizer.add_param_group"
        assert "2 parameters" in message


def prepared_during_a_pass():
    with echelon.join(record=False) as session:
        model, another = One(), One()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        loader = DataLoader(numbered(8), batch_size=2)
        model, optimizer, loader = session.prepare(model, optimizer, loader)
        optimizers = [optimizer]
        for index, _ in enumerate(loader):
            if index == 2:
                optimizers.append(torch.optim.SGD(another.parameters(), lr=1.0))
                session.prepare(another, optimizers[-1])
            for one in optimizers:
                one.zero_grad()
            (model(1.0) + another(1.0)).backward()
            for one in optimizers:
                one.step()
        return float(model.weight.detach()), float(another.weight.detach())


def test_optimizer_can_be_prepared_during_an_epoch(warm_pool, tmp_path):
    run = ServedRun(tmp_path, workers=2, servers=1, sync="backup(0)")
    assert run.run(warm_pool, work, "prepared_during_a_pass")[0] == [(-4.0, -2.0)] * 2
