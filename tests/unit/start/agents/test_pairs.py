"""What follows from attempts to connect: addresses that work, where workers meet, why a pair cannot."""

from __future__ import annotations

import pytest

from echelon.start.agents import pairs
from echelon.start.agents.driver import ConnectedAgent
from echelon.start.agents.pairs import Attempt
from echelon.start.agents.protocol import Introduction, ReachOutcome


def attempt(source, target, address, problem="", *, port=5, own=""):
    return Attempt(
        source=source, target=target, address=address, port=port, outcome=ReachOutcome(problem, own)
    )


def agent(node, addresses, machine="", network=""):
    said = Introduction(
        host=node,
        machine=machine or node,
        network=network or node,
        pid=1,
        cores=1,
        echelon="",
        python="",
        torch="",
        addresses=addresses,
    )
    return ConnectedAgent(node=node, channel=None, handle=None, introduction=said)


def test_all_machines_meet_at_one_address_if_all_reach_it():
    attempts = [
        attempt("b", "a", "10.1.0.1"),
        attempt("b", "a", "10.2.0.1"),
        attempt("c", "a", "10.1.0.1", "timeout"),
        attempt("c", "a", "10.2.0.1"),
    ]
    found = pairs.meeting_addresses("a", ["b", "c"], ["10.1.0.1", "10.2.0.1"], attempts)
    assert found == {"b": "10.2.0.1", "c": "10.2.0.1"}


def test_machines_without_a_common_address_meet_at_one_each_and_one_that_reaches_none_is_left_out():
    attempts = [
        attempt("b", "a", "10.1.0.1"),
        attempt("c", "a", "10.2.0.1"),
        attempt("d", "a", "10.2.0.1", "refused"),
    ]
    found = pairs.meeting_addresses("a", ["b", "c", "d"], ["10.1.0.1", "10.2.0.1"], attempts)
    assert found == {"b": "10.1.0.1", "c": "10.2.0.1"}


def test_an_address_works_only_if_all_its_ports_do():
    attempts = [
        attempt("b", "a", "10.1.0.1", port=29500),
        attempt("b", "a", "10.1.0.1", "timeout", port=40000),
        attempt("b", "a", "10.2.0.1", port=29500),
        attempt("b", "a", "10.2.0.1", port=40000),
    ]
    assert pairs.reached("b", "a", attempts) == ["10.2.0.1"]
    assert pairs.reached("a", "b", attempts) == []
    told = pairs.why_not("b", "a", attempts, 3)
    assert told.startswith("10.1.0.1 port 40000: no answer within 3 s")
    assert "29500" not in told


def test_workers_listen_first_where_they_leave_for_the_first_machine():
    attempts = [
        attempt("b", "a", "10.1.0.1", own="10.1.0.2"),
        attempt("b", "a", "10.2.0.1", own="10.2.0.2"),
    ]
    assert pairs.listens_at("b", "a", "10.2.0.1", attempts) == "10.2.0.2"


@pytest.mark.parametrize(
    ("other", "offered"),
    [
        (agent("b", ["10.1.0.2", "172.17.0.1"]), ["10.1.0.2"]),
        (agent("b", ["10.1.0.1", "172.17.0.1"], machine="a"), ["10.1.0.1", "172.17.0.1"]),
        (agent("b", ["10.1.0.1", "172.17.0.1"], network="a"), ["10.1.0.1", "172.17.0.1"]),
    ],
)
def test_an_address_that_both_machines_have_is_not_tried_unless_they_share_their_interfaces(other, offered):
    assert pairs.offered_to(agent("a", ["10.1.0.1", "172.17.0.1"]), other) == offered


@pytest.mark.parametrize(
    ("problem", "told"),
    [
        ("refused", "nothing listens there, or a firewall rejects it"),
        ("timeout", "no answer within 3 s: a firewall drops it"),
        ("no-route", "no route leads there"),
        ("Message too long", "Message too long"),
    ],
)
def test_the_cause_is_told_in_words(problem, told):
    assert told in pairs.cause(problem, 3)


def test_a_machine_connects_to_those_before_it_and_with_servers_to_all():
    assert list(pairs._needed("abc", False)) == [("b", "a"), ("c", "a"), ("c", "b")]
    assert set(pairs._needed("ab", True)) == {("a", "b"), ("b", "a")}
