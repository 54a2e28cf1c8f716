"""Checkpoints that several workers write while they train: faults leave the one before, and are told."""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import signal
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import echelon
from echelon.checkpoint.part import Part
from echelon.checkpoint.store import read_newest
from echelon.errors import CheckpointError
from warm import WorkerFailure


class Heard(logging.Handler):
    """Keeps the logged warnings."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.told = []

    def emit(self, record):
        self.told.append(record.getMessage())


@contextlib.contextmanager
def heard():
    handler = Heard()
    logging.getLogger("echelon").addHandler(handler)
    try:
        yield handler.told
    finally:
        logging.getLogger("echelon").removeHandler(handler)


def train(folder, at_step, *, epochs=2, resume=False, **join):
    """Epochs of eight steps; calls `at_step(session, model)` after each. Returns weights and step."""
    with echelon.join(record=False, round_timeout_s=90, **join) as session:
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(20, 300), nn.Tanh(), nn.Dropout(0.1), nn.Linear(300, 2))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        x = torch.randn(64, 20, generator=torch.Generator().manual_seed(1))
        loader = DataLoader(TensorDataset(x, (x[:, 0] > 0).long()), batch_size=8, shuffle=True)
        model, optimizer, loader = session.prepare(model, optimizer, loader)
        if resume:
            session.load(folder)
        for _ in session.epochs(epochs):
            for a, b in loader:
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(a), b).backward()
                optimizer.step()
                at_step(session, model)
        return [p.detach().clone() for p in model.parameters()], session.step


def nothing(session, model):
    return


def names(folder):
    return sorted(path.name for path in Path(folder).iterdir())


def newest(folder):
    return read_newest(Path(folder), lambda state: None)


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


# Parts -------------------------------------------------------------------------------------------


def saves_and_goes_on(folder):
    weights = {}

    def at_step(session, model):
        if session.step in (3, 6):
            weights[session.step] = [p.detach().clone() for p in model.parameters()]
            session.save(folder, wait=False)

    train(folder, at_step, epochs=1)
    return weights


def test_every_worker_writes_a_part_and_the_state_is_that_of_its_step(warm_pool, tmp_path):
    weights = warm_pool.run(3, saves_and_goes_on, tmp_path)
    assert names(tmp_path) == ["step-000000003", "step-000000006"]
    parts = ["tensors-00001.safetensors", "tensors-00002.safetensors", "tensors.safetensors"]
    assert names(tmp_path / "step-000000006") == ["state.json", *parts]
    sizes = [(tmp_path / "step-000000006" / part).stat().st_size for part in parts]
    assert max(sizes) < 0.6 * sum(sizes)
    found = newest(tmp_path)
    assert found.step == 6
    assert same(list(found.state["models"][0].values()), weights[0][6])
    assert len(found.workers) == 3


def far_from_the_leader(folder, resume):
    """Every worker is in a folder of its own, so that only the leader sees its checkpoints."""
    own = Path(folder) / os.environ["RANK"]
    own.mkdir(exist_ok=True)
    before = Path.cwd()
    os.chdir(own)
    try:

        def at_step(session, model):
            if session.step == 5 and not resume:
                session.save("checkpoints", wait=False)

        return train("checkpoints", at_step, resume=resume, codec="top-k(0.3)")[0]
    finally:
        os.chdir(before)


def test_workers_without_the_leaders_disk_send_it_what_only_they_have(warm_pool, tmp_path):
    whole = warm_pool.run(3, far_from_the_leader, tmp_path, False)
    assert names(tmp_path / "0" / "checkpoints") == ["step-000000005"]
    assert not (tmp_path / "1" / "checkpoints").exists()
    resumed = warm_pool.run(3, far_from_the_leader, tmp_path, True)
    for weights, expected in zip(resumed, whole, strict=True):
        assert same(weights, expected), "residuals and random streams are those of each worker"


# Faults ------------------------------------------------------------------------------------------


def dies_while_writing(folder):
    write = Part.write

    def die(part, path):
        path.write_bytes(b"half")
        os.kill(os.getpid(), signal.SIGKILL)
        return write(part, path)

    def at_step(session, model):
        if session.step in (2, 4):
            if session.step == 4 and session.rank == 1:
                session._writer.await_written()
                Part.write = die
            session.save(folder, wait=False)

    train(folder, at_step)


def test_a_worker_killed_while_it_writes_its_part_leaves_the_checkpoint_before(warm_pool, tmp_path):
    outcomes = warm_pool.outcomes(2, dies_while_writing, tmp_path)
    assert all(isinstance(outcome, WorkerFailure) for outcome in outcomes)
    assert [name for name in names(tmp_path) if not name.startswith(".")] == ["step-000000002"]
    found = newest(tmp_path)
    assert (found.step, found.rejected) == (2, {})
    warm_pool.run(2, saves_and_goes_on, tmp_path)
    assert not [name for name in names(tmp_path) if name.startswith(".")], "what the dead left is removed"


def fills_its_disk(folder):
    """Rank 1's disk is full from step 4 on."""

    def at_step(session, model):
        if session.step == 2:
            session.save(folder, wait=False)
        if session.step == 4:
            session._writer.await_written()
            with full_disk() if session.rank == 1 else contextlib.nullcontext():
                session.save(folder, wait=False)
                session._writer.await_written()
                with pytest.raises(
                    CheckpointError, match="rank 1's part of the checkpoint cannot be written"
                ):
                    session.save(folder)

    with heard() as told:
        _, step = train(folder, at_step)
    return step, told


