"""Every registered policy that a server carries out keeps the contract in `sync/families/serve.py`.

`arrivals.play` refuses rules that settle a push twice or never, answer an arrival twice or never, or leave
workers waiting when no other worker will arrive. Hypothesis draws the workers' times, and when they leave
and join.
"""

from __future__ import annotations

import dataclasses
import inspect
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arrivals import Away, decided, play
from echelon.config.registry import options_of
from echelon.errors import ConfigError, UnknownName
from echelon.sync.families.serve import Apply, Drop, ServePolicy
from echelon.sync.policy import POLICIES, ClusterInfo

# More options to test than the defaults. A policy needs no entry here to be tested.
MORE = {
    "backup": ["backup(0)", "backup(3)"],
    "bounded-delay": ["bounded-delay(0)", "bounded-delay(3, scale=sum)"],
    "delay-compensated": ["delay-compensated(adaptive=true)"],
    "downpour": ["downpour(1, 3)"],
    "smooth-switch": [
        "smooth-switch(step=3)",
        "smooth-switch(step=3, waiting=true)",
        "smooth-switch(start=3, waiting=true, combine=sum)",
        "smooth-switch(step_over_lr=0.5)",
        "smooth-switch(threshold=noise(warmup=2))",
        "smooth-switch(threshold=exponential(4), waiting=true)",
        "smooth-switch(threshold=sigmoid(10, 3))",
    ],
}
# Values for options without a default, by type.
ORDINARY = {"int": "1", "float": "0.5", "bool": "true"}


def _with_defaults(name):
    required = [option for option in options_of(POLICIES.get(name)) if option.required]
    given = [f"{o.name}={ORDINARY.get(o.type, o.type.partition(' | ')[0])}" for o in required]
    return f"{name}({', '.join(given)})" if given else name


def _served():
    every = [text for name in POLICIES.names() for text in (_with_defaults(name), *MORE.get(name, []))]
    return [text for text in every if isinstance(POLICIES.build(text).resolved(), ServePolicy)]


def _cluster(workers, **more):
    return ClusterInfo(
        workers=workers,
        servers=1,
        shares=tuple(1 / workers for _ in range(workers)),
        speeds=tuple(1.0 + n for n in range(workers)),
        links=tuple(1e8 / (1 + n) for n in range(workers)),
        lr=0.1,
        **more,
    )


def _clusters(text):
    """The clusters of up to six workers that the policy accepts."""
    accepted = []
    for workers in range(1, 7):
        cluster = _cluster(workers)
        try:
            POLICIES.build(text).check(cluster)
        except ConfigError:
            continue
        accepted.append(cluster)
    assert accepted, f"{text} accepts no cluster of up to six workers"
    return accepted


every_policy = pytest.mark.parametrize("text", _served())
computing = st.integers(1, 6).map(float)
away = st.builds(Away, st.integers(0, 8).map(float))
programme = st.lists(st.one_of(computing, computing, computing, away), max_size=12)


@st.composite
def scenes(draw, text):
    """A cluster, and the programme of each worker."""
    cluster = draw(st.sampled_from(_clusters(text)))
    per_worker = {"min_size": cluster.workers, "max_size": cluster.workers}
    return cluster, {
        "programmes": draw(st.lists(programme, **per_worker)),
        "samples": draw(st.lists(st.integers(1, 64).map(float), **per_worker)),
        "transfer_s": draw(st.lists(st.sampled_from([0.0, 0.5, 3.0]), **per_worker)),
        "seed": draw(st.integers(0, 3)),
    }


def test_the_documented_server_policies_are_registered():
    promised = {"async", "backup", "bounded-delay", "delay-compensated", "downpour", "smooth-switch"}
    assert promised <= {text.partition("(")[0] for text in _served()}


@every_policy
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_every_push_is_settled_once_and_every_arrival_answered_once_for_any_order(text, data):
    cluster, scene = data.draw(scenes(text))
    story = play(POLICIES.build(text).resolved(), cluster, **scene)
    pushed = {(t.worker, t.arrival.step) for t in story if t.arrival and t.arrival.kind != "ask"}
    applied = [(part.worker, part.step) for apply in decided(story, Apply) for part in apply.parts]
    dropped = [(drop.worker, drop.step) for drop in decided(story, Drop)]
    assert sorted([*applied, *dropped]) == sorted(pushed)


@every_policy
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_the_same_arrivals_lead_to_the_same_decisions(text, data):
    cluster, scene = data.draw(scenes(text))
    policy = POLICIES.build(text).resolved()
    story = play(policy, cluster, **scene)
    assert play(policy, cluster, **scene) == story  # each rule starts afresh: the policy keeps no state
    assert play(POLICIES.build(text).resolved(), cluster, **scene) == story


@every_policy
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_weights_of_pushes_and_plotted_numbers_are_finite(text, data):
    cluster, scene = data.draw(scenes(text))
    story = play(POLICIES.build(text).resolved(), cluster, **scene)
    parts = [part for apply in decided(story, Apply) for part in apply.parts]
    assert all(math.isfinite(part.weight) and part.weight > 0 for part in parts)
    assert all(math.isfinite(number) for told in story for number in told.state.values())


@every_policy
def test_a_cluster_without_a_server_is_refused_and_the_fix_names_the_option(text):
    cluster = dataclasses.replace(_clusters(text)[-1], servers=0)
    with pytest.raises(ConfigError) as caught:
        POLICIES.build(text).check(cluster)
    assert "--servers" in caught.value.fix


@every_policy
def test_a_policy_is_a_frozen_value_with_a_help_line(text):
    policy = POLICIES.build(text)
    assert policy == POLICIES.build(text)
    assert hash(policy) == hash(POLICIES.build(text))
    assert (inspect.getdoc(type(policy)) or "").partition("\n")[0].endswith(".")
    assert policy.resolved().push_every >= 1
    assert policy.resolved().pull_every >= 1


@pytest.mark.parametrize("name", [name for name in POLICIES.names() if options_of(POLICIES.get(name))])
def test_a_misspelled_option_names_the_nearest_one(name):
    option = options_of(POLICIES.get(name))[0].name
    with pytest.raises(UnknownName) as caught:
        POLICIES.build(f"{name}({option}x=1)")
    assert caught.value.nearest == option
