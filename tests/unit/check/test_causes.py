"""What the evidence says, where no small script of tests/multiprocess/test_check.py does."""

from __future__ import annotations

import pytest

from echelon.check.causes import explain, explain_failure
from echelon.check.compare import RankDrift, SideComparison, StepDifference
from echelon.check.notes import OptimizerNote, UnalignedDraw, WorkerNotes

PART = StepDifference(
    optimizer="SGD",
    number=1,
    loss_alone=1.0,
    loss_workers=1.0,
    loss=0.0,
    gradients=0.5,
    weights=0.1,
    what="gradient",
    parameter="body.weight",
    by=0.5,
)


def _cause(found: SideComparison | None = None, workers: int = 2, **notes) -> str:
    made = [
        WorkerNotes(
            rank=rank,
            workers=workers,
            models=notes.get("models", 1),
            optimizers=[OptimizerNote(kind="SGD", names=["body.weight"], unprepared=[])],
            **{name: value for name, value in notes.items() if name not in ("models", "seeds")},
            seeds=notes.get("seeds", [[]] * workers)[rank],
        )
        for rank in range(workers)
    ]
    found = found or SideComparison(steps=(PART,), counts=(1, 1), samples=((8, 8),))
    cause = explain(made[0], made, found)
    assert cause.fix
    return cause.text


@pytest.mark.parametrize(
    ("notes", "text"),
    [
        ({"sync": "local(8)"}, "the workers synchronise by local(8)"),
        ({"codec": "one-bit"}, "gradients are encoded by one-bit"),
        ({"models": 0}, "the script prepares no model"),
        ({"seeds": [[(1, "a.py:3")], [(2, "a.py:3")]]}, "a.py:3 seeds rank 0 with 1 and rank 1 with 2"),
        ({}, "the losses agree and the gradients do not"),
    ],
)
def test_a_cause_is_told_by_what_the_workers_noted(notes, text):
    assert text in _cause(**notes)


@pytest.mark.parametrize(
    ("found", "text"),
    [
        (
            SideComparison(steps=(), counts=(3, 3), samples=((8, 9), (1, 8))),
            "the last batch of a pass has 1 samples",
        ),
        (SideComparison(steps=(), counts=(3, 3), samples=((8, 12),)), "8 samples alone and 12 samples"),
        (
            SideComparison(steps=(), counts=(5, 3), samples=()),
            "alone takes 5 steps, the workers 3 steps each",
        ),
        (
            SideComparison(
                steps=(), counts=(1, 1), samples=(), drift=RankDrift(number=1, rank=1, parameter="w")
            ),
            "after step 1, w of rank 1 is not that of rank 0",
        ),
        (
            SideComparison(steps=(), counts=(1, 1), samples=(), start=("w", 1.0)),
            "w differs before the first",
        ),
    ],
)
def test_a_cause_is_told_by_how_the_sides_differ(found, text):
    assert text in _cause(found)


def test_a_sum_that_is_a_mean_and_another_factor_are_told_apart():
    def found(factor: float) -> SideComparison:
        step = StepDifference(
            **{**{name: getattr(PART, name) for name in PART.__slots__}, "factor": factor}
        )
        return SideComparison(steps=(step,), counts=(1, 1), samples=((8, 8),))

    assert "the loss is a sum over samples" in _cause(found(0.5))
    assert "the loss is a mean, and prepare was told" in _cause(found(2.0), loss="sum")
    assert "are 0.25 times those alone" in _cause(found(0.25))
    assert "times those alone" not in _cause(found(1.0))


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (
            "RuntimeError: The size of tensor a (6) must match the size of tensor b (12) at dimension 0",
            True,
        ),
        (
            "RuntimeError: The size of tensor a (6) must match the size of tensor b (13) at dimension 0",
            False,
        ),
        ("RuntimeError: 12 of 6\nValueError: something else", False),
    ],
)
def test_an_error_that_names_the_batch_and_the_share_points_to_a_written_batch_size(error, told):
    cause = explain_failure(error, WorkerNotes(rank=0, batch=(6, 12)))
    assert (cause is not None) is told
    assert explain_failure(error, WorkerNotes(rank=0)) is None


def test_a_script_that_starts_torch_distributed_is_told_to_leave_that_out():
    cause = explain_failure("  in init_process_group\nRuntimeError: no NCCL", WorkerNotes(rank=0))
    assert cause is not None
    assert "starts torch.distributed by itself" in cause.text


def test_a_draw_after_the_step_that_parts_is_not_its_cause():
    def draw(step: int) -> UnalignedDraw:
        return UnalignedDraw(step=step, place="a.py:9", what="randperm", why="because")

    assert "the random draw randperm at a.py:9" in _cause(unaligned=[draw(0)])
    assert "randperm" not in _cause(unaligned=[draw(1)])
