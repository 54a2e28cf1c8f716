import math

import pytest

from echelon.errors import ConfigError
from echelon.sync.graph import GRAPHS, metropolis, reachable, spectral_gap


def _neighbours(text: str, workers: int, turn: int = 0) -> tuple[tuple[int, ...], ...]:
    return GRAPHS.build(text).neighbours(workers, turn)


def test_a_ring_closes():
    assert _neighbours("ring", 4) == ((1, 3), (0, 2), (1, 3), (0, 2))
    assert _neighbours("ring", 2) == ((1,), (0,))


def test_a_torus_closes_in_both_directions():
    assert _neighbours("torus(rows=3)", 12)[0] == (1, 3, 4, 8)
    assert _neighbours("torus(rows=3)", 12)[11] == (3, 7, 8, 10)


def test_a_torus_is_as_square_as_it_can_be():
    assert _neighbours("torus", 12) == _neighbours("torus(rows=3)", 12)
    assert _neighbours("torus", 7) == _neighbours("ring", 7)


@pytest.mark.parametrize("seed", range(8))
def test_a_random_graph_has_the_degree_that_was_asked_for_or_a_little_less(seed):
    counts = [len(others) for others in _neighbours(f"random(degree=4, seed={seed})", 40)]
    assert min(counts) >= 2
    assert max(counts) <= 4
    assert sum(counts) > 3.5 * 40


def test_another_seed_draws_another_graph():
    assert _neighbours("random(seed=1)", 12) != _neighbours("random(seed=2)", 12)
    assert _neighbours("matching(seed=1)", 12) != _neighbours("matching(seed=2)", 12)


def test_pairs_leave_one_over_only_if_they_must():
    assert [len(others) for others in _neighbours("matching", 6)] == [1] * 6
    assert sorted(len(others) for others in _neighbours("matching", 5)) == [0, 1, 1, 1, 1]


def test_given_pairs_join_in_both_directions_and_once():
    assert _neighbours('edges("2-0,0-1, 1-0")', 3) == ((1, 2), (0,), (0,))


@pytest.mark.parametrize("pairs", ["", "0", "0-1,", "0-1-2", "a-b", "-1-2", "0 - x"])
def test_what_is_no_pair_is_refused(pairs):
    with pytest.raises(ConfigError, match="is no pair of workers"):
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


def test_weights_go_by_the_larger_degree():
    star = _neighbours('edges("0-1, 0-2, 0-3, 2-3")', 4)
    assert metropolis(star) == [
        pytest.approx({0: 1 / 4, 1: 1 / 4, 2: 1 / 4, 3: 1 / 4}),
        pytest.approx({0: 1 / 4, 1: 3 / 4}),
        pytest.approx({0: 1 / 4, 2: 1 - 1 / 4 - 1 / 3, 3: 1 / 3}),
        pytest.approx({0: 1 / 4, 2: 1 / 3, 3: 1 - 1 / 4 - 1 / 3}),
    ]


@pytest.mark.parametrize("workers", [3, 4, 7, 12])
def test_the_gap_of_a_ring_is_what_theory_says(workers):
    sizes = [abs(1 + 2 * math.cos(2 * math.pi * k / workers)) / 3 for k in range(1, workers)]
    assert spectral_gap(metropolis(_neighbours("ring", workers))) == pytest.approx(1 - max(sizes))


def test_the_gap_is_one_where_one_turn_gives_the_mean_and_zero_where_no_number_of_turns_does():
    assert spectral_gap(metropolis(_neighbours("complete", 6))) == pytest.approx(1)
    assert spectral_gap(metropolis(_neighbours('edges("0-1, 2-3")', 4))) == pytest.approx(0)
    assert spectral_gap(metropolis(((),))) == 1


def test_many_workers_mix_faster_at_random_than_on_a_torus_and_slowest_on_a_ring():
    ring, torus, drawn = (
        spectral_gap(metropolis(_neighbours(text, 64))) for text in ("ring", "torus", "random(degree=4)")
    )
    assert ring < torus < drawn


def test_who_can_be_reached_is_found_over_others():
    neighbours = _neighbours('edges("0-1, 1-2, 3-4")', 5)
    assert reachable(neighbours) == {0, 1, 2}
    assert reachable(neighbours, 4) == {3, 4}
