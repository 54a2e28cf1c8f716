"""A run's first steps are profiled by its leader: machines, links and job are in its folder."""

from __future__ import annotations

import copy
import io
import socket
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn.modules import module as torch_module
from torch.utils.data import DataLoader, TensorDataset

import echelon
from echelon.observe.events import Noted, read_events
from echelon.plan.cluster_file import read_cluster
from echelon.plan.plan import Plan


def train_with_a_broken_classifier():
    broken = ZeroDivisionError("a broken classifier")
    with mock.patch("echelon.train.profiling.classify", side_effect=broken):
        return train(13, {})


def train(steps: int, options, prepare_apart: bool = False):
    """Train; returns the cluster file, the plan's reasons, notes, and what watches models then, later."""
    with echelon.join(round_timeout_s=90, **options) as session:
        model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = DataLoader(TensorDataset(torch.randn(12 * steps, 6)), batch_size=12)
        if prepare_apart:
            model = session.prepare(model)
            optimizer, loader = session.prepare(optimizer, loader)
        else:
            model, optimizer, loader = session.prepare(model, optimizer, loader)
        twin = copy.deepcopy(model)
        torch.save(model, io.BytesIO())
        for _ in session.epochs(1):
            for (x,) in loader:
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
        watching = len(torch_module._global_forward_pre_hooks)
        hooks = len(twin._forward_pre_hooks) + len(model._forward_pre_hooks)
    folder = session.folder.path
    notes = [e.text for e in read_events(session.folder.events_of(session.rank)) if isinstance(e, Noted)]
    cluster = (folder / "cluster.toml").read_text() if (folder / "cluster.toml").exists() else ""
    after = len(torch_module._global_forward_pre_hooks)
    return cluster, Plan.read(folder / "plan.toml").reasons, notes, (watching, hooks, after)


@pytest.mark.parametrize("apart", [False, True], ids=["together", "apart"])
def test_the_first_steps_tell_job_and_machines(warm_pool, apart):
    cluster, reasons, notes, left = warm_pool.run(2, train, 13, {}, apart)[0]
    found = read_cluster(cluster, "cluster.toml")
    assert found.job is not None
    assert (found.job.name, found.job.batch, found.job.exchanges) == ("Sequential", 12, 2)
    names = ["0.weight", "0.bias", "1.weight", "1.bias", "2.weight", "2.bias"]
    assert [layer.name for layer in found.job.layers] == names
    assert found.job.layers[0].factors == (5, 6)
    assert found.job.cost.at(6) > 0
    (node,) = found.topology.nodes
    assert (node.speed, node.name) == (2.0, socket.gethostname())
    assert reasons["job"].startswith("compute-bound: on 1 node a step computes for ")
    assert not any("profile" in note for note in notes)
    assert left == (0, 0, 0)


def test_a_run_that_is_over_early_is_not_profiled_and_leaves_nothing(warm_pool):
    cluster, reasons, _, (watching, hooks, after) = warm_pool.run(2, train, 5, {})[0]
    assert (cluster, "job" in reasons) == ("", False)
    assert (watching, hooks, after) == (0, 0, 0)  # torch warns of global hooks, and copies have a module's


def test_other_policies_are_not_profiled(warm_pool):
    cluster, _, _, left = warm_pool.run(2, train, 13, {"sync": "local(2)"})[0]
    assert (cluster, left) == ("", (0, 0, 0))


def test_what_fails_there_is_noted_and_does_not_end_the_run(warm_pool):
    results = warm_pool.run(2, train_with_a_broken_classifier)
    (told,) = [note for note in results[0][2] if "profile" in note]
    assert told == "no profile of the job could be made: ZeroDivisionError: a broken classifier"
    assert results[0][0] == ""
    assert results[0][3] == (0, 0, 0)
