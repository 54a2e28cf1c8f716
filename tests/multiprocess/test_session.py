"""A session of several workers: its record, its end, and unusual uses."""

from __future__ import annotations

import copy
import time

import msgspec
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import echelon
from echelon.errors import ConfigError, ModelError
from echelon.observe.events import EpochEnded, RunEnded, RunStarted, StepEnded, WorkerJoined, read_events
from echelon.plan.plan import Plan


def attempt(act):
    try:
        return act()
    except (echelon.EchelonError, RuntimeError) as error:
        return error


def recorded():
    """Two epochs recorded in one folder by all workers; returns this worker's events."""
    with echelon.join(name="together", shares=(3, 1, 1), seed=8, round_timeout_s=90) as session:
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = DataLoader(TensorDataset(torch.randn(13, 2)), batch_size=10, shuffle=True)
        held_out = DataLoader(TensorDataset(torch.randn(6, 2)), batch_size=6)
        model, optimizer, loader, held_out = session.prepare(model, optimizer, loader, held_out)
        for _ in session.epochs(2):
            for (x,) in loader:
                optimizer.zero_grad()
                loss = model(x).square().mean()
                loss.backward()
                optimizer.step()
                session.log(loss=loss)
            with torch.no_grad():
                for (x,) in held_out:
                    model(x)
    events = list(read_events(session.folder.events_of(session.rank)))
    summary = msgspec.json.decode(session.folder.summary.read_bytes()) if session.is_leader else None
    return str(session.folder.path), session.folder.plan.read_bytes(), events, summary


