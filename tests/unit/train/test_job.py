"""The built-in job, called in a warm worker with a run folder like the launcher's."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from echelon.config.resolve import resolve
from echelon.config.schema import TrainSettings
from echelon.observe.events import CheckpointSaved, EpochEnded, Evaluated, Noted, StepEnded, StepsExpected
from echelon.observe.follow import read_run
from echelon.observe.run_folder import RunFolder
from echelon.plan.plan import PlanRequest, make_plan


def _train(runs: list[dict[str, Any]]) -> list[list[Any]]:
    """The events of several runs of the job, one after the other, in the worker's folder."""
    from echelon.train import job

    join = job.join
    told = []
    for number, given in enumerate(runs):
        resolved = resolve(TrainSettings, given)
        folder = RunFolder(Path(f"run-{number}").absolute()).with_subfolders()
        folder.config.write_text(resolved.to_toml())
        plan = make_plan("run", ["here"], PlanRequest(seed=resolved.settings.seed), cores=1)
        folder.plan.write_text(plan.to_toml())
        os.environ["ECHELON_RUN"] = str(folder.path)
        sessions = []
        job.join = lambda sessions=sessions: sessions.append(join()) or sessions[0]
        try:
            job.main()
        finally:
            job.join = join
            for session in sessions:
                session.close()
        told.append([event for event in read_run(folder) if not isinstance(event, StepEnded)])
    return told


def _of(kind: type, events: list[Any]) -> list[Any]:
    return [event for event in events if isinstance(event, kind)]


SMALL = {"model": "mlp(width=16, depth=1)", "data": "generated(samples=500)", "batch": 50, "lr": 0.05}
DROPS = {**SMALL, "model": "har-cnn(width=4)", "data": "activity(samples=120)", "batch": 24}


def test_resumed_training_draws_the_same_dropout_as_an_uninterrupted_one(warm_pool):
    ((whole, first, second),) = warm_pool.run(
        1,
        _train,
        [
            {**DROPS, "epochs": 2},
            {**DROPS, "epochs": 1, "checkpoint": "saved"},
            {**DROPS, "epochs": 2, "checkpoint": "saved"},
        ],
    )
    losses = [event.loss for event in _of(Evaluated, whole)]
    assert [event.loss for event in _of(Evaluated, first) + _of(Evaluated, second)] == losses


def test_loss_depends_on_seed_and_optimizer_and_is_otherwise_reproducible(warm_pool):
    runs = [SMALL, SMALL, {**SMALL, "seed": 1}, {**SMALL, "optimizer": "adamw"}, {**SMALL, "momentum": 0.0}]
    (told,) = warm_pool.run(1, _train, [{**given, "epochs": 1} for given in runs])
    losses = [_of(Evaluated, events)[-1].loss for events in told]
    assert losses[0] == losses[1]
    assert len(set(losses)) == 4


def test_training_stops_at_the_wanted_accuracy_and_notes_it(warm_pool):
    given = {**SMALL, "epochs": 5, "until_accuracy": 0.01, "checkpoint": "saved"}
    ((events,),) = warm_pool.run(1, _train, [given])
    assert [event.epoch for event in _of(Evaluated, events)] == [0]
    assert len(_of(CheckpointSaved, events)) == 1
    (note,) = _of(Noted, events)
    assert "stopped at a test accuracy of" in note.text


def test_expected_steps_are_recorded_and_every_epoch_is_evaluated_on_all_test_samples(warm_pool):
    ((events,),) = warm_pool.run(1, _train, [{**SMALL, "epochs": 2}])
    (expected,) = _of(StepsExpected, events)
    assert expected.steps == 2 * 8  # 80 % of 500 samples in batches of 50
    assert [event.step for event in _of(Evaluated, events)] == [8, 16]
    assert [event.samples for event in _of(Evaluated, events)] == [100, 100]
    assert [event.epoch for event in _of(EpochEnded, events)] == [0, 1]
