"""How long schedules take: what theory says of equal stages, and what no schedule can beat."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echelon.parallel.schedule_time import schedule_s
from echelon.parallel.strategies.pipeline import Pipeline

WAYS = {
    "gpipe": Pipeline(stages=4),
    "1f1b": Pipeline(stages=4, schedule="1f1b"),
    "1f1b, ahead": Pipeline(stages=4, schedule="1f1b", ahead=1),
    "filled": Pipeline(stages=4, schedule="filled"),
}


def took(way: str, micro: int, parts_s: list[float], wires_s: list[float]) -> float:
    return schedule_s(WAYS[way], micro, parts_s, wires_s)


@pytest.mark.parametrize("way", ["gpipe", "1f1b", "1f1b, ahead"])
def test_equal_stages_without_wires_take_a_pass_more_for_each_further_stage(way):
    assert took(way, 8, [3.0] * 4, [0.0] * 3) == pytest.approx(3.0 * (8 + 3))


def test_weights_fill_what_stages_would_wait():
    assert took("filled", 8, [3.0] * 4, [0.0] * 3) < took("1f1b", 8, [3.0] * 4, [0.0] * 3)


def test_thin_links_need_more_micro_batches_in_flight():
    usual, ahead = (took(way, 8, [3.0] * 4, [1.5] * 3) for way in ("1f1b", "1f1b, ahead"))
    assert ahead < usual


def test_interleaved_chunks_shorten_the_time_until_the_last_worker_begins():
    chunks = Pipeline(stages=4, schedule="interleaved", chunks=2)
    assert schedule_s(chunks, 8, [1.5] * 8, [0.0] * 7) < took("1f1b", 8, [3.0] * 4, [0.0] * 3)


@given(
    st.sampled_from(sorted(WAYS)),
    st.integers(1, 9),
    st.lists(st.floats(0.1, 5), min_size=4, max_size=4),
    st.lists(st.floats(0, 3), min_size=3, max_size=3),
)
def test_no_schedule_beats_its_slowest_worker_or_its_first_micro_batch(way, micro, parts_s, wires_s):
    found = took(way, micro, parts_s, wires_s)
    assert found >= micro * max(parts_s) * (1 - 1e-9)
    one = sum(parts_s) * (2 / 3) + 2 * sum(wires_s) if way == "filled" else sum(parts_s)
    assert found >= one * (1 - 1e-9)
    assert found < 3 * micro * (sum(parts_s) + 2 * sum(wires_s)) + 1e-9
