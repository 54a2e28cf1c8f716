"""Scripts that save and load checkpoints: all workers report the same unusable checkpoint."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from torch import nn

import echelon
from echelon.errors import CheckpointError
from echelon.observe.events import CheckpointLoaded, CheckpointSaved, Noted, read_events


def make(session, *, width=4, optimizer=torch.optim.SGD, extra_layer=False):
    layers = [nn.Linear(2, width), nn.Linear(width, 1)]
    if extra_layer:
        layers.append(nn.Linear(1, 1))
    model = nn.Sequential(*layers)
    return session.prepare(model, optimizer(model.parameters(), lr=0.1))


def save_steps(folder, count):
    """Take some steps and save after each; returns the weight after each."""
    with echelon.join(record=False) as session:
        model, optimizer = make(session)
        weights = []
        for _ in range(count):
            optimizer.zero_grad()
            model(torch.ones(3, 2)).mean().backward()
            optimizer.step()
            session.save(folder, keep=3)
            weights.append(model[0].weight.detach().clone())
        return weights


class Heard(logging.Handler):
    """Keeps the logged messages."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.told = []

    def emit(self, record):
        self.told.append(record.getMessage())


def load_newest(folder):
    """Load from a folder; returns the loaded state, the log lines and the events."""
    heard = Heard()
    logging.getLogger("echelon").addHandler(heard)
    try:
        with echelon.join(runs="runs", name="load") as session:
            model, _ = make(session)
            session.load(folder)
            loaded = (session.step, model[0].weight.detach().clone())
            session.save("elsewhere")
        events = list(read_events(session.folder.events_of(session.rank)))
    finally:
        logging.getLogger("echelon").removeHandler(heard)
    return loaded, heard.told, events


def damage(folder, name):
    """Cut the checkpoint's tensors off in the middle."""
    file = Path(folder) / name / "tensors.safetensors"
    file.write_bytes(file.read_bytes()[:-20])


def attempt(act):
    try:
        return act()
    except CheckpointError as error:
        return error


def misfits(folder):
    """The errors of loading a checkpoint into other models; the session continues."""
    with echelon.join(record=False) as session:
        said = {}
        for name, other in {
            "wider": {"width": 5},
            "deeper": {"extra_layer": True},
            "another optimizer": {"optimizer": torch.optim.AdamW},
        }.items():
            _forget(session)
            make(session, **other)
            said[name] = attempt(lambda: session.load(folder))
        _forget(session)
        make(session)
        session.prepare(nn.Linear(1, 1))
        said["more"] = attempt(lambda: session.load(folder))
        session.barrier()
    return said


def _forget(session):
    """Forget all prepared objects, as a new run would."""
    session._prepared = type(session._prepared)()


def refusals(folder, file):
    """The errors of saving onto a file and of loading nothing; the session continues."""
    with echelon.join(record=False) as session:
        make(session)
        results = {
            "save": attempt(lambda: session.save(file)),
            "unsavable": attempt(lambda: session.save(folder, extra={"what": object()})),
            "load": attempt(lambda: session.load(folder)),
            "optional": attempt(lambda: session.load(folder, required=False)),
            "nowhere": attempt(lambda: session.load(Path(folder) / "nowhere", required=False)),
        }
        results["still there"] = session.all_reduce(torch.ones(1)).item()
        return results


def test_truncated_checkpoint_is_skipped_for_the_previous_one_with_a_warning(warm_pool, tmp_path):
    weights = warm_pool.run(2, save_steps, tmp_path, 3)
    damage(tmp_path, "step-000000003")
    loaded = warm_pool.run(2, load_newest, tmp_path)
    for rank, ((step, weight), told, events) in enumerate(loaded):
        assert step == 2
        assert torch.equal(weight, weights[0][1])
        found = [event for event in events if isinstance(event, CheckpointLoaded)]
        assert [list(event.rejected) for event in found] == [["step-000000003"]]
        assert found[0].path.endswith("step-000000002")
        noted = [e for e in events if isinstance(e, Noted) and "step-000000003 was passed over" in e.text]
        warned = [line for line in told if "step-000000003 was passed over" in line]
        assert len(warned) == len(noted) == (1 if rank == 0 else 0), "one worker warns for all"
    saved = [event for event in loaded[0][2] if isinstance(event, CheckpointSaved)]
    assert [event.step for event in saved] == [2]
    assert saved[0].size_bytes > 0


def test_checkpoint_of_another_model_is_refused_with_the_first_difference(warm_pool, tmp_path):
    warm_pool.run(1, save_steps, tmp_path, 1)
    for said in warm_pool.run(2, misfits, tmp_path):
        assert {name: type(error) for name, error in said.items()} == dict.fromkeys(said, CheckpointError)
        assert "its 0.weight is [4, 2], the script's is [5, 2]" in said["wider"].message
        assert "it has no 2.weight" in said["deeper"].message
        assert "it is of another optimizer: it has no betas" in said["another optimizer"].message
        assert "it has 1 models, the script prepared 2" in said["more"].message


def test_checkpoint_error_on_the_leader_is_raised_on_every_worker(warm_pool, tmp_path):
    file = tmp_path / "file"
    file.write_text("in the way")
    empty = tmp_path / "empty"
    empty.mkdir()
    for results in warm_pool.run(2, refusals, empty, file):
        assert isinstance(results["save"], CheckpointError)
        assert "a file is in the way" in results["save"].fix
        assert isinstance(results["unsavable"], CheckpointError)
        assert "extra.what" in results["unsavable"].where
        assert isinstance(results["load"], CheckpointError)
        assert "contains no checkpoint" in results["load"].message
        assert results["optional"] is None
        assert results["nowhere"] is None
        assert results["still there"] == 2


def test_only_the_newest_checkpoints_are_kept(tmp_path):
    save_steps(tmp_path, 5)
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"step-{n:09d}" for n in (3, 4, 5)]


def test_loading_only_a_damaged_checkpoint_fails_even_if_no_checkpoint_is_required(tmp_path):
    save_steps(tmp_path, 1)
    damage(tmp_path, "step-000000001")
    with echelon.join(record=False) as session:
        make(session)
        with pytest.raises(CheckpointError, match="no checkpoint can be used: step-000000001"):
            session.load(tmp_path, required=False)
