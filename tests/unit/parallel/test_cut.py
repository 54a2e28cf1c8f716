"""Cuts of a chain of layers: as good as the best of all possible ones, and within memory."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.errors import PlanError
from echelon.parallel import cut
from echelon.parallel.cut import ChainCost, best_chunk_cuts, best_cuts, wires_s


def took(cost: ChainCost, cuts: tuple[int, ...], micro: int) -> float:
    edges = [0, *cuts, cost.layers]
    stages = [
        sum(times[begin:end]) for times, begin, end in zip(cost.times_s, edges[:-1], edges[1:], strict=True)
    ]
    wires = [link[cut] for link, cut in zip(cost.wires_s, cuts, strict=False)]
    return sum(stages) + 2 * sum(wires) + (micro - 1) * max(*stages, *wires, 0.0)


@st.composite
def chains(draw):
    layers = draw(st.integers(1, 7))
    stages = draw(st.integers(1, min(4, layers)))
    seconds = st.integers(0, 20).map(float)
    base = draw(st.lists(seconds, min_size=layers, max_size=layers))
    speeds = draw(st.lists(st.sampled_from([1.0, 2.0, 4.0]), min_size=stages, max_size=stages))
    return ChainCost(
        times_s=[[one * speed for one in base] for speed in speeds],
        sizes_bytes=draw(st.lists(st.integers(1, 5).map(float), min_size=layers, max_size=layers)),
        limits_bytes=draw(st.sampled_from([(), tuple([9.0] * stages)])),
        wires_s=[
            draw(st.lists(seconds, min_size=layers, max_size=layers))
            for _ in range((stages - 1) * draw(st.booleans()))
        ],
    )


def fits(cost: ChainCost, cuts: tuple[int, ...]) -> bool:
    edges = [0, *cuts, cost.layers]
    return not cost.limits_bytes or all(
        sum(cost.sizes_bytes[begin:end]) <= limit
        for limit, begin, end in zip(cost.limits_bytes, edges[:-1], edges[1:], strict=True)
    )


@given(chains(), st.integers(1, 8))
@settings(max_examples=200)
def test_no_other_cut_is_faster(cost, micro):
    stages = len(cost.times_s)
    possible = [c for c in combinations(range(1, cost.layers), stages - 1) if fits(cost, c)]
    if not possible:
        with pytest.raises(PlanError):
            best_cuts(cost, micro)
        return
    found = best_cuts(cost, micro)
    assert fits(cost, found)
    best = min(took(cost, cuts, micro) for cuts in possible)
    assert took(cost, found, micro) == pytest.approx(best, rel=1e-9)


def test_a_slow_worker_gets_fewer_layers():
    cost = ChainCost(times_s=[[1.0] * 12, [3.0] * 12], sizes_bytes=[1.0] * 12)
    assert best_cuts(cost, 100) == (9,)


def test_a_thin_link_moves_the_cut_to_where_little_is_handed_over():
    times, sizes = [[1.0] * 6] * 2, [1.0] * 6
    handed_bytes = [9e6, 9e6, 9e6, 9e6, 0.5e6, 9e6]  # by layers 0 to 5
    thin = ChainCost(times_s=times, sizes_bytes=sizes, wires_s=wires_s([1e6], handed_bytes))
    assert best_cuts(ChainCost(times_s=times, sizes_bytes=sizes), 8) == (3,)
    assert best_cuts(thin, 8) == (5,)


def test_a_model_that_fits_nowhere_says_how_much_is_missing():
    cost = ChainCost(times_s=[[1.0] * 4] * 2, sizes_bytes=[2.0**20] * 4, limits_bytes=[2.0**20] * 2)
    with pytest.raises(PlanError, match=r"2\.0 MiB are missing"):
        best_cuts(cost, 4)


def test_no_stage_begins_with_a_closed_layer():
    cost = ChainCost(times_s=[[1.0] * 4] * 2, sizes_bytes=[1.0] * 4, closed=frozenset({2}))
    assert best_cuts(cost, 4) in ((1,), (3,))


def turns_took(cost: ChainCost, cuts: tuple[int, ...], micro: int, workers: int) -> float:
    edges = [0, *cuts, cost.layers]
    parts = [sum(cost.times_s[part][edges[part] : edges[part + 1]]) for part in range(len(edges) - 1)]
    return sum(parts) + (micro - 1) * max(sum(parts[worker::workers]) for worker in range(workers))


@st.composite
def turns(draw):
    workers, chunks = draw(st.sampled_from([(2, 2), (2, 3), (3, 2)]))
    layers = draw(st.integers(workers * chunks, 10))
    base = draw(st.lists(st.integers(1, 20).map(float), min_size=layers, max_size=layers))
    speeds = draw(st.lists(st.sampled_from([1.0, 2.0, 4.0]), min_size=workers, max_size=workers))
    rows = [[one * speed for one in base] for speed in speeds] * chunks
    room = draw(st.sampled_from([(), (6.0,) * workers * chunks]))
    return ChainCost(times_s=rows, sizes_bytes=[1.0] * layers, limits_bytes=room), workers


@given(turns(), st.integers(1, 8), st.booleans())
def test_chunks_that_take_turns_are_cut_as_well_as_possible_and_within_memory(job, micro, many):
    cost, workers = job
    possible = []
    for cuts in combinations(range(1, cost.layers), len(cost.times_s) - 1):
        edges = [0, *cuts, cost.layers]
        kept = [
            sum(edges[part + 1] - edges[part] for part in range(worker, len(edges) - 1, workers))
            for worker in range(workers)
        ]
        if not cost.limits_bytes or max(kept) <= 6:
            possible.append(cuts)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(cut, "_FEW", 0 if many else cut._FEW)  # as if there were many layers
        if not possible:
            with pytest.raises(PlanError):
                best_chunk_cuts(cost, micro, workers)
            return
        found = best_chunk_cuts(cost, micro, workers)
    assert found in possible
    best = min(turns_took(cost, cuts, micro, workers) for cuts in possible)
    assert turns_took(cost, found, micro, workers) <= (1.5 if many else 1 + 1e-9) * best


def test_a_slow_worker_gets_fewer_layers_in_all_its_chunks_together():
    rows = [[1.0] * 24, [3.0] * 24] * 2
    cost = ChainCost(times_s=rows, sizes_bytes=[1.0] * 24)
    first, second, third = best_chunk_cuts(cost, 100, 2)
    assert (first + third - second, second - first + 24 - third) == (18, 6)