@contextlib.contextmanager
def full_disk():
    """No file can be larger than 1,000 bytes: writing fails in the middle, as on a full disk."""
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)


def test_a_full_disk_of_one_worker_is_told_and_training_goes_on(warm_pool, tmp_path):
    outcomes = warm_pool.run(2, fills_its_disk, tmp_path)
    assert [step for step, _ in outcomes] == [16, 16]
    assert len(outcomes[0][1]) == 1
    assert "rank 1's part of the checkpoint cannot be written: File too large" in outcomes[0][1][0]
    assert "training goes on" in outcomes[0][1][0]
    assert names(tmp_path) == ["step-000000002"]


def changes_weights_too_early(folder):
    """Rank 1 changes a weight after it has saved, before the next step; the copy is held until then."""
    copy = Part.copy

    def at_step(session, model):
        if session.step == 2:
            session.save(folder, wait=False)
            session._writer.await_written()
        if session.step == 4:
            if session.rank == 1:
                Part.copy = late
            session.save(folder, wait=False)
            if session.rank == 1:
                with torch.no_grad():
                    for p in model.parameters():
                        p.mul_(1.0)
                begin.append(1)
            session._writer.await_written()
            Part.copy = copy
        if session.step == 6:
            session.save(folder)

    begin = []

    def late(part, listed, versions=None):
        while versions and not begin:
            pass
        return copy(part, listed, versions)

    with heard() as told:
        train(folder, at_step)
    return told


def test_weights_changed_during_the_copy_are_noticed_and_that_checkpoint_is_not_kept(warm_pool, tmp_path):
    told, _ = warm_pool.run(2, changes_weights_too_early, tmp_path)
    assert any("was changed while it was copied" in line for line in told), told
    assert names(tmp_path) == ["step-000000002", "step-000000006"]


# By itself ---------------------------------------------------------------------------------------


def stopped_by_signal(folder, stop_rank):
    """Returns the exit code and the step at which this worker was stopped."""
    seen = []

    def at_step(session, model):
        seen.append(session.step)
        if session.step == 5 and session.rank == stop_rank:
            os.kill(os.getpid(), signal.SIGTERM)

    try:
        train(folder, at_step, epochs=200, checkpoint=folder, checkpoint_every="100epochs")
    except SystemExit as end:
        return end.code, seen[-1], signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    return "went on"


def continues(folder, until=None):
    weights, step = train(folder, nothing, epochs=until, checkpoint=folder, checkpoint_every="1h")
    return weights, step


def test_sigterm_of_one_worker_saves_and_stops_all_at_one_step_and_the_run_goes_on_exactly(
    warm_pool, tmp_path
):
    stopped = warm_pool.run(3, stopped_by_signal, tmp_path, 1)
    assert {code for code, _, _ in stopped} == {75}
    steps = {step for _, step, _ in stopped}
    assert len(steps) == 1
    assert all(restored for _, _, restored in stopped)
    step = steps.pop()
    assert newest(tmp_path).step == step
    epochs = step // 8 + 2
    resumed = warm_pool.run(3, continues, tmp_path, epochs)
    whole = warm_pool.run(3, continues, tmp_path / "none", epochs)
    for (weights, end), (expected, end_of_whole) in zip(resumed, whole, strict=True):
        assert end == end_of_whole == 8 * epochs
        assert same(weights, expected)


def evaluates(folder, every, best):
    """Eight steps an epoch; the loss is best in the second epoch. Saves by itself."""
    losses = [3.0, 1.0, 2.0, 2.5, 2.75]
    join = {"checkpoint": folder, "checkpoint_every": every, "checkpoint_keep": 2, "checkpoint_best": best}
    with echelon.join(record=False, **join) as session:
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = DataLoader(TensorDataset(torch.randn(64, 4)), batch_size=8)
        model, optimizer, loader = session.prepare(model, optimizer, loader)
        for epoch in session.epochs(5):
            for (x,) in loader:
                model(x).mean().backward()
                optimizer.step()
            session.log_evaluation(loss=losses[epoch], samples=1)


@pytest.mark.parametrize(
    ("every", "best", "kept"),
    [
        ("1epoch", None, [32, 40]),
        ("2epochs", None, [16, 32]),
        ("15steps", None, [15, 30]),
        ("1h", "loss", [16, 32, 40]),
        ("1epoch", "accuracy", [32, 40]),
    ],
)
def test_a_session_saves_by_itself_as_often_as_asked_and_keeps_the_last_and_the_best(
    tmp_path, every, best, kept
):
    evaluates(tmp_path, every, best)
    assert names(tmp_path) == [f"step-{step:09d}" for step in kept]


def test_a_session_saves_by_the_clock(tmp_path):
    evaluates(tmp_path, "1us", None)
    assert names(tmp_path)[-1] == "step-000000040"
    assert len(names(tmp_path)) == 2
