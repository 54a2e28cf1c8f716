"""Whose samples are drawn again after a loss."""

from __future__ import annotations

import pytest

from echelon.plan.shares import ShareTable
from echelon.train.drawn import DrawnBatch, DrawnBatches


def test_the_part_of_a_lost_worker_is_drawn_again_unless_it_was_in_a_sum():
    drawn = DrawnBatches()
    drawn.drew(DrawnBatch(0, range(10, 18), (3, 3, 2)))
    assert not drawn.names_lost({0, 1, 2})
    assert drawn.names_lost({0, 2})
    drawn.reduced({0, 2})
    assert drawn.empty
    assert drawn.take(0, {0, 2}) == [13, 14, 15]
    assert drawn.take(0, {0, 2}) == []


def test_a_round_of_all_settles_what_was_drawn():
    drawn = DrawnBatches()
    drawn.drew(DrawnBatch(0, range(8), (3, 3, 2)))
    drawn.settle()
    drawn.reduced({0})
    assert drawn.take(0, {0}) == []


def test_all_that_a_lost_worker_evaluated_in_a_pass_is_drawn_again():
    drawn = DrawnBatches()
    drawn.drew(DrawnBatch(1, range(4), (2, 2)))
    drawn.drew(DrawnBatch(1, range(4, 8), (2, 2)))
    drawn.drew(DrawnBatch(0, range(4), (2, 2)))
    assert drawn.take(1, {0}) == [2, 3, 6, 7]
    assert not drawn.empty


def test_a_lost_worker_has_no_samples_and_earlier_batches_keep_their_parts():
    table = ShareTable((1.0, 1.0, 1.0))
    table.goes_back = True
    table.keep((0, 2), {0: 5})
    assert table.now == (1.0, 0.0, 1.0)
    assert table.parts(0, 6, 10) == (5, 0, 5)
    assert table.parts(0, 4, 9) == (3, 3, 3), "asked again after a later one"
    assert table.slice_of(0, 6, 10, 2).start == 5


@pytest.mark.parametrize("loss_first", [True, False])
def test_shares_that_change_around_a_loss_are_the_same_in_whichever_order_a_worker_hears_of_it(loss_first):
    table = ShareTable((1.0, 1.0, 1.0))
    table.goes_back = True
    steps = [lambda: table.keep((0, 2), {0: 5}), lambda: table.change((2.0, 3.0, 1.0), {0: 7})]
    for step in steps if loss_first else reversed(steps):
        step()
    assert [table.parts(0, number, 6) for number in (4, 5, 6, 7)] == [
        (2, 2, 2), (3, 0, 3), (3, 0, 3), (4, 0, 2)
    ]  # fmt: skip
    table.keep((0, 2, 1), {0: 9})
    assert table.parts(0, 9, 6) == (2, 3, 1)
    assert table.parts(0, 8, 6) == (4, 0, 2)


def test_shares_of_batches_that_were_dropped_before_anybody_had_them_never_count():
    table = ShareTable((1.0, 1.0))
    table.goes_back = True
    table.change((2.0, 1.0), {0: 10})
    table.change((1.0, 2.0), {0: 7})  # after a loss: nobody had batch 7 yet
    assert [table.parts(0, number, 6) for number in (6, 7, 10)] == [(3, 3), (2, 4), (2, 4)]


def test_samples_whose_gradients_were_not_finite_are_drawn_again_once():
    drawn = DrawnBatches()
    drawn.drew(DrawnBatch(0, range(10, 18), (3, 3, 2)))
    drawn.refuse([1])
    drawn.settle()
    assert drawn.take(0, {0, 1, 2}) == [13, 14, 15]
    drawn.drew(DrawnBatch(0, [13, 14, 15], (1, 1, 1), again=True))
    drawn.refuse([0])
    drawn.reduced({0, 2})
    assert drawn.take(0, {0, 2}) == [14], "that of the lost worker, and not that of the other"
    drawn.drew(DrawnBatch(0, range(3), (1, 1, 1)))
    assert drawn.take(0, {1, 2}) == [0], "one that was refused before is lost now"
