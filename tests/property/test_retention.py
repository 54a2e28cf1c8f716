"""Which checkpoints stay, whatever was saved and measured."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echelon.checkpoint.retention import Best, kept
from echelon.errors import ConfigError

FIGURES = st.dictionaries(
    st.integers(0, 1000),
    st.dictionaries(st.sampled_from(["loss", "accuracy"]), st.floats(allow_infinity=True)),
)
RULES = st.sampled_from([None, "loss", "accuracy", "loss:max", "f1:min"])


def rule(text):
    return None if text is None else Best.parse(text, where="here")


@given(figures=FIGURES, keep=st.integers(1, 5), best=RULES)
def test_the_newest_stay_and_at_most_one_more_which_is_the_best(figures, keep, best):
    stay = kept(figures, keep=keep, best=rule(best))
    newest = set(sorted(figures)[-keep:])
    assert newest <= stay <= set(figures)
    assert len(stay) <= keep + 1
    for extra in stay - newest:
        one = rule(best)
        values = [found[one.figure] for found in figures.values() if one.figure in found]
        values = [value for value in values if not math.isnan(value)]
        assert figures[extra][one.figure] == (min if one.direction == "min" else max)(values)


@given(figures=FIGURES, keep=st.integers(1, 5), best=RULES)
def test_removing_the_others_changes_nothing_about_those_that_stay(figures, keep, best):
    stay = kept(figures, keep=keep, best=rule(best))
    assert kept({step: figures[step] for step in stay}, keep=keep, best=rule(best)) == stay


@given(figures=FIGURES, keep=st.integers(1, 5), best=RULES)
def test_the_best_so_far_is_there_as_long_as_nothing_is_better(figures, keep, best):
    """One checkpoint after the other, with removal after each, as a run does it."""
    there = {}
    for step in sorted(figures):
        there[step] = figures[step]
        there = {at: there[at] for at in kept(there, keep=keep, best=rule(best))}
        best_of_all = rule(best).step({at: figures[at] for at in figures if at <= step}) if best else None
        assert best_of_all is None or best_of_all in there


@pytest.mark.parametrize("text", ["", "f1", "loss:low", ":min", "loss:"])
def test_a_rule_that_does_not_say_what_is_best_is_refused(text):
    with pytest.raises(ConfigError, match="does not say which checkpoint is the best"):
        Best.parse(text, where="here")
