"""Groups of workers, as requested or by the sites of a lab."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echelon.errors import ConfigError
from echelon.plan.groups import by_site, parse_groups


def test_group_sizes_are_filled_with_consecutive_workers():
    assert parse_groups("2,1,3", 6) == ((0, 1), (2,), (3, 4, 5))


def test_groups_given_as_ranks_are_used_unchanged():
    assert parse_groups("0,2;3,1", 4) == ((0, 2), (3, 1))


@given(st.lists(st.integers(1, 9), min_size=1, max_size=8))
def test_every_worker_is_in_exactly_one_group_of_the_requested_size(sizes):
    groups = parse_groups(",".join(map(str, sizes)), sum(sizes))
    assert [len(group) for group in groups] == sizes
    assert [rank for group in groups for rank in group] == list(range(sum(sizes)))


@pytest.mark.parametrize(
    ("text", "workers"),
    [
        ("2,2", 5),
        ("2,2", 3),
        ("2,0,2", 4),
        ("2,-1,3", 4),
        ("0,1;1,2", 3),
        ("0,1;3", 4),
        ("0,1;2,3;", 4),
        ("two", 2),
        ("", 2),
        ("1.5,0.5", 2),
    ],
)
def test_incomplete_or_empty_groups_are_refused(text, workers):
    with pytest.raises(ConfigError) as caught:
        parse_groups(text, workers)
    assert caught.value.where == "--groups"
    assert "4,4" in str(caught.value.fix)


def test_each_site_is_a_group_in_order_of_appearance():
    assert by_site(["b", "a", "b", "a", "c"]) == ((0, 2), (1, 3), (4,))


@pytest.mark.parametrize("sites", [[], ["a"], ["a", "a"]])
def test_single_site_gives_no_groups(sites):
    assert by_site(sites) == ()
