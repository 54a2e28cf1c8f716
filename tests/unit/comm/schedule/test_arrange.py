"""Positions of workers in a collective: groups are neighbours, machines stay whole."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echelon.comm.schedule.arrange import arranged
from echelon.comm.schedule.collective import COLLECTIVES, on
from echelon.errors import ConfigError
from schedules import execute


@st.composite
def groups_of_ranks(draw):
    """All ranks, shuffled and cut into groups."""
    size = draw(st.integers(2, 12))
    ranks = draw(st.permutations(range(size)))
    cuts = sorted(draw(st.sets(st.integers(1, size - 1), max_size=3)))
    return [list(ranks[a:b]) for a, b in zip([0, *cuts], [*cuts, size], strict=True)]


@given(groups_of_ranks(), st.sampled_from(["hierarchical", "hierarchical(outer=direct)", "ring", "direct"]))
def test_any_groups_give_a_collective_that_sums(groups, collective):
    size = sum(map(len, groups))
    found = arranged(collective, [[rank] for rank in range(size)], groups)
    built = COLLECTIVES.build(found.collective)
    order = found.order
    schedules = [on(order, built.schedule(order.index(rank), size, 23)) for rank in range(size)]
    buffers = [[rank * 100 + at for at in range(23)] for rank in range(size)]
    totals = [sum(column) for column in zip(*buffers, strict=True)]
    assert execute(schedules, buffers, hold=True, seed=1) == [totals] * size


def test_groups_are_neighbours_in_the_given_order_and_give_a_hierarchy_its_sizes():
    found = arranged("hierarchical(outer=direct)", [[0], [1], [2], [3], [4]], [[3, 1, 4], [0, 2]])
    assert found.order == (3, 1, 4, 0, 2)
    assert found.collective == "hierarchical(outer=direct, sizes=[3, 2])"


def test_sizes_that_are_given_stay():
    found = arranged("hierarchical(group=1)", [[0], [1]], [[1], [0]])
    assert found.collective == "hierarchical(group=1)"


def test_workers_of_a_machine_have_one_position():
    found = arranged("hierarchical", [[0, 2], [1, 3], [4]], [[4], [3, 1, 0, 2]])
    assert found.units == ((4,), (1, 3), (0, 2))
    assert found.collective == "hierarchical(sizes=[1, 2])"


def test_weights_are_given_by_rank_and_follow_the_positions():
    assert arranged("direct(weights=[4, 2, 1])", [[0], [1], [2]], [[2, 0], [1]]).collective == (
        "direct(weights=[1.0, 4.0, 2.0])"
    )
    assert arranged("direct(weights=[4, 2, 1])", [[0, 2], [1]], ()).collective == (
        "direct(weights=[5.0, 2.0])"
    )


def test_a_machine_in_two_groups_is_refused():
    with pytest.raises(ConfigError, match="share a machine"):
        arranged("hierarchical", [[0, 1], [2]], [[0], [1, 2]])


def test_too_few_weights_are_refused():
    with pytest.raises(ConfigError, match="2 weights for 3 workers"):
        arranged("direct(weights=[4, 2])", [[0], [1], [2]], ())
