"""Which of several values is right."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from echelon.config.allowed import allow_names_in
from echelon.errors import ConfigError
from echelon.verify.checksums import checksum, state_checksum
from echelon.verify.replica_choice import NOBODY, Choice, by_checksum, by_functions, named
from echelon.verify.vote import vote


@given(st.lists(st.integers(0, 3), min_size=1, max_size=9))
def test_a_majority_is_more_than_half_and_the_others_have_other_values(values):
    outcome = vote(values)
    right = values[outcome.source]
    assert {i for i, value in enumerate(values) if value != right} == set(outcome.others)
    assert outcome.majority == (2 * values.count(right) > len(values))
    assert all(values.count(right) >= values.count(other) for other in values)


def test_of_equally_common_values_the_first_members_is_taken():
    assert vote([7, 5, 5, 7]).source == 0
    assert not vote([7, 5]).majority


def test_checksums_differ_in_one_bit_of_a_weight_or_a_state():
    one, other = torch.zeros(9), torch.zeros(9)
    assert checksum(one) == checksum(other)
    state = {"step": torch.tensor(3.0), "exp_avg": one}
    assert state_checksum(state) == state_checksum({"exp_avg": other, "step": torch.tensor(3.0)})
    other.view(torch.int32)[4] = 1
    assert checksum(one) != checksum(other)
    assert state_checksum(state) != state_checksum({**state, "exp_avg": other})
    assert checksum(None) == state_checksum({}) == 0


def _replicas(*values: float) -> list[dict[str, torch.Tensor]]:
    return [{"weight": torch.tensor([value])} for value in values]


def _below_ten(replicas):
    return [i for i, one in enumerate(replicas) if float(one["weight"]) < 10]


def test_replicas_are_chosen_by_majority_or_by_the_users_functions():
    assert by_checksum([1, 2, 1]) == Choice(0, (1,))
    assert by_checksum([1, 2]).used == NOBODY
    three = _replicas(99, 1, 2)
    assert by_functions(three, _below_ten, None) == Choice(1, (0,))
    assert by_functions(three, _below_ten, lambda _, passing: passing[-1]) == Choice(2, (0,))
    assert by_functions(three, None, lambda _, passing: passing[0]) == Choice(0, ())
    assert by_functions(_replicas(99, 98), _below_ten, None).used == NOBODY


@pytest.mark.parametrize(
    ("consensus", "validate", "text"),
    [(lambda _: [5], None, "consensus returned"), (_below_ten, lambda *_: 0, "validate returned 0")],
)
def test_a_function_that_names_no_replica_is_refused(consensus, validate, text):
    with pytest.raises(ConfigError, match=text):
        by_functions(_replicas(99, 1, 2), consensus, validate)


def test_a_function_is_imported_by_name_only_if_the_user_named_it():
    with pytest.raises(ConfigError, match="not imported"):
        named("shlex:join", "consensus")
    allow_names_in("replicate(consensus=shlex:split)")
    assert named("shlex:split", "consensus") is named("function(shlex:split)", "consensus") is not None
    assert named("", "validate") is None
    with pytest.raises(ConfigError, match="module:name"):
        named("nothing", "validate")
