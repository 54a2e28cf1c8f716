"""Where two sides part, on figures made up for the purpose."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest

from echelon.check.compare import RankDrift, SideNotes, compare, without_growth
from echelon.check.notes import LossNote, OptimizerNote, StepNote, WorkerNotes

NAMES = ["body.weight", "body.bias", "head.weight"]


def _side(
    *,
    workers: int = 1,
    steps: int = 2,
    gradient=lambda step, index: np.full(4, 1.0, np.float32),
    weight=lambda step, index: np.full(4, 1.0 - 0.1 * step, np.float32),
    loss=lambda step, rank: 2.0,
    samples=lambda rank: 12,
) -> SideNotes:
    """A side; every figure is a function of the step, the parameter or the rank."""
    notes = [
        WorkerNotes(
            rank=rank,
            workers=workers,
            models=1,
            optimizers=[OptimizerNote(kind="SGD", names=NAMES, unprepared=[])],
            steps=[
                StepNote(
                    optimizer=0,
                    number=step,
                    losses=[LossNote(value=loss(step, rank), weight=1 / workers)],
                    samples=samples(rank),
                    settings=[{"lr": 0.1}],
                    digests=["same"] * 3,
                )
                for step in range(1, steps + 1)
            ],
        )
        for rank in range(workers)
    ]

    def after(index: int) -> dict[str, np.ndarray]:
        arrays = {f"w{i}": weight(index + 1, i) for i in range(3)}
        gradients = {f"g{i}": gradient(index + 1, i) for i in range(3)}
        norms = [
            [np.linalg.norm(gradients[f"g{i}"].astype(float)), np.linalg.norm(arrays[f"w{i}"])]
            for i in range(3)
        ]
        return {**arrays, **gradients, "norms": np.array(norms)}

    return SideNotes(
        workers=notes, after=after, before=lambda optimizer: {f"w{i}": weight(0, i) for i in range(3)}
    )


def _off(at: int, by: float, base: float = 1.0):
    """Gradients of which one parameter's is larger."""
    return lambda step, index: np.full(4, base * (1 + (by if index == at else 0.0)), np.float32)


def test_sides_that_agree_are_the_same_to_their_largest_difference():
    found = compare(_side(), _side(workers=2, samples=lambda rank: 6, gradient=_off(1, 3e-7)), 1e-4)
    assert found.same
    assert found.largest == pytest.approx(3e-7, rel=0.5)


def test_the_first_parameter_that_parts_is_named_with_its_step():
    wrong = _side(gradient=lambda step, index: np.full(4, 1 + (step == 2 and index > 0) * 1e-3, np.float32))
    found = compare(_side(), wrong, 1e-4)
    assert [(step.what, step.parameter) for step in found.steps] == [("", ""), ("gradient", "body.bias")]
    assert found.first is found.steps[1]
    assert found.first.by == pytest.approx(1e-3, rel=0.01)


def test_a_gradient_that_is_rounding_alone_does_not_part():
    def tiny(scale):
        return lambda step, index: np.full(4, scale if index == 1 else 1.0, np.float32)

    assert compare(_side(gradient=tiny(1e-8)), _side(gradient=tiny(-3e-8)), 1e-4).same


def test_a_small_gradient_that_is_wrong_parts():
    def small(scale):
        return lambda step, index: np.full(4, scale if index == 1 else 1.0, np.float32)

    assert compare(_side(gradient=small(1e-3)), _side(gradient=small(2e-3)), 1e-4).first is not None


def test_weights_that_adam_made_of_rounding_do_not_part():
    """The gradient of the bias is rounding; its weights go as far as the others, in any direction."""

    def gradients(sign):
        return lambda step, index: np.full(4, sign * 1e-9 if index == 1 else 1.0, np.float32)

    def weights(sign):
        return lambda step, index: np.full(4, (sign if index == 1 else 1) * 0.001 * step, np.float32)

    alone = _side(gradient=gradients(1), weight=weights(1))
    assert compare(alone, _side(gradient=gradients(-1), weight=weights(-1)), 1e-4).same


def test_weights_part_if_they_go_another_way_by_however_little():
    def weights(rate):
        return lambda step, index: np.full(4, 1.0, np.float32) - np.float32(rate * step)

    found = compare(_side(weight=weights(2e-5)), _side(weight=weights(4e-5)), 1e-4)
    assert (found.first.what, found.first.parameter) == ("weight", "body.weight")
    assert compare(_side(weight=weights(0)), _side(weight=weights(1e-7)), 1e-4).same  # rounding


def test_a_factor_of_all_gradients_is_found_and_one_of_a_single_gradient_is_none():
    base = lambda step, index: np.arange(4, dtype=np.float32) + index + 1  # noqa: E731
    half = lambda step, index: base(step, index) / 2  # noqa: E731
    one = lambda step, index: base(step, index) * (0.5 if index == 0 else 1)  # noqa: E731
    assert compare(_side(gradient=base), _side(gradient=half), 1e-4).first.factor == pytest.approx(0.5)
    assert compare(_side(gradient=base), _side(gradient=one), 1e-4).first.factor is None


def test_losses_are_weighted_and_left_out_if_weights_are_those_of_no_mean():
    workers = _side(workers=2, loss=lambda step, rank: 1.5 + rank, samples=lambda rank: 6)
    first = compare(_side(), workers, 1e-4).steps[0]
    assert (first.loss_alone, first.loss_workers, first.loss) == (2.0, 2.0, 0.0)
    for notes in workers.workers:
        notes.steps[0] = msgspec.structs.replace(notes.steps[0], losses=[LossNote(value=1.0, weight=0.7)])
    first = compare(_side(), workers, 1e-4).steps[0]
    assert (first.loss_workers, first.loss) == (None, None)


def test_what_is_not_a_number_on_one_side_only_parts():
    lost = _side(gradient=lambda step, index: np.full(4, np.nan, np.float32))
    assert compare(_side(), lost, 1e-4).first.gradients == np.inf
    assert compare(lost, lost, 1e-4).first is None


def test_samples_steps_and_ranks_that_differ_are_noticed():
    assert compare(_side(), _side(workers=2), 1e-4).unequal_samples == 0
    assert not compare(_side(), _side(steps=1), 1e-4).same
    drifting = _side(workers=2, samples=lambda rank: 6)
    last = drifting.workers[1].steps[1]
    drifting.workers[1].steps[1] = msgspec.structs.replace(last, digests=["same", "other", "same"])
    found = compare(_side(), drifting, 1e-4)
    assert found.drift == RankDrift(number=2, rank=1, parameter="body.bias")
    assert not found.same


def test_weights_that_differ_before_the_first_step_are_named():
    other = _side()
    other = replace(other, before=lambda optimizer: {f"w{i}": np.full(4, 1.0 + i) for i in range(3)})
    assert compare(_side(), other, 1e-4).start == ("body.bias", pytest.approx(1.0))


@pytest.mark.parametrize(
    ("differences", "same"),
    [((1e-13, 1e-9, 1e-3), True), ((1e-13, 1e-13, 1e-3), False), ((1e-3, 1e-3, 1e-3), False)],
)
def test_in_64_bits_what_grows_step_by_step_is_rounding_and_what_comes_at_once_is_not(differences, same):
    def gradients(step, index):
        return np.full(4, 1.0 + (differences[step - 1] if index == 1 else 0.0))

    plain = _side(steps=3, gradient=lambda step, index: np.ones(4))
    found = compare(plain, _side(steps=3, gradient=gradients), 1e-6)
    assert not found.same
    assert without_growth(found).same is same
