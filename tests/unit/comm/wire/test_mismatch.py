"""When it is certain that workers make different calls, and what to change."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echelon.comm.wire import doing
from echelon.comm.wire.doing import Doing
from echelon.comm.wire.mismatch import Facts, Stage, different_calls, fix, is_certain

APART = Facts(
    stage=Stage.NOT_BEGUN,
    required=True,
    lacking=True,
    may_begin=False,
    blocked=True,
    requires_me=True,
    begun_here=False,
    may_begin_here=False,
)
SAVE, BARRIER = Doing("in save()", "train.py:52"), Doing("in barrier()", "train.py:60")
FORWARD, BACKWARD = Doing(doing.IN_FORWARD, "net.py:9"), Doing(doing.IN_BACKWARD, "train.py:41")
STEP, PASS = Doing(doing.IN_STEP, "train.py:42"), Doing(doing.AT_PASS, "train.py:38")


def test_two_workers_that_wait_for_what_the_other_has_not_begun_make_different_calls():
    assert is_certain(APART)


@pytest.mark.parametrize(
    "fact",
    [
        {"stage": Stage.BEGUN},
        {"required": False},
        {"may_begin": True},
        {"blocked": False},
        {"requires_me": False},
        {"begun_here": True},
        {"may_begin_here": True},
    ],
    ids=lambda fact: next(iter(fact)),
)
def test_without_any_one_of_the_facts_it_is_not_certain(fact):
    assert not is_certain(replace(APART, **fact))


@given(flags=st.lists(st.booleans(), min_size=7, max_size=7))
def test_a_worker_that_is_over_with_an_operation_has_sent_all_of_it(flags):
    names = ["required", "lacking", "may_begin", "blocked", "requires_me", "begun_here", "may_begin_here"]
    facts = Facts(stage=Stage.OVER, **dict(zip(names, flags, strict=True)))
    assert is_certain(facts) == facts.lacking


@given(sent=st.integers(0, 4), order=st.permutations(["a", "b"]), data=st.data())
def test_workers_that_make_the_same_calls_are_never_accused(sent, order, data):
    """Each begins a prefix of one common order, and is blocked on the last that it began."""
    calls = [*order, *order[:sent]]
    mine, theirs = (data.draw(st.integers(1, len(calls))) for _ in range(2))
    facts = replace(
        APART,
        stage=Stage.NOT_BEGUN if theirs < mine else Stage.BEGUN,
        begun_here=theirs <= mine,
        blocked=theirs != mine,
    )
    assert not is_certain(facts)


@pytest.mark.parametrize(
    ("doings", "said"),
    [
        ({0: SAVE, 1: BACKWARD}, "all workers must call save(): move it out of `if session.is_leader`"),
        ({0: BACKWARD, 1: BARRIER}, "all workers must call barrier(): look for `break`"),
        ({0: SAVE, 1: SAVE, 2: BACKWARD}, "all workers must call save(): look for `break`"),
        ({0: SAVE, 1: BARRIER}, "all workers must make the same calls in the same order"),
        ({0: SAVE, 1: SAVE}, "all workers must make the same calls in the same order"),
        ({0: FORWARD, 1: BACKWARD}, "all workers must run this forward pass, in which BatchNorm"),
        ({0: BACKWARD, 1: STEP}, "all workers must make the same number of backward passes"),
        ({0: STEP, 1: BACKWARD, 2: BACKWARD}, "all workers must make the same number of backward passes"),
        ({0: PASS, 1: BACKWARD}, "all workers must loop over a prepared loader together"),
        ({0: BACKWARD, 1: PASS}, "all workers must make the same number of backward passes"),
        ({0: BACKWARD, 1: BACKWARD, 2: PASS}, "all workers must loop over a prepared loader together"),
        ({0: Doing(), 1: Doing()}, "all workers must make the same calls in the same order"),
    ],
)
def test_the_fix_is_about_the_call_that_only_some_make(doings, said):
    assert fix(doings).startswith(said)


def test_the_error_names_workers_and_machines():
    names = {0: "rank 0 on a", 1: "rank 1 on b"}
    error = different_calls(names, {0: SAVE, 1: BACKWARD})
    assert error.message == (
        "workers make different calls: rank 0 is in save() (train.py:52), "
        "rank 1 in a backward pass (train.py:41)"
    )
    assert error.where == "rank 0 on a, rank 1 on b"
    assert error.ranks == (0, 1)


def test_messages_of_different_sizes_in_the_same_call_are_of_different_tensors():
    names = {0: "rank 0 on a", 1: "rank 1 on b"}
    error = different_calls(names, {0: BARRIER, 1: BARRIER}, "rank 1 on b sent 8 bytes where 4 were due")
    assert error.message.endswith(
        "are in barrier() (train.py:60); rank 1 on b sent 8 bytes where 4 were due"
    )
    assert error.fix == "all workers must make the same calls with tensors of the same shape and type"
