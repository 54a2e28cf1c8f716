"""The cost model of layouts: what makes which layout best, memory as a hard limit, and its invariants."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echelon.errors import PlanError
from echelon.parallel.candidates import candidate_layouts
from echelon.parallel.layout import parse_layout
from echelon.parallel.layout_cost import ExchangeCost, LayoutJob, layout_cost, ranked_layouts
from echelon.parallel.memory import ModelBytes, missing_memory

MB = 1e6


def link(workers: int, rate: float, latency_s: float = 1e-4, hides: bool = True) -> ExchangeCost:
    pairs = [(one, other) for one in range(workers) for other in range(workers) if one != other]
    return ExchangeCost(
        latency_s=dict.fromkeys(pairs, latency_s),
        bytes_per_s=dict.fromkeys(pairs, rate),
        reduce_latency_s=2 * latency_s,
        reduce_bytes_per_s=rate * workers / (2 * (workers - 1)) if workers > 1 else rate,
        hides=hides,
    )


def job(
    workers: int = 4,
    *,
    layers: int = 8,
    sample_s: float = 1e-4,
    trained: float = 1 * MB,
    yielded: float = 1e3,
    rate: float = 100 * MB,
    room: float = 1e12,
    batch: int = 64,
    exchange: ExchangeCost | None = None,
) -> LayoutJob:
    total = trained * layers
    return LayoutJob(
        batch=batch,
        fixed_s=[[1e-5] * layers] * workers,
        sample_s=[[sample_s / layers] * layers] * workers,
        trained_bytes=[trained] * layers,
        yielded_bytes=[yielded] * layers,
        apply_s=1e-4,
        model=ModelBytes(parameters=total, trained=total, states=2 * total, largest=trained),
        rooms=[room] * workers,
        exchange=exchange or link(workers, rate),
    )


def best(found: LayoutJob) -> str:
    return ranked_layouts(candidate_layouts(found.workers), found).costs[0].text


def test_small_models_with_much_computing_take_data_parallelism():
    assert best(job(sample_s=1e-2, trained=1e3)) == "data"


def test_shards_cost_what_memory_that_is_not_shared_costs():
    usual = link(4, 100 * MB, hides=False)
    fields = {name: getattr(usual, name) for name in ExchangeCost.__dataclass_fields__}
    fast = ExchangeCost(**fields | {"slices_bytes_per_s": usual.reduce_bytes_per_s / 4})
    same, slower = (layout_cost("sharded(level=2)", job(exchange=one)) for one in (usual, fast))
    assert slower.step_s > 2 * same.step_s
    assert layout_cost("data", job(exchange=fast)) == layout_cost("data", job(exchange=usual))


def test_large_models_on_thin_links_take_a_pipeline():
    assert best(job(trained=20 * MB, yielded=100.0)).startswith("pipeline(stages=4")


def test_a_pipeline_inside_a_site_and_data_between_or_the_other_way_round_follows_the_links():
    inside = {(0, 1), (1, 0), (2, 3), (3, 2)}
    pairs = [(one, other) for one in range(4) for other in range(4) if one != other]
    rates = {pair: 1000 * MB if pair in inside else 20 * MB for pair in pairs}
    exchange = ExchangeCost(
        latency_s=dict.fromkeys(pairs, 1e-4),
        bytes_per_s=rates,
        reduce_latency_s=1e-3,
        reduce_bytes_per_s=10 * MB,
        hides=True,
    )
    inner, outer = (
        text for text in candidate_layouts(4, predicted=False) if text.count("data") and "*" in text
    )
    assert inner.endswith("* data")
    assert outer.startswith("data *")
    # Activations are larger than gradients: stages go over the fast links. And the reverse.
    wide = job(trained=1e4, yielded=1 * MB, exchange=exchange)
    assert layout_cost(inner, wide).step_s < layout_cost(outer, wide).step_s
    heavy = job(trained=20 * MB, yielded=10.0, exchange=exchange)
    assert layout_cost(outer, heavy).step_s < layout_cost(inner, heavy).step_s


def test_the_order_of_listing_changes_no_prediction_where_neighbours_are_known():
    pairs = [(one, other) for one in range(4) for other in range(4) if one != other]
    found = []
    for sites, order in (("aabb", ()), ("abab", (0, 2, 1, 3))):
        rates = {(a, b): 1000 * MB if sites[a] == sites[b] else 20 * MB for a, b in pairs}
        one = replace(link(4, 20 * MB), bytes_per_s=rates)
        found.append(replace(job(yielded=1e5, exchange=one), order=order))
    for text in candidate_layouts(4):
        assert layout_cost(text, found[0]) == layout_cost(text, found[1])
    listed = replace(found[1], order=())
    inner = next(text for text in candidate_layouts(4) if text.endswith("* data"))
    assert layout_cost(inner, listed) != layout_cost(inner, found[0])


def test_what_does_not_fit_is_left_out_with_what_is_missing():
    tight = job(trained=10 * MB, room=200 * MB)  # 80 MB of parameters, 320 MB in all
    found = ranked_layouts(candidate_layouts(4), tight)
    assert "of memory are missing on rank 0" in found.left_out["data"]
    assert all(one.text != "data" for one in found.costs)
    assert any(one.text.startswith("pipeline(stages=4") for one in found.costs)
    with pytest.raises(PlanError, match="missing"):
        layout_cost("data", tight)


def test_activations_of_a_share_count():
    assert layout_cost("data", job(room=40 * MB)).step_s > 0
    with pytest.raises(PlanError, match="missing"):
        layout_cost("data", job(room=40 * MB, yielded=1 * MB))


def test_the_best_schedule_of_each_layout_is_tried_before_others():
    found = ranked_layouts(candidate_layouts(4), job(trained=0.5 * MB, yielded=100.0, sample_s=2e-3))
    first = found.worth_trying[0]
    assert first == found.costs[0].text
    assert first.startswith("pipeline(stages=4, schedule=filled")
    assert not any(text.startswith("pipeline(stages=4") for text in found.worth_trying[1:3])


def test_stages_in_shards_fit_where_whole_stages_do_not():
    tight = job(trained=10 * MB, room=130 * MB)
    found = ranked_layouts(candidate_layouts(4), tight)
    assert any("* data" in text for text in found.left_out)
    assert any("* sharded" in one.text for one in found.costs)


def test_hopeless_layouts_are_not_worth_trying():
    found = ranked_layouts(
        candidate_layouts(4), job(sample_s=1e-2, trained=1e3, yielded=1 * MB, rate=1 * MB)
    )
    assert found.worth_trying[0] == "data"
    assert len(found.worth_trying) < len(found.costs)


rates = st.floats(1e5, 1e10)


@st.composite
def jobs(draw: st.DrawFn) -> LayoutJob:
    workers, layers = draw(st.integers(2, 6)), draw(st.integers(1, 6))
    per_layer = st.lists(st.floats(1e-6, 1e-2), min_size=layers, max_size=layers)
    per_worker = st.lists(per_layer, min_size=workers, max_size=workers)
    sizes = st.lists(st.floats(0, 1e7), min_size=layers, max_size=layers)
    trained = draw(sizes)
    total = sum(trained)
    return LayoutJob(
        batch=draw(st.integers(workers, 256)),
        fixed_s=draw(per_worker),
        sample_s=draw(per_worker),
        trained_bytes=trained,
        yielded_bytes=draw(sizes),
        apply_s=draw(st.floats(0, 1e-2)),
        model=ModelBytes(parameters=total, trained=total, states=2 * total, largest=max(trained)),
        rooms=draw(st.lists(st.floats(1e5, 1e9), min_size=workers, max_size=workers)),
        exchange=link(workers, draw(rates), draw(st.floats(1e-6, 1e-2)), draw(st.booleans())),
    )


@given(jobs())
def test_no_layout_that_is_ranked_exceeds_any_workers_memory(found):
    texts = candidate_layouts(found.workers)
    ranked = ranked_layouts(texts, found)
    for one in ranked.costs:
        assert missing_memory(parse_layout(one.text), found.model, found.rooms) is None
        assert one.step_s >= 0
    assert {one.text for one in ranked.costs} | set(ranked.left_out) == set(texts)


@given(jobs())
def test_the_best_is_the_shortest_of_all_or_simpler_and_nearly_as_short(found):
    ranked = ranked_layouts(candidate_layouts(found.workers), found)
    if ranked.costs:
        shortest = min(one.step_s for one in ranked.costs)
        assert ranked.costs[0].step_s * 0.97 <= shortest * (1 + 1e-9)


@given(jobs())
def test_the_cuts_of_a_pipeline_are_the_best_of_all_cuts_that_fit(found):
    """Without wires, by trying every cut of two stages over the first two workers."""
    found = LayoutJob(
        **{name: getattr(found, name) for name in LayoutJob.__dataclass_fields__}
        | {"rooms": found.rooms[:2], "exchange": link(2, 1e30, 0.0, hides=True)}
    )
    micro = min(8, found.batch)
    samples = found.batch / micro
    copies = found.model.total / max(1.0, sum(found.trained_bytes))

    def took(edges: tuple[int, ...]) -> float:
        stages = []
        for rank, (begin, end) in enumerate(pairwise(edges)):
            size = sum(
                copies * found.trained_bytes[at] + min(micro, 4) * samples * found.yielded_bytes[at]
                for at in range(begin, end)
            )
            if size > found.rooms[rank]:
                return float("inf")
            stages.append(sum(found.times_s(rank, samples)[begin:end]))
        return sum(stages) + (micro - 1) * max(stages)

    every = [took((0, *cut, found.layers)) for cut in combinations(range(1, found.layers), 1)]
    shortest = min(every, default=float("inf"))
    try:
        cost = layout_cost("pipeline(stages=2, schedule=1f1b, micro=8)", found)
    except PlanError:
        assert shortest == float("inf")
    else:
        assert cost.compute_s == pytest.approx(min(shortest, cost.step_s), rel=1e-6)


def test_chunks_shorten_the_bubbles_on_fast_links_and_lengthen_a_step_on_thin_ones():
    plain, chunks = (
        f"pipeline(stages=4, schedule={schedule}, micro=4)"
        for schedule in ("1f1b", "interleaved, chunks=2")
    )
    fast, thin = (
        job(layers=16, rate=1e4 * MB, exchange=link(4, 1e4 * MB, 1e-6)),
        job(layers=16, yielded=1e5),
    )
    assert layout_cost(chunks, fast).step_s < 0.9 * layout_cost(plain, fast).step_s
    assert layout_cost(chunks, thin).step_s > layout_cost(plain, thin).step_s
    assert any("interleaved" in text for text in candidate_layouts(4))


def test_more_chunks_than_layers_are_left_out_with_the_reason():
    with pytest.raises(PlanError, match="6 layers are too few"):
        layout_cost("pipeline(stages=4, schedule=interleaved, chunks=2, micro=8)", job(layers=6))
