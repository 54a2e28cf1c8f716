"""Every registered graph of neighbours against its contract. A new one is tested by being added."""

from __future__ import annotations

import random

import pytest

from echelon.errors import ConfigError
from echelon.sync.graph import GRAPHS, Graph, Neighbourhood, reachable

every_graph = pytest.mark.parametrize("name", GRAPHS.names())


def _fitting(graph: Graph, turn: int = 0) -> list[Neighbourhood]:
    """The graph over 1 to 12 workers, of those numbers that it takes."""
    found = []
    for workers in range(1, 13):
        try:
            found.append(graph.neighbours(workers, turn))
        except ConfigError:
            continue
        assert len(found[-1]) == workers
    assert found, f"{graph} fits no number of workers from 1 to 12"
    return found


def test_the_graphs_of_the_project_are_registered():
    assert {"ring", "torus", "random", "complete", "matching", "edges"} <= set(GRAPHS.names())


@every_graph
@pytest.mark.parametrize("turn", [0, 1, 17])
def test_neighbours_are_mutual_others_and_in_order(name, turn):
    for neighbours in _fitting(GRAPHS.build(name), turn):
        for worker, others in enumerate(neighbours):
            assert worker not in others
            assert list(others) == sorted(set(others))
            assert all(worker in neighbours[other] for other in others)


@every_graph
def test_all_workers_draw_the_same_and_leave_the_global_generator_alone(name):
    before = random.getstate()
    for turn in range(5):
        assert _fitting(GRAPHS.build(name), turn) == _fitting(GRAPHS.build(name), turn)
    assert random.getstate() == before


@every_graph
def test_a_graph_that_says_it_lasts_is_the_same_at_every_turn_and_one_that_does_not_is_not(name):
    graph = GRAPHS.build(name)
    turns = [_fitting(graph, turn) for turn in range(20)]
    assert all(turn == turns[0] for turn in turns) == graph.lasting


# Whether given edges connect all is the user's doing, and for gossip to check.
@pytest.mark.parametrize("name", sorted({*GRAPHS.names()} - {"edges"}))
def test_over_time_something_known_to_one_worker_gets_to_all(name):
    graph = GRAPHS.build(name)
    for at, neighbours in enumerate(_fitting(graph)):
        workers = len(neighbours)
        turns = [neighbours] if graph.lasting else [_fitting(graph, turn)[at] for turn in range(40)]
        over_time = tuple(
            tuple({other for turn in turns for other in turn[rank]}) for rank in range(workers)
        )
        assert reachable(over_time) == set(range(workers))
