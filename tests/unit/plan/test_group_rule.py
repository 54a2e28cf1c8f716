"""Groups that the user asks for: the rule as text, the groups, and a search that keeps to them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.errors import ConfigError
from echelon.plan.group_rule import GroupRule, groups_by_rule, parse_group_rule
from echelon.plan.job import ComputeCost, JobProfile, Layer
from echelon.plan.predict.predict import predict
from echelon.plan.search import search
from echelon.plan.topology import Node, Topology, Uplink
from echelon.plan.ways import SearchSpace

_JOB = JobProfile(
    name="job",
    batch=64,
    cost=ComputeCost(fixed_s=0.001, per_sample_s=0.01),
    layers=(Layer(name="all", size_bytes=400_000),),
)


def _topology(speeds, *, sites=1):
    nodes = tuple(
        Node(
            name=f"n{at}",
            site=f"s{at % sites}",
            speed=speed,
            up_bytes_per_s=1e8,
            down_bytes_per_s=1e8,
            latency_s=1e-4,
        )
        for at, speed in enumerate(speeds)
    )
    uplinks = tuple(Uplink(between=("s0", f"s{at}"), bytes_per_s=1e6) for at in range(1, sites))
    return Topology(nodes=nodes, uplinks=uplinks)


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("by-cost", GroupRule(name="by-cost")),
        ("equal-power", GroupRule(name="equal-power")),
        ("equal-power(3)", GroupRule(name="equal-power", number=3)),
        ("random(2, seed=7)", GroupRule(name="random", number=2, seed=7)),
        ("8", GroupRule(name="most", number=8)),
    ],
)
def test_a_rule_is_read_from_its_text(text, rule):
    assert parse_group_rule(text) == rule


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("equal-powr", "did you mean equal-power?"),
        ("by-cost(3)", "cannot be read"),
        ("random(a)", "cannot be read"),
        ("random(2, sed=1)", "cannot be read"),
        ("0", "number 0"),
    ],
)
def test_a_wrong_rule_is_named_with_the_way_out(text, words):
    with pytest.raises(ConfigError, match="--groups") as error:
        parse_group_rule(text)
    assert words in str(error.value)


def test_nodes_are_grouped_by_the_rule():
    topology = _topology([1.0, 1.0, 0.1, 0.1], sites=2)
    by_cost = groups_by_rule(parse_group_rule("by-cost"), topology, _JOB)
    assert by_cost.groups == (("n0",), ("n2",), ("n1",), ("n3",))  # by site, then by power
    equal = groups_by_rule(parse_group_rule("equal-power(2)"), topology, _JOB)
    assert {frozenset(group) for group in equal.groups} in (
        {frozenset({"n0", "n2"}), frozenset({"n1", "n3"})},
        {frozenset({"n0", "n3"}), frozenset({"n1", "n2"})},
    )
    with pytest.raises(ConfigError, match="4 nodes cannot form 5 groups"):
        groups_by_rule(parse_group_rule("random(5)"), topology)


@given(
    st.lists(st.sampled_from([0.1, 0.5, 1.0]), min_size=2, max_size=7),
    st.sampled_from(["by-cost", "equal-power(2)", "random(2, seed=3)", "3"]),
    st.booleans(),
)
@settings(max_examples=15, deadline=None)
def test_a_search_keeps_to_the_groups_that_were_asked_for(speeds, text, exact):
    topology = _topology(speeds, sites=2)
    groups = groups_by_rule(parse_group_rule(text), topology, _JOB).groups
    assert sorted(name for group in groups for name in group) == sorted(n.name for n in topology.nodes)
    allowed = SearchSpace(groups=groups, most_work=4000)
    for one in search(topology, _JOB, predict=predict, exact=exact, allowed=allowed).candidates:
        nodes = one.strategy.nodes
        kept = {frozenset(group) & frozenset(nodes) for group in groups} - {frozenset()}
        found = {frozenset(nodes[rank] for rank in group) for group in one.strategy.groups}
        if found:
            assert found == kept
        else:  # one group alone, or groups of one node each
            assert len(kept) == 1 or max(map(len, kept)) == 1
