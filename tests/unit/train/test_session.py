"""A session with a single worker: unchanged objects, and a record of the run."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import weakref

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import echelon
from echelon.errors import ConfigError, ModelError
from echelon.observe.events import (
    EpochEnded,
    Evaluated,
    Logged,
    Noted,
    RunEnded,
    RunStarted,
    StepEnded,
    StepsExpected,
    WorkerJoined,
    read_events,
)
from echelon.observe.report import write_report
from echelon.observe.run_folder import RunFolder
from echelon.observe.summary import write_summary
from echelon.plan.plan import Plan, PlanRequest, make_plan


@pytest.fixture
def session():
    with echelon.join(record=False) as made:
        yield made


def test_prepare_returns_objects_in_the_order_of_its_arguments(session):
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    loader = DataLoader(TensorDataset(torch.ones(4, 2)), batch_size=2)
    first, second, third, fourth = session.prepare(scheduler, loader, model, optimizer)
    assert first is scheduler
    assert third is model
    assert fourth is optimizer
    assert len(second) == 2
    assert session.prepare(model) is model, "alone it comes back alone, and twice is as good as once"
    assert session.prepare(optimizer) is optimizer
    assert session.prepare(second) is second
    assert session.prepare() == ()


def test_prepare_does_not_change_the_model_of_a_single_worker(session):
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    kinds, keys = [type(layer) for layer in model.modules()], list(model.state_dict())
    session.prepare(model)
    assert [type(layer) for layer in model.modules()] == kinds
    assert list(model.state_dict()) == keys
    for parameter in model.parameters():
        assert not parameter._backward_hooks
        assert not parameter._post_accumulate_grad_hooks
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


def test_optimizer_prepared_twice_counts_each_step_once(session):
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session.prepare(model, optimizer)
    session.prepare(optimizer)
    for _ in range(3):
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()
    assert session.step == 3


@pytest.mark.parametrize(
    ("thing", "error", "told"),
    [
        ([1, 2], ConfigError, "does not know what to do with a list"),
        (nn.Linear, ConfigError, "does not know what to do with a type"),
        (nn.Sequential(nn.Embedding(4, 2, sparse=True)), ModelError, "layer 0 makes sparse gradients"),
        (nn.EmbeddingBag(4, 2, sparse=True), ModelError, "sparse gradients"),
        (nn.Sequential(nn.LazyLinear(3)), ModelError, "parameter 0.weight has no shape yet"),
    ],
    ids=["list", "class", "sparse", "sparse-bag", "lazy"],
)
def test_unsupported_objects_are_refused_by_prepare_with_a_fix(session, thing, error, told):
    with pytest.raises(error, match=told) as refused:
        session.prepare(thing)
    assert "prepare" in refused.value.where
    assert refused.value.fix


@pytest.mark.parametrize("option", ["batch", "batchnorm", "loss", "overlap", "factors"])
def test_unknown_option_value_is_refused(session, option):
    with pytest.raises(ConfigError, match=f"unknown {option} 'other'") as refused:
        session.prepare(nn.Linear(1, 1), **{option: "other"})
    assert "known: " in refused.value.fix


def test_epochs_continue_after_the_last_finished_epoch(session):
    assert list(session.epochs(2)) == [0, 1]
    assert list(session.epochs(2)) == []
    assert list(session.epochs(4)) == [2, 3]


def test_unfinished_epoch_is_repeated(session):
    for epoch in session.epochs(3):
        if epoch == 1:
            break
    assert list(session.epochs(3)) == [1, 2]


def test_collectives_of_a_single_worker_change_nothing(session):
    tensor = torch.arange(4.0)
    assert session.all_reduce(tensor) is tensor
    assert session.all_reduce(tensor, "mean", wait=False).wait() is tensor
    assert session.all_reduce(tensor, wait=False).done()
    assert tensor.tolist() == [0, 1, 2, 3]
    (gathered,) = session.all_gather(tensor)
    assert torch.equal(gathered, tensor)
    assert gathered.data_ptr() != tensor.data_ptr()
    assert session.broadcast(tensor) is tensor
    session.barrier()
    assert (session.rank, session.world_size, session.is_leader) == (0, 1, True)
    with pytest.raises(ConfigError, match="no rank 1 to broadcast from"):
        session.broadcast(tensor, 1)
    with pytest.raises(ConfigError, match="not a whole number"):
        session.all_reduce(torch.ones(2, dtype=torch.int32), "mean")
    with pytest.raises(ConfigError, match="3 is not a tensor"):
        session.all_reduce(3)


def test_weight_that_is_not_positive_is_refused(session):
    session.weigh(3)
    for count in (0, -1, float("nan")):
        with pytest.raises(ConfigError, match="leaves rank 0 without weight"):
            session.weigh(count)


def test_accumulate_adds_gradients_on_a_single_worker(session):
    model = nn.Linear(1, 1)
    model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with session.accumulate():
        model(torch.ones(1, 1)).sum().backward()
    model(torch.ones(1, 1)).sum().backward()
    assert model.weight.grad.item() == 2
    optimizer.step()


def test_run_writes_a_record_of_its_events(tmp_path):
    with echelon.join(name="my run", seed=4, runs=tmp_path, record=True) as session:
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = DataLoader(TensorDataset(torch.ones(6, 2)), batch_size=4)
        model, optimizer, loader = session.prepare(model, optimizer, loader)
        session.expect_steps(4)
        for _ in session.epochs(2):
            for (x,) in loader:
                optimizer.zero_grad()
                loss = F.mse_loss(model(x), x[:, :1])
                loss.backward()
                optimizer.step()
                session.log(loss=loss, norm=model.weight.grad.norm(), output=model(x).sum())
            session.log_evaluation(loss=0.5, samples=6, accuracy=0.75)
        session.note("nothing happened")
    events = list(read_events(session.folder.events_of(0)))
    kinds = [type(event) for event in events]
    assert kinds[:3] == [RunStarted, WorkerJoined, StepsExpected]
    steps = [event for event in events if isinstance(event, StepEnded)]
    assert [(step.step, step.epoch, step.share, step.batch) for step in steps] == [
        (0, 0, 4, 4),
        (1, 0, 2, 2),
        (2, 1, 4, 4),
        (3, 1, 2, 2),
    ]
    assert all(step.loss is not None for step in steps)
    assert [event.epoch for event in events if isinstance(event, EpochEnded)] == [0, 1]
    assert [event.step for event in events if isinstance(event, Evaluated)] == [2, 4]
    logged = [event for event in events if isinstance(event, Logged)]
    assert [event.step for event in logged] == [1, 2, 3, 4]
    assert set(logged[0].values) == {"norm", "output"}
    assert [event.text for event in events if isinstance(event, Noted)] == ["nothing happened"]
    assert session.folder.name.endswith("-my-run")
    assert Plan.read(session.folder.plan).seed == 4


def test_a_run_without_a_record_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with echelon.join(record=False) as session:
        session.note("unheard")
        session.log(loss=1.0, other=2.0)
    assert session.folder is None
    assert list(tmp_path.iterdir()) == []


def test_all_random_generators_continue_from_a_checkpoint(tmp_path, session):
    import random

    session.save(tmp_path)
    expected = (random.random(), float(np.random.rand()), float(torch.rand(())), random.gauss(0, 1))
    for _ in range(3):
        random.random(), np.random.rand(), torch.rand(())
    session.load(tmp_path)
    assert (random.random(), float(np.random.rand()), float(torch.rand(())), random.gauss(0, 1)) == expected


def test_loading_a_checkpoint_restores_all_prepared_objects(tmp_path):
    def build(session):
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        schedulers = [
            torch.optim.lr_scheduler.StepLR(optimizer, 2),
            torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0),
        ]
        return session.prepare(model, optimizer, *schedulers)

    with echelon.join(record=False) as session:
        model, optimizer, by_step, by_plateau = build(session)
        for loss in (3.0, 4.0, 5.0):
            optimizer.zero_grad()
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            by_step.step()
            by_plateau.step(loss)
        session.save(tmp_path, extra={"best": float("inf"), "history": [1, (2, "three")]})
    with echelon.join(record=False) as other:
        model_2, optimizer_2, by_step_2, by_plateau_2 = build(other)
        assert other.load(tmp_path) == {"best": float("inf"), "history": [1, (2, "three")]}
        assert other.step == 3
    assert torch.equal(model.weight, model_2.weight)
    buffer, buffer_2 = (
        o.state[m.weight]["momentum_buffer"] for o, m in ((optimizer, model), (optimizer_2, model_2))
    )
    assert torch.equal(buffer, buffer_2)
    assert by_step.state_dict() == by_step_2.state_dict()
    assert by_plateau.state_dict() == by_plateau_2.state_dict()
    assert optimizer.param_groups[0]["lr"] == optimizer_2.param_groups[0]["lr"] != 0.1


def test_closed_session_and_its_model_are_garbage_collected():
    session = echelon.join(record=False)
    model = session.prepare(nn.Linear(2, 1))
    session.close()
    session.close()
    known = weakref.ref(session), weakref.ref(model)
    del session, model
    gc.collect()
    assert [reference() for reference in known] == [None, None]


def test_an_evaluation_needs_a_loss_or_an_accuracy(tmp_path):
    with echelon.join(runs=tmp_path, record=True) as session:
        session.log_evaluation(accuracy=0.5, samples=2)
        session.log_evaluation(loss=0.25, samples=3)
        with pytest.raises(ConfigError, match="needs a loss or an accuracy"):
            session.log_evaluation(samples=4)
    found = [event for event in read_events(session.folder.events_of(0)) if isinstance(event, Evaluated)]
    assert [(event.loss, event.accuracy) for event in found] == [(None, 0.5), (0.25, None)]
    assert write_summary(session.folder).test_loss == 0.25
    assert write_report(session.folder, tmp_path / "report.html").is_file()


def test_script_without_a_launcher_leaves_no_record_and_says_nothing_of_it(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with echelon.join(name="mine") as session:
        session.note("for nobody")
        session.log(loss=0.5)
    assert session.folder is None
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr() == ("", "")


def test_single_worker_of_another_launcher_is_recorded(tmp_path, monkeypatch):
    for name, value in {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 9}.items():
        monkeypatch.setenv(name, str(value))
    with echelon.join(runs=tmp_path) as session:
        assert session.folder is not None
    with echelon.join(runs=tmp_path, record=False) as session:
        assert session.folder is None


def test_single_worker_run_records_its_end_and_prints_the_path_of_its_record(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with echelon.join(name="mine", record=True) as session:
        pass
    *_, last = read_events(session.folder.events_of(0))
    assert (type(last), last.outcome, last.detail) == (RunEnded, "completed", "")
    assert json.loads(session.folder.summary.read_text())["outcome"] == "completed"
    path = f"runs/{session.folder.name}"
    assert capsys.readouterr().err == f"record: {path} (echelon report {path})\n"


@pytest.mark.parametrize(
    ("error", "outcome", "detail"),
    [
        (ValueError("as asked"), "failed", "rank 0: ValueError: as asked"),
        (KeyboardInterrupt(), "interrupted", "SIGINT"),
        (SystemExit(0), "completed", ""),
        (SystemExit(3), "failed", "rank 0: SystemExit: 3"),
    ],
)
def test_failed_run_records_its_outcome_and_reason(tmp_path, error, outcome, detail):
    with pytest.raises(type(error)), echelon.join(runs=tmp_path, record=True) as session:
        raise error
    *_, last = read_events(session.folder.events_of(0))
    assert (last.outcome, last.detail) == (outcome, detail)
    assert json.loads(session.folder.summary.read_text())["outcome"] == outcome


def test_session_under_echelon_run_leaves_the_end_of_the_record_to_the_launcher(
    tmp_path, monkeypatch, capsys
):
    folder = RunFolder(tmp_path).with_subfolders()
    folder.plan.write_text(make_plan("run", ["here"], PlanRequest(), cores=1).to_toml())
    monkeypatch.setenv("ECHELON_RUN", str(tmp_path))
    with echelon.join():
        pass
    assert not any(isinstance(event, RunEnded) for event in read_events(folder.events_of(0)))
    assert not folder.summary.exists()
    assert capsys.readouterr().err == ""


SCRIPT = """
import sys
import echelon

session = echelon.join(runs=sys.argv[1], name="script", record=True)
session.note("about to end")
if len(sys.argv) > 2:
    raise ValueError("as asked")
"""


def test_unclosed_session_is_closed_when_the_script_ends(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    ended = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "runs"), "fail"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 1
    assert ended.stderr.count("ValueError: as asked") == 1
    (run,) = (tmp_path / "runs").iterdir()
    events = list(read_events(run / "events" / "rank-0.jsonl"))
    assert [event.text for event in events if isinstance(event, Noted)] == ["about to end"]
    assert events[-1].outcome == "failed"
    assert ended.stderr.splitlines()[-1].startswith("record: ")
