"""Codec states: by parameter, in ranges, in checkpoints, and for other numbers of workers."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.codec.codec import CODECS, owners, seed_of
from echelon.reduce.encoded.states import States, for_rail, handed_over

RESIDUALS = {"residual", "velocity", "gathered"}


def states(codec="top-k"):
    return States(CODECS.build(codec))


def numbers(count, seed=0):
    return torch.randn(count, generator=torch.Generator().manual_seed(seed))


def test_a_parameter_begins_with_a_fresh_state_and_keeps_it():
    kept = states()
    state = kept.of("weight", 5)
    assert state["residual"].tolist() == [0.0] * 5
    state["residual"] += 1
    assert kept.of("weight", 5) is state
    assert kept.of("bias", 5)["residual"].tolist() == [0.0] * 5


def test_a_pieces_state_is_a_view_of_its_range():
    kept = states()
    kept.slice("weight", 6, 2, 5)["residual"].add_(1)
    assert kept.of("weight", 6)["residual"].tolist() == [0, 0, 1, 1, 1, 0]
    assert kept.slice("weight", 6, 0, 6) is kept.of("weight", 6)


@pytest.mark.parametrize("length", [1, 4])
def test_counts_are_the_whole_parameters_even_where_they_are_as_many_as_its_elements(length):
    """The tally of dynamic-fixed has four numbers, its exponent one."""
    kept = states("dynamic-fixed")
    empty = kept.slice("weight", length, 0, 0)
    assert len(empty["residual"]) == 0
    for key in ("exponent", "tally", "saturated"):
        assert empty[key] is kept.of("weight", length)[key]


def test_rounds_are_counted_by_parameter():
    kept = states()
    for name in ("weight", "weight", "bias"):
        kept.count(name)
    assert [kept.step(name) for name in ("weight", "bias", "other")] == [2, 1, 0]


@pytest.mark.parametrize("codec", ["top-k", "dgc", "dynamic-fixed", "fp16"])
def test_saved_states_are_loaded_and_share_no_memory(codec):
    kept, other = states(codec), states(codec)
    kept.of("weight", 3)
    kept.count("weight")
    saved = kept.save()
    other.of("else", 2)
    other.load(saved)
    assert other.step("weight") == 1
    assert other.step("else") == 0
    assert other.of("weight", 3).keys() == kept.of("weight", 3).keys()
    for one in (kept, other):
        for value in one.of("weight", 3).values():
            value += 7
    for value in (value for key, value in saved["weight"].items() if key != "steps"):
        assert not (value == 7).any(), "it was copied on both ways"


def test_loading_replaces_all_earlier_states():
    kept = states()
    kept.of("weight", 3)["residual"] += 1
    kept.count("weight")
    kept.load({})
    assert kept.step("weight") == 0
    assert not kept.of("weight", 3)["residual"].any()


def test_a_parameter_that_went_through_rounds_without_a_state_keeps_its_count_only():
    kept, other = states("fp16"), states("fp16")
    kept.count("weight")
    other.load(kept.save())
    assert other.step("weight") == 1
    assert other.of("weight", 3) == {}


def test_saturated_values_and_the_norm_of_residuals_are_counted():
    kept = states("dynamic-fixed")
    kept.of("quiet", 2)
    kept.of("loud", 2)["saturated"] += 5
    assert kept.saturated() == {"loud": 5}
    assert kept.left_over() == 0.0
    kept.of("loud", 2)["residual"].copy_(torch.tensor([3.0, 0.0]))
    kept.of("quiet", 2)["residual"].copy_(torch.tensor([0.0, 4.0]))
    assert kept.left_over() == pytest.approx(5.0)


def saved_by(workers, codec="dgc(warmup=2)", lengths=(7, 3000)):
    """The saved states of so many workers, each with other numbers."""
    out = []
    for rank in range(workers):
        mine = states(codec)
        for length in lengths:
            name = f"p{length}"
            for at, value in enumerate(mine.of(name, length).values()):
                if value.dtype == torch.float32:
                    value.copy_(numbers(length, 10 * rank + at))
            for _ in range(4):
                mine.count(name)
        out.append(mine.save())
    return out


def total(saved, name, key):
    return sum(one[name][key].double() for one in saved if name in one)


@given(before=st.integers(1, 6), after=st.integers(1, 6))
@settings(max_examples=40, deadline=None)
def test_other_numbers_of_workers_keep_the_sum_of_residuals(before, after):
    saved = saved_by(before)
    shares = handed_over(saved, after)
    assert len(shares) == after
    for name in saved[0]:
        for key in saved[0][name].keys() & RESIDUALS:
            torch.testing.assert_close(
                total(shares, name, key), total(saved, name, key), rtol=1e-5, atol=1e-5
            )
        assert all(int(one[name]["steps"]) == 4 for one in shares)


def test_same_number_of_workers_gets_back_the_same_states():
    saved = saved_by(3)
    assert all(one is other for one, other in zip(handed_over(saved, 3), saved, strict=True))


def test_state_of_a_parameter_that_only_some_workers_have_is_redistributed():
    first, second = saved_by(1, lengths=(7,)), saved_by(1, lengths=(7, 5))
    shares = handed_over([*first, *second], 3)
    torch.testing.assert_close(total(shares, "p5", "gathered"), total(second, "p5", "gathered"))


@given(before=st.integers(1, 5), sites=st.integers(2, 4), rails=st.integers(1, 3))
@settings(max_examples=40, deadline=None)
def test_rails_keep_the_sum_of_residuals_each_only_for_its_own_ranges(before, sites, rails):
    saved = saved_by(before)
    shares = [for_rail(saved, sites, rails, rail) for _ in range(sites) for rail in range(rails)]
    for name in saved[0]:
        for key in saved[0][name].keys() & RESIDUALS:
            torch.testing.assert_close(
                total(shares, name, key), total(saved, name, key), rtol=1e-5, atol=1e-5
            )
            for at, share in enumerate(shares):
                rest = share[name][key].clone()
                rest[slice(*owners(len(rest), rails, seed_of(name))[at % rails])] = 0
                assert not rest.any()
        assert all(int(one[name]["steps"]) == 4 for one in shares)
