"""What the times of workers say about a step with DDP and with Echelon."""

from __future__ import annotations

import pytest

from echelon.bench.script_notes import ScriptNote, ScriptStep
from echelon.bench.scripts import parts_of
from echelon.bench.step import COMMUNICATION, COMPUTING, UPDATE, WAITING, compared
from echelon.bench.step_notes import SideNote, TimedStep, WorkerNote
from echelon.bench.step_words import difference, verdict
from echelon.bench.workloads import WORKLOADS, loss_of, workload
from echelon.errors import LaunchError, UnknownName


def step(begun, computed, reduced, ended):
    return TimedStep(begun=begun, computed=computed, reduced=reduced, ended=ended)


def note(rank, **sides):
    made = [SideNote(side=side, turns=turns) for side, turns in sides.items()]
    return WorkerNote(rank=rank, batch=8, threads=1, sides=made)


def test_a_step_is_divided_at_the_last_gradient_of_this_worker_and_of_the_slowest():
    fast = note(0, ddp=[[step(0.0, 2.0, 4.0, 5.0)]])
    slow = note(1, ddp=[[step(0.0, 3.0, 4.0, 5.0)]])
    found = compared("a model", [fast, slow])
    assert (found.workers, found.batch, found.samples_per_s("ddp")) == (2, 16, 16 / 5)
    assert found.sides["ddp"].step_s == 5.0
    assert found.sides["ddp"].parts == {COMPUTING: 2.5, WAITING: 0.5, COMMUNICATION: 1.0, UPDATE: 1.0}


def test_who_trains_alone_waits_for_nobody():
    fast = note(0, alone=[[step(0.0, 2.0, 2.0, 2.5)]])
    slow = note(1, alone=[[step(0.0, 9.0, 9.0, 9.5)]])
    assert compared("a model", [fast, slow]).sides["alone"].parts[WAITING] == 0.0


def test_a_turn_that_something_else_disturbed_does_not_count():
    usual, disturbed = step(0.0, 2.0, 3.0, 4.0), step(0.0, 20.0, 30.0, 40.0)
    found = compared("a model", [note(0, ddp=[[usual], [disturbed], [usual]])])
    assert found.sides["ddp"].step_s == 4.0


def made(ddp, echelon, alone):
    """A comparison of steps of so many milliseconds, all of them computing but for what is not alone."""
    sides = {
        side: [[step(0.0, alone / 1e3, ms / 1e3, ms / 1e3)]]
        for side, ms in (("ddp", ddp), ("echelon", echelon), ("alone", alone))
    }
    return compared("lenet", [note(0, **sides)])


@pytest.mark.parametrize(
    ("ddp", "echelon", "said"),
    [(20, 10, "is shorter with Echelon: 0.50"), (20, 30, "is longer"), (20, 20.2, "takes as long")],
)
def test_the_verdict_says_who_is_faster_unless_it_is_noise(ddp, echelon, said):
    assert said in verdict(made(ddp, echelon, 5))


def test_the_difference_names_its_largest_part_and_what_communication_costs():
    lines = difference(made(20, 12, 10))
    assert lines[0].startswith("communication: 8.00 ms less with Echelon")
    assert "DDP takes 10.00 ms more than the same step without communication" in lines[1]
    assert "10.00 ms of communication" in lines[1]


def test_a_script_that_steps_too_rarely_is_refused_by_name():
    one = ScriptStep(step_s=0.3, backward_s=0.1, update_s=0.05)
    parts = parts_of("train.py", [ScriptNote(rank=0, steps=[one] * 10)])
    assert list(parts.parts.values()) == pytest.approx([0.15, 0.1, 0.05])
    with pytest.raises(LaunchError, match=r"train.py made only 1 optimizer steps"):
        parts_of("train.py", [ScriptNote(rank=0, steps=[one] * 10), ScriptNote(rank=1, steps=[one])])


@pytest.mark.parametrize("name", ["lenet", "embedding", "lstm", "transformer", "cnn", "mlp"])
def test_every_model_can_be_trained_on_its_batch(name):
    model, x, y = WORKLOADS[name].make()
    loss_of(model, x, y).backward()
    assert all(p.grad is not None for p in model.parameters())
    assert len(x) == WORKLOADS[name].batch


def test_an_unknown_model_is_refused_with_the_nearest_name():
    with pytest.raises(UnknownName, match="resnet18"):
        workload("resnet")
