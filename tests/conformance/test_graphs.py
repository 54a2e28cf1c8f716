"""Every registered graph of neighbours against its contract. New ones are included automatically."""

from __future__ import annotations

import random

import pytest

from echelon.errors import ConfigError
from echelon.sync.graph import GRAPHS, Graph, Neighbourhood, reachable

every_graph = pytest.mark.parametrize("name", GRAPHS.names())


def _fitting(graph: Graph, round_: int = 0) -> list[Neighbourhood]:
    """The graph for each number of workers from 1 to 12 that it fits."""
    found = []
    for workers in range(1, 13):
        try:
            found.append(graph.neighbours(workers, round_))
        except ConfigError:
            continue
        assert len(found[-1]) == workers
    assert found, f"{graph} fits no number of workers from 1 to 12"
    return found


def test_the_graphs_of_the_project_are_registered():
    assert {"ring", "torus", "random", "complete", "matching", "edges"} <= set(GRAPHS.names())


@every_graph
@pytest.mark.parametrize("round_", [0, 1, 17])
def test_neighbours_are_mutual_distinct_and_in_order(name, round_):
    for neighbours in _fitting(GRAPHS.build(name), round_):
        for worker, others in enumerate(neighbours):
            assert worker not in others
            assert list(others) == sorted(set(others))
            assert all(worker in neighbours[other] for other in others)


@every_graph
def test_all_workers_draw_the_same_graph_without_the_global_generator(name):
    before = random.getstate()
    for round_ in range(5):
        assert _fitting(GRAPHS.build(name), round_) == _fitting(GRAPHS.build(name), round_)
    assert random.getstate() == before


@every_graph
def test_exactly_the_static_graphs_are_the_same_in_every_round(name):
    graph = GRAPHS.build(name)
    rounds = [_fitting(graph, round_) for round_ in range(20)]
    assert all(round_ == rounds[0] for round_ in rounds) == graph.static


# Given edges may be disconnected; gossip checks that.
@pytest.mark.parametrize("name", sorted({*GRAPHS.names()} - {"edges"}))
def test_graphs_connect_all_workers_over_several_rounds(name):
    graph = GRAPHS.build(name)
    for at, neighbours in enumerate(_fitting(graph)):
        workers = len(neighbours)
        rounds = [neighbours] if graph.static else [_fitting(graph, round_)[at] for round_ in range(40)]
        over_time = tuple(
            tuple({other for round_ in rounds for other in round_[rank]}) for rank in range(workers)
        )
        assert reachable(over_time) == set(range(workers))