def afterwards():
    """The changes to a model that remain after the session."""
    with echelon.join(record=False, round_timeout_s=90) as session:
        model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
        model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        during = type(model[1])
        copied = copy.deepcopy(model)
        copied_output = copied(torch.ones(2, 2) * session.rank)
        loss = model(torch.randn(3, 2)).square().mean()
        loss.backward()
        optimizer.step()
        x = torch.randn(3, 2, requires_grad=True)
        (slope,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        penalty = attempt(lambda: slope.square().sum().backward())
        session.close()
    hooks = [
        len(p._post_accumulate_grad_hooks or ()) + len(p._backward_hooks or ()) for p in model.parameters()
    ]
    model(torch.randn(3, 2)).sum().backward()
    return {
        "during": during.__name__,
        "penalty": penalty,
        "after": type(model[1]),
        "hooks": sum(hooks),
        "extra": set(vars(model[1])) - set(vars(nn.BatchNorm1d(3))),
        "copy": copied_output.shape,
    }


class Lookup(nn.Module):
    """Its gradient is sparse, which `prepare` cannot detect."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randn(5, 2))

    def forward(self, index):
        return F.embedding(index, self.table, sparse=True)


def sparse():
    with echelon.join(record=False, round_timeout_s=90) as session:
        model = session.prepare(Lookup())
        return attempt(lambda: model(torch.tensor([1, 2])).sum().backward())


def weightless():
    with echelon.join(record=False, round_timeout_s=90) as session:
        result = attempt(lambda: session.weigh(session.rank))
        return result, session.all_reduce(torch.ones(1)).item()


class Counting(nn.Module):
    """Keeps a buffer that each worker changes on its own."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(1, 1)
        self.register_buffer("seen", torch.zeros(2))
        self.register_buffer("flag", torch.tensor([False, True]))

    def forward(self, x):
        return self.linear(x)


def buffers():
    """The values of a buffer at the start, middle and end of each epoch."""
    with echelon.join(record=False, round_timeout_s=90) as session:
        model = Counting()
        model.seen += session.rank
        loader = DataLoader(TensorDataset(torch.ones(6, 1)), batch_size=3)
        model, loader = session.prepare(model, loader)
        values = []
        for _ in session.epochs(2):
            for _ in loader:
                values.append(model.seen[0].item())
                model.seen += 1 + session.rank
            values.append(model.seen[0].item())
        return values


def late(transport):
    """The leader finishes the epoch first; the others still need its buffers."""
    with echelon.join(record=False, transport=transport, round_timeout_s=90) as session:
        model = Counting()
        model, loader = session.prepare(model, DataLoader(TensorDataset(torch.ones(3, 1)), batch_size=3))
        for _ in loader:
            model.seen += 1 + session.rank
            time.sleep(0.5 * session.rank)
        return model.seen[0].item()


def sent_before_leaving():
    with echelon.join(record=False, transport="tcp", round_timeout_s=90) as session:
        told = torch.full((3,), float(session.rank))
        time.sleep(0.5 * session.rank)
        session._group.broadcast(told)
        return told.tolist()


def test_each_worker_records_its_share_in_one_run_folder(warm_pool):
    told = warm_pool.run(3, recorded)
    assert len({folder for folder, *_ in told}) == 1
    shares = [[(6, 10), (1, 3)], [(2, 10), (1, 3)], [(2, 10), (1, 3)]]
    for rank, (_, plan, events, _) in enumerate(told):
        assert isinstance(events[0], RunStarted if rank == 0 else WorkerJoined)
        assert sum(isinstance(event, RunStarted) for event in events) == (rank == 0)
        steps = [event for event in events if isinstance(event, StepEnded)]
        assert [(step.share, step.batch) for step in steps] == 2 * shares[rank]
        assert [(step.step, step.epoch) for step in steps] == [(0, 0), (1, 0), (2, 1), (3, 1)]
        for step in steps:
            assert step.rank == rank
            assert step.sent_bytes > 0
            assert step.start <= step.arrival <= step.t
            parts = step.data_s + step.compute_s + step.wait_s + step.apply_s
            assert 0 < parts <= step.t - step.start + 1e-3
            assert step.loss is not None
        assert [event.epoch for event in events if isinstance(event, EpochEnded)] == [0, 1]
        assert b"weight = 3.0" in plan


def test_leader_records_the_end_of_the_run_after_all_events_without_a_launcher(warm_pool):
    (_, _, events, summary), *others = warm_pool.run(3, recorded)
    assert (type(events[-1]), events[-1].outcome) == (RunEnded, "completed")
    assert not any(isinstance(event, RunEnded) for other in others for event in other[2])
    assert (summary["outcome"], summary["steps"]) == ("completed", 4)
    assert [worker["samples"] for worker in summary["workers"]] == [14, 6, 6]


def test_model_has_its_torch_classes_and_no_hooks_after_the_session(warm_pool):
    for told in warm_pool.run(2, afterwards):
        assert told["during"] != "BatchNorm1d"
        assert told["after"] is nn.BatchNorm1d
        assert told["hooks"] == 0
        assert told["extra"] == set()
        assert told["copy"] == (2, 1)
        assert "once_differentiable" in str(told["penalty"]), (
            "better an error than a wrong second derivative"
        )


def test_sparse_gradient_first_seen_in_backward_is_refused_by_name(warm_pool):
    for error in warm_pool.run(2, sparse):
        assert type(error) is ModelError
        assert "parameter table has a sparse gradient" in error.message


def test_zero_weight_of_a_worker_is_refused_and_the_others_continue(warm_pool):
    (refused, first), (accepted, second) = warm_pool.run(2, weightless)
    assert type(refused) is ConfigError
    assert "without weight" in refused.message
    assert accepted is None
    assert first == second == 2


def test_all_workers_have_the_leaders_buffers_at_the_start_and_end_of_an_epoch(warm_pool):
    leader, other = warm_pool.run(2, buffers)
    assert leader == [0, 1, 2, 2, 3, 4]
    assert other == [0, 2, 2, 2, 4, 4]


@pytest.mark.parametrize("transport", ["auto", "c10d"])
def test_all_workers_get_the_leaders_buffers_even_if_the_leader_finishes_first(warm_pool, transport):
    assert warm_pool.run(3, late, transport) == [1, 1, 1]


def test_messages_sent_before_a_departure_arrive(warm_pool):
    assert warm_pool.run(3, sent_before_leaving) == [[0.0] * 3] * 3


def test_the_plan_of_a_run_can_be_read_back(warm_pool, tmp_path):
    _, plan, *_ = warm_pool.run(3, recorded)[1]
    file = tmp_path / "plan.toml"
    file.write_bytes(plan)
    read = Plan.read(file)
    assert (read.seed, read.weights) == (8, [3.0, 1.0, 1.0])
