"""Agents call their launcher back, and nobody else does."""

from __future__ import annotations

import os
import socket
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echelon.comm.wire.seals import Keys
from echelon.errors import Corrupt, LaunchError
from echelon.start.agents.callback import Invitation, Reception, call_back
from echelon.start.agents.channel import Channel
from echelon.start.agents.protocol import Alive, Grown


class Job:
    """A job that waits for something, or has ended."""

    def __init__(self, waits="", ended=None):
        self.waits, self.ended = waits, ended

    def waiting_for(self):
        return self.waits

    def why_ended(self):
        return self.ended

    def end(self):
        raise AssertionError("it is the caller's")


@pytest.fixture
def reception():
    opened = Reception(30.0, {"ECHELON_SECRET": "s"})
    yield opened
    opened.close()


def exchange(one, other, message):
    one.send(message)
    until = time.monotonic() + 20
    found = []
    while not found:
        assert time.monotonic() < until
        found = other.poll(0.1)
    return found


def calls(reception, invitation, count=1):
    """The launcher's and the agent's ends of one call, while `count` are waited for."""
    called = []
    thread = threading.Thread(target=lambda: called.append(call_back(invitation)))
    thread.start()
    channels = reception.receive(count, Job(), "test")
    thread.join()
    return channels[0], called[0]


def test_messages_pass_both_ways_after_a_call(reception):
    launcher, agent = calls(reception, reception.invitation())
    try:
        assert exchange(agent, launcher, Grown("logs/rank-0.log", 0, b"x" * 300_000)) != []
        assert exchange(launcher, agent, Alive()) == [Alive()]
    finally:
        launcher.close()
        agent.close()


def test_a_stranger_is_refused_and_the_agent_after_it_is_not(reception):
    right = reception.invitation()
    wrong = Invitation(
        addresses=[], port=right.port, token=bytes(32), network=right.network, timeout_s=0.05
    )
    refused = []

    def strange():
        try:
            call_back(wrong)
        except LaunchError as error:
            refused.append(error)

    with socket.create_connection(("127.0.0.1", right.port)) as junk:
        junk.sendall(b"GET / HTTP/1.1\r\n\r\n" * 10)
        thread = threading.Thread(target=strange)
        thread.start()
        launcher, agent = calls(reception, right)
        launcher.close()
        agent.close()
        reception.close()
        thread.join()
    assert "the launcher cannot be reached" in refused[0].message


def test_strangers_that_are_silent_or_slow_delay_no_agent_and_are_named_in_one_line(reception, caplog):
    right = reception.invitation()
    silent = [socket.create_connection(("127.0.0.1", right.port)) for _ in range(150)]
    for sock in silent[:20]:
        sock.sendall(b"E")  # the beginning of a hello
    for sock in silent[20:30]:
        sock.sendall(os.urandom(57))
    launcher, agent = calls(reception, right)
    silent[-1].setblocking(False)
    with pytest.raises(BlockingIOError):  # it is still connected: the agent did not wait for its end
        silent[-1].recv(1)
    assert exchange(launcher, agent, Alive()) == [Alive()]
    launcher.close()
    agent.close()
    reception.close()
    for sock in silent:
        sock.close()
    named = [line for line in caplog.messages if "rejected a connection from 127.0.0.1" in line]
    counted = [line for line in caplog.messages if "that are not from this run's agents" in line]
    assert (len(named), len(counted)) == (1, 1), caplog.messages


def test_what_the_job_waits_for_is_said_at_the_deadline():
    reception = Reception(0.1, {})
    with pytest.raises(LaunchError, match=r"slurm has not started its 2 agents within 0.1 s: PENDING"):
        reception.receive(2, Job(waits="PENDING (Resources)"), "slurm")
    reception.close()


def test_a_job_that_ends_early_says_why(reception):
    with pytest.raises(LaunchError, match="mpi ended before its 1 agent: no such host"):
        reception.receive(1, Job(ended="no such host"), "mpi")


def sealed():
    (a_reads, b_writes), (b_reads, a_writes) = os.pipe(), os.pipe()
    one, other = b"1" * 32, b"2" * 32
    return (
        Channel(a_reads, a_writes, peer="b", keys=Keys(sending=one, receiving=other)),
        Channel(b_reads, b_writes, peer="a", keys=Keys(sending=other, receiving=one)),
        b_reads,
        a_writes,
    )


@given(st.integers(4, 30), st.integers(1, 255))
def test_a_message_that_was_changed_on_its_way_is_refused(at, flips):
    sender, receiver, reads, writes = sealed()
    try:
        sender.send(Grown("p", 1, b"data"))
        data = bytearray(os.read(reads, 1000))
        data[at % len(data) if at % len(data) > 3 else 4] ^= flips
        os.write(writes, data)
        with pytest.raises(Corrupt, match="was changed on its way"):
            receiver.poll(1)
    finally:
        sender.close()
        receiver.close()


def test_a_message_that_is_repeated_is_refused():
    sender, receiver, reads, writes = sealed()
    sender.send(Alive())
    data = os.read(reads, 1000)
    os.write(writes, data + data)
    with pytest.raises(Corrupt, match="was changed on its way"):
        receiver.poll(1)
    sender.close()
    receiver.close()


@given(st.builds(
    Invitation,
    addresses=st.lists(st.text()),
    port=st.integers(1, 65535),
    token=st.binary(),
    network=st.text(),
    timeout_s=st.floats(0, 100),
    env=st.dictionaries(st.text(), st.text()),
    order=st.integers(0, 99),
))  # fmt: skip
def test_an_invitation_survives_its_text(invitation):
    assert Invitation.decode(invitation.encode()) == invitation
    assert invitation.encode().isascii()


def test_the_number_of_a_slot_comes_from_the_engines_variable():
    common = Invitation(
        addresses=[], port=1, token=b"", network="", timeout_s=1, order=7, order_from="PMI_RANK"
    )
    assert common.order_in({"PMI_RANK": "3"}) == 3
    assert common.order_in({}) == 7
