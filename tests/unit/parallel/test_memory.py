"""What a layout needs on each worker: formulas, limits, and which layout fits instead."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echelon.parallel.candidates import candidate_layouts
from echelon.parallel.layout import parse_layout
from echelon.parallel.memory import (
    ModelBytes,
    memory_needs,
    missing_memory,
    nearest_layout,
    workers_that_fit,
)

ADAM = ModelBytes(parameters=100.0, trained=100.0, states=200.0, largest=10.0)


@pytest.mark.parametrize(
    ("layout", "needs"),
    [
        ("data", [400.0, 400.0]),
        ("sharded(level=1)", [300.0, 300.0]),
        ("sharded(level=2)", [250.0, 250.0]),
        ("sharded(level=3)", [210.0, 210.0]),
        ('sharded(level=3, shares="3,1")', [310.0, 110.0]),
        ('sharded(level=1, offload="/disk")', [200.0, 200.0]),
        ("pipeline(stages=2)", [200.0, 200.0]),
    ],
)
def test_needs_of_two_workers_follow_what_is_divided(layout, needs):
    assert [one.total for one in memory_needs(parse_layout(layout), 2, ADAM)] == pytest.approx(needs)


def test_the_stages_of_a_replica_are_judged_together_and_shards_one_by_one():
    assert missing_memory(parse_layout("pipeline(stages=2)"), ADAM, [350.0, 60.0]) is None
    missing = missing_memory(parse_layout("pipeline(stages=2)"), ADAM, [300.0, 60.0])
    assert missing is not None
    assert missing.ranks == (0, 1)
    assert missing.size == pytest.approx(40.0)
    missing = missing_memory(parse_layout("sharded(level=3)"), ADAM, [300.0, 60.0])
    assert missing is not None
    assert missing.ranks == (1,)
    assert missing.size == pytest.approx(150.0)


sizes = st.floats(0.0, 1e6)


@given(st.integers(1, 8), sizes, sizes, sizes, st.lists(st.floats(0.0, 4e6), min_size=8, max_size=8))
def test_a_layout_that_is_proposed_never_needs_more_than_there_is(workers, fixed, trained, states, rooms):
    model = ModelBytes(parameters=fixed + trained, trained=trained, states=states, largest=trained / 4)
    rooms = rooms[:workers]
    texts = candidate_layouts(workers)
    text, missing = nearest_layout(texts, model, rooms)
    everyone = [missing_memory(parse_layout(one), model, rooms) for one in texts]
    if missing is None:
        needs = memory_needs(parse_layout(text), workers, model)
        assert sum(one.total for one in needs) <= sum(rooms) * (1 + 1e-9) + 1e-6
    else:
        assert all(one is not None and one.size >= missing.size for one in everyone)


def test_so_many_workers_as_are_named_would_fit():
    enough = workers_that_fit(ADAM, [90.0, 100.0])
    assert missing_memory(parse_layout("sharded(level=3)"), ADAM, [90.0] * enough) is None
    assert missing_memory(parse_layout("sharded(level=3)"), ADAM, [90.0] * (enough - 1)) is not None
    assert workers_that_fit(ADAM, [5.0, 100.0]) == 0, "not even one layer fits"
