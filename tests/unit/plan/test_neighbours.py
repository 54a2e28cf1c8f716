"""Which workers are neighbours: those of one machine, then those of one site, also in mixed order."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from echelon.parallel.layout import lines, mesh_of, parse_layout
from echelon.parallel.strategies.data import Replicas
from echelon.plan.neighbours import neighbouring_groups

FAST, SLOW = 120e6, 6e6


def measured(sites: str) -> tuple[dict[tuple[int, int], float], dict[tuple[int, int], float]]:
    """Latencies and rates between machines whose sites are these letters."""
    pairs = [(a, b) for a in range(len(sites)) for b in range(len(sites)) if a != b]
    rates = {(a, b): FAST if sites[a] == sites[b] else SLOW for a, b in pairs}
    return dict.fromkeys(pairs, 1e-4), rates


def groups_of(sites: str) -> tuple[tuple[int, ...], ...]:
    return neighbouring_groups([[rank] for rank in range(len(sites))], *measured(sites))


def test_machines_of_a_site_are_neighbours_in_any_order_of_listing():
    assert groups_of("abab") == ((0, 2), (1, 3))
    assert groups_of("aabb") == ((0, 1), (2, 3))
    assert groups_of("abba") == ((0, 3), (1, 2))
    assert groups_of("aaaa") == ((0, 1, 2, 3),)


def test_the_groups_of_the_plan_say_more_than_measured_links():
    machines = [[rank] for rank in range(4)]
    assert neighbouring_groups(machines, *measured("aabb"), ((1, 3), (0, 2))) == ((0, 2), (1, 3))


def test_workers_of_one_machine_are_neighbours():
    assert neighbouring_groups([[0, 2], [1, 3]], {}, {}) == ((0, 2, 1, 3),)


@given(st.permutations("aaabbb"))
def test_stages_stay_inside_sites_or_replicas_do_as_the_layout_says(listed):
    sites = "".join(listed)
    order = tuple(rank for group in groups_of(sites) for rank in group)
    inner = replace(parse_layout("pipeline(stages=3) * data"), order=order)
    assert all(len({sites[rank] for rank in ranks}) == 1 for ranks in mesh_of(inner, 6).ranks)
    assert all(len({sites[rank] for rank in line}) == 2 for line in lines(inner, 6, Replicas))
    outer = replace(parse_layout("data * pipeline(stages=2)"), order=order)
    assert all(len({sites[rank] for rank in ranks}) == 2 for ranks in mesh_of(outer, 6).ranks)
    assert all(len({sites[rank] for rank in line}) == 1 for line in lines(outer, 6, Replicas))
