"""Attempts to connect say how they ended, and are not taken in by another machine's answer."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

import pytest

from echelon.start.agents.protocol import ReachTarget, TryReach
from echelon.start.agents.reach import ReachListeners, attempt


@pytest.fixture
def listeners():
    made = ReachListeners()
    yield made
    made.close()


def tried(*targets, timeout_s=90.0, spare_s=90.0):
    return attempt(TryReach(list(targets), timeout_s, spare_s))


def test_an_open_port_is_reached_and_the_own_address_is_told(listeners):
    opened = listeners.open(0)
    (outcome,) = tried(ReachTarget("b", "127.0.0.1", opened.port, opened.token))
    assert (outcome.problem, outcome.source) == ("", "127.0.0.1")


def test_a_closed_port_is_refused_and_another_programs_answer_is_not_taken_for_the_machines(listeners):
    opened = listeners.open(0)
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    refused, another = tried(
        ReachTarget("b", "127.0.0.1", port, opened.token),
        ReachTarget("b", "127.0.0.1", opened.port, "f" * len(opened.token)),
    )
    assert (refused.problem, another.problem) == ("refused", "another")


def test_a_port_that_never_answers_ends_at_the_deadline():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        (outcome,) = tried(ReachTarget("b", "127.0.0.1", silent.getsockname()[1], "token"), timeout_s=0.2)
    assert outcome.problem == "timeout"


def test_when_each_machine_was_reached_its_other_addresses_are_awaited_only_for_the_spare_time():
    with socket.create_server(("127.0.0.1", 0)) as answers:
        port = answers.getsockname()[1]
        with socket.create_server(("127.0.0.2", port)):  # silent

            def answer():
                with answers.accept()[0] as caller:
                    caller.sendall(b"token")

            answering = threading.Thread(target=answer)
            answering.start()
            targets = [ReachTarget("b", f"127.0.0.{number}", port, "token") for number in (1, 2)]
            outcomes = tried(*targets, timeout_s=3600, spare_s=0.01)
            answering.join()
    assert [one.problem for one in outcomes] == ["", "not-awaited"]


def test_a_port_that_is_in_use_is_told_and_one_that_was_tried_can_be_used_at_once(listeners):
    with socket.create_server(("", 0)) as used:
        said = listeners.open(used.getsockname()[1])
    assert (said.problem, said.token) == ("Address already in use", "")
    opened = listeners.open(0)
    tried(*[ReachTarget("b", "127.0.0.1", opened.port, opened.token)] * 3)
    listeners.close()
    with socket.socket() as plain:  # without SO_REUSEADDR
        plain.bind(("127.0.0.1", opened.port))


def test_a_port_for_a_meeting_is_below_those_that_the_system_chooses(listeners):
    opened = listeners.open(0, steady=True)
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert 20_000 <= opened.port < 30_000
    assert opened.port < lowest or lowest < 20_000
    assert [one.problem for one in tried(ReachTarget("b", "127.0.0.1", opened.port, opened.token))] == [""]
