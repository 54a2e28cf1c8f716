import math

import pytest

from echelon.errors import ConfigError
from echelon.sync.graph import GRAPHS, reachable, without
from spectral import metropolis, spectral_gap


def _neighbours(text: str, workers: int, round_: int = 0) -> tuple[tuple[int, ...], ...]:
    return GRAPHS.build(text).neighbours(workers, round_)


def test_a_ring_closes():
    assert _neighbours("ring", 4) == ((1, 3), (0, 2), (1, 3), (0, 2))
    assert _neighbours("ring", 2) == ((1,), (0,))


@pytest.mark.parametrize(
    "text", ["ring", "torus(rows=2)", "random(seed=3)", 'edges("0-1, 0-2, 0-3, 3-4, 4-5")']
)
def test_a_graph_closes_around_workers_that_are_lost(text):
    whole = _neighbours(text, 6)
    for lost in ({0}, {0, 3}, {1, 4, 5}):
        left = set(range(6)) - lost
        closed = without(whole, lost)
        assert reachable(closed, min(left)) == left
        assert all(one in closed[other] for one in left for other in closed[one])
        assert not any(closed[one] for one in lost)
    assert without(_neighbours("ring", 4), {1}) == ((2, 3), (), (0, 3), (0, 2))


def test_a_torus_closes_in_both_directions():
    assert _neighbours("torus(rows=3)", 12)[0] == (1, 3, 4, 8)
    assert _neighbours("torus(rows=3)", 12)[11] == (3, 7, 8, 10)


def test_a_torus_is_as_square_as_possible():
    assert _neighbours("torus", 12) == _neighbours("torus(rows=3)", 12)
    assert _neighbours("torus", 7) == _neighbours("ring", 7)


@pytest.mark.parametrize("seed", range(8))
def test_a_random_graph_has_about_the_given_degree(seed):
    counts = [len(others) for others in _neighbours(f"random(degree=4, seed={seed})", 40)]
    assert min(counts) >= 2
    assert max(counts) <= 4
    assert sum(counts) > 3.5 * 40


def test_another_seed_draws_another_graph():
    assert _neighbours("random(seed=1)", 12) != _neighbours("random(seed=2)", 12)
    assert _neighbours("matching(seed=1)", 12) != _neighbours("matching(seed=2)", 12)


def test_matching_leaves_one_worker_over_only_if_their_number_is_odd():
    assert [len(others) for others in _neighbours("matching", 6)] == [1] * 6
    assert sorted(len(others) for others in _neighbours("matching", 5)) == [0, 1, 1, 1, 1]


def test_given_pairs_are_undirected_and_count_once():
    assert _neighbours('edges("2-0,0-1, 1-0")', 3) == ((1, 2), (0,), (0,))


@pytest.mark.parametrize("pairs", ["", "0", "0-1,", "0-1-2", "a-b", "-1-2", "0 - x"])
def test_text_that_is_not_a_pair_is_refused(pairs):
    with pytest.raises(ConfigError, match="is not a pair of workers"):
        GRAPHS.build(f'edges("{pairs}")')


def test_a_pair_of_a_worker_with_itself_is_refused():
    with pytest.raises(ConfigError, match="joins worker 2 with itself"):
        GRAPHS.build('edges("0-1, 2-2")')


def test_rows_that_do_not_divide_the_workers_are_refused_with_those_that_do():
    with pytest.raises(ConfigError, match="do not fill") as caught:
        _neighbours("torus(rows=5)", 12)
    assert "1, 2, 3, 4, 6, 12" in caught.value.fix
    with pytest.raises(ConfigError, match="cannot have 0 rows"):
        GRAPHS.build("torus(rows=0)")


def test_metropolis_weights_use_the_larger_degree():
    star = _neighbours('edges("0-1, 0-2, 0-3, 2-3")', 4)
    assert metropolis(star) == [
        pytest.approx({0: 1 / 4, 1: 1 / 4, 2: 1 / 4, 3: 1 / 4}),
        pytest.approx({0: 1 / 4, 1: 3 / 4}),
        pytest.approx({0: 1 / 4, 2: 1 - 1 / 4 - 1 / 3, 3: 1 / 3}),
        pytest.approx({0: 1 / 4, 2: 1 / 3, 3: 1 - 1 / 4 - 1 / 3}),
    ]


@pytest.mark.parametrize("workers", [3, 4, 7, 12])
def test_the_spectral_gap_of_a_ring_is_that_of_theory(workers):
    sizes = [abs(1 + 2 * math.cos(2 * math.pi * k / workers)) / 3 for k in range(1, workers)]
    assert spectral_gap(_neighbours("ring", workers)) == pytest.approx(1 - max(sizes))


def test_the_spectral_gap_is_one_for_a_complete_graph_and_zero_for_a_disconnected_one():
    assert spectral_gap(_neighbours("complete", 6)) == pytest.approx(1)
    assert spectral_gap(_neighbours('edges("0-1, 2-3")', 4)) == pytest.approx(0)
    assert spectral_gap(((),)) == 1


def test_the_spectral_gap_grows_from_ring_to_torus_to_random_graph():
    ring, torus, drawn = (
        spectral_gap(_neighbours(text, 64)) for text in ("ring", "torus", "random(degree=4)")
    )
    assert ring < torus < drawn


def test_reachable_follows_neighbours_of_neighbours():
    neighbours = _neighbours('edges("0-1, 1-2, 3-4")', 5)
    assert reachable(neighbours) == {0, 1, 2}
    assert reachable(neighbours, 4) == {3, 4}
