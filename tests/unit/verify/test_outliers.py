"""Which norms stand out from recent steps and from other workers'."""

from __future__ import annotations

import math
import random

from hypothesis import given
from hypothesis import strategies as st

from echelon.verify.outliers import NormHistory


def _history(workers: int = 4, steps: int = 30, limit: float = 8.0, scale: float = 1.0) -> NormHistory:
    draw = random.Random(0)
    history = NormHistory(limit=limit, window=50)
    for _ in range(steps):
        history.add([[scale * draw.uniform(0.5, 2.0), 0.1] for _ in range(workers)])
    return history


def test_one_workers_huge_norm_stands_out_with_its_parameter_and_the_usual_norm():
    (found,) = _history().outliers([[1.0, 0.1], [1.0, 0.1], [1e20, 0.1], [1.0, 0.1]])
    assert (found.worker, found.parameter, found.norm) == (2, 0, 1e20)
    assert 0.5 < found.usual < 2.0


def test_norms_that_grow_on_all_workers_do_not_stand_out():
    assert not _history().outliers([[1e6, 1e5]] * 4)


def test_alone_there_is_only_the_past_to_compare_with():
    assert not _history(workers=1).outliers([[2.5, 0.2]])
    assert _history(workers=1).outliers([[1e6, 0.1]])


def test_a_norm_that_is_not_finite_stands_out_from_the_first_step_on():
    history = NormHistory(limit=8.0, window=50)
    (found,) = history.outliers([[1.0, 1.0], [1.0, math.nan]])
    assert (found.worker, found.parameter) == (1, 1)


def test_nothing_finite_stands_out_before_there_is_a_past():
    assert not NormHistory(limit=8.0, window=50).outliers([[1.0], [1e30]])


def test_a_layer_that_is_rarely_used_does_not_stand_out_when_it_is():
    history = NormHistory(limit=8.0, window=50)
    for _ in range(20):
        history.add([[1.0, 0.0], [1.0, 0.0]])
    assert not history.outliers([[1.0, 5.0], [1.0, 0.0]])


def test_few_corrupted_steps_do_not_change_what_is_usual():
    history = _history()
    for _ in range(3):
        history.add([[1e20, 0.1]] * 4)
    assert history.outliers([[1.0, 0.1], [1.0, 0.1], [1e20, 0.1], [1.0, 0.1]])


@given(st.floats(1e-12, 1e12), st.lists(st.floats(0.5, 2.0), min_size=4, max_size=4))
def test_usual_norms_of_any_scale_never_stand_out(scale, norms):
    history = _history(scale=scale)
    assert not history.outliers([[scale * norm, 0.1] for norm in norms])
