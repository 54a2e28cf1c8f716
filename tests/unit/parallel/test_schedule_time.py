"""What schedules take without overhead: known cases, and who is faster where."""

from __future__ import annotations

from typing import Any

import pytest

from echelon.parallel.schedule_time import PassCosts, batch_s
from echelon.parallel.strategies.pipeline import Pipeline


def took(name: Any, *, stages: int = 4, micro: int = 8, handed_s: float = 0.0, **options: Any) -> float:
    """Equal workers; a third of a second for each of the three parts of a worker's passes."""
    pipeline = Pipeline(schedule=name, micro=micro, **options)
    parts = stages * pipeline.parts
    each = [1 / 3 / pipeline.parts] * parts
    costs = PassCosts(forward_s=each, input_s=each, weights_s=each, handed_s=[handed_s] * (parts - 1))
    return batch_s(pipeline, costs, stages, micro)


def test_without_wires_the_schedules_take_what_their_authors_say():
    assert took("gpipe") == pytest.approx(8 + 3)
    assert took("1f1b") == pytest.approx(8 + 3)
    assert took("interleaved") == pytest.approx(8 + 3 / 2)
    assert took("interleaved", chunks=3) == pytest.approx(8 + 3 / 3)
    assert took("filled") == pytest.approx(8 + 3 / 3)
    assert took("1f1b", stages=1) == pytest.approx(8)


def test_activations_and_gradients_of_a_worker_share_its_link():
    assert took("gpipe", stages=2, micro=100, handed_s=2.0) == pytest.approx(400, rel=0.02)
    # The middle one of three sends both, at the same time with 1f1b: its link is busy twice as long.
    assert took("1f1b", stages=3, micro=100, handed_s=2.0, ahead=4) > 400
    assert took("1f1b", stages=3, micro=100, handed_s=0.4, ahead=4) == pytest.approx(103, rel=0.05)


def test_more_micro_batches_in_flight_hide_thin_links():
    assert took("1f1b", handed_s=0.3, ahead=1) < took("1f1b", handed_s=0.3)
    assert took("filled", handed_s=0.3, ahead=1) < took("1f1b", handed_s=0.3, ahead=1)
    assert took("interleaved", handed_s=0.3) > took("interleaved")
