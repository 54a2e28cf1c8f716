"""A peer that knows the secret is accepted; any other peer is rejected, whatever it sends."""

from __future__ import annotations

import socket
import threading
from contextlib import contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echelon.comm.meet import handshake
from echelon.comm.meet.handshake import HungUp, Refused, conversation

VIEW = bytes(range(16))
SECRET = b"the run's secret"
HELLO_BYTES = 57


@contextmanager
def two_sockets():
    one, other = socket.socketpair()
    with one, other:
        yield one, other


def greet(sock, *, timeout_s, **options):
    return handshake.greet(sock, conversation(**options), timeout_s=timeout_s)


def outcome(act):
    try:
        return act()
    except Refused as refusal:
        return refusal


def meet(dialler, answerer):
    """The outcome on both sides."""
    with two_sockets() as (one, other):
        found = []
        options = {"view": VIEW, "secret": SECRET, "timeout_s": 90.0}

        def answer():
            found.append(outcome(lambda: greet(other, dialled=False, **{**options, **answerer})))
            other.close()

        thread = threading.Thread(target=answer)
        thread.start()
        dialled = outcome(lambda: greet(one, dialled=True, **{**options, **dialler}))
        one.close()
        thread.join()
        return dialled, found[0]


def hold(talk, hear):
    """Run one side of a handshake against scripted input; returns what it sends, and its outcome."""
    said = []
    try:
        step = next(talk)
        while True:
            said.append(step.say)
            step = talk.send(hear(step.awaits))
    except StopIteration as end:
        return said, end.value
    except Refused as refusal:
        return said, refusal


def answering(secret=SECRET, view=VIEW):
    return conversation(view=view, rank=0, secret=secret, dialled=False)


def test_peers_with_the_same_secret_learn_each_others_rank():
    dialled, answered = meet({"rank": 5}, {"rank": 2})
    assert (dialled.rank, answered.rank) == (2, 5)


def test_both_sides_derive_the_same_keys_of_their_own_for_each_connection_and_direction():
    made = [meet({"rank": 5}, {"rank": 2}) for _ in range(2)]
    for dialled, answered in made:
        assert dialled.keys.sending == answered.keys.receiving
        assert dialled.keys.receiving == answered.keys.sending
    assert len({key for one, _ in made for key in (one.keys.sending, one.keys.receiving)}) == 4
    assert made[0][0].keys.sending.hex() not in repr(made[0][0])


@pytest.mark.parametrize("dialler", [True, False])
def test_peers_with_different_integrity_are_refused_on_both_sides(dialler):
    sides = meet({"rank": 5, "authenticated": dialler}, {"rank": 2, "authenticated": not dialler})
    for refusal, rank in zip(sides, (2, 5), strict=True):
        assert type(refusal) is Refused
        assert refusal.ranks == (rank,)
        assert "--integrity checksum" in refusal.message
        assert "--integrity authenticated" in refusal.message


def test_both_sides_refuse_a_wrong_secret_and_name_the_peer():
    for refusal, rank in zip(meet({"rank": 5, "secret": b"other"}, {"rank": 2}), (2, 5), strict=True):
        assert type(refusal) is Refused
        assert f"rank {rank} does not know the run's secret" in refusal.message
        assert refusal.ranks == (rank,)


def test_another_view_is_refused():
    dialled, answered = meet({"rank": 5, "view": bytes(16)}, {"rank": 2})
    assert type(answered) is Refused
    assert "wrong run id" in answered.message
    assert type(dialled) is HungUp


def test_a_peer_that_closes_the_connection_is_refused():
    with two_sockets() as (one, other):
        one.sendall(b"EC")
        one.close()
        with pytest.raises(HungUp, match="closed the connection"):
            greet(other, view=VIEW, rank=0, secret=SECRET, dialled=False, timeout_s=90)


@pytest.mark.parametrize("dialled", [True, False])
def test_a_silent_peer_times_out(dialled):
    with two_sockets() as (_, other), pytest.raises(HungUp):
        greet(other, view=VIEW, rank=0, secret=SECRET, dialled=dialled, timeout_s=0.05)


def test_a_peer_that_sends_single_bytes_gets_no_more_time():
    with two_sockets() as (one, other):
        ended = threading.Event()

        def drip():
            while not ended.wait(0.1):
                one.send(b"E")

        thread = threading.Thread(target=drip)
        thread.start()
        try:
            with pytest.raises(HungUp):  # a whole hello, in 5.6 s, would be refused for what it says
                greet(other, view=VIEW, rank=0, secret=SECRET, dialled=False, timeout_s=0.5)
        finally:
            ended.set()
            thread.join()


@given(junk=st.binary(min_size=HELLO_BYTES, max_size=HELLO_BYTES))
def test_junk_is_refused_and_learns_nothing(junk):
    said, end = hold(answering(), lambda count: junk[:count])
    assert said == [b""]
    assert isinstance(end, Refused)


def test_a_peer_without_the_secret_gets_no_proof():
    hello, _ = next(t := conversation(view=VIEW, rank=1, secret=b"?", dialled=True)), t
    heard = iter([hello.say, bytes(32)])
    said, end = hold(answering(), lambda count: next(heard, b""))
    assert isinstance(end, Refused)
    assert said[-1] == bytes(32), "an empty proof, not one made with the secret"


def test_a_replayed_handshake_is_refused():
    """An attacker sends the recorded messages of an honest peer to another worker."""
    dialler = conversation(view=VIEW, rank=1, secret=SECRET, dialled=True)
    answerer = answering()
    recorded = [next(dialler).say]
    next(answerer)
    recorded.append(dialler.send(answerer.send(recorded[0]).say).say)
    assert answerer.send(recorded[1]).say != bytes(32), "the original is accepted"
    replayed = iter([*recorded, b""])
    _, end = hold(answering(), lambda count: next(replayed))
    assert isinstance(end, Refused)
    assert "does not know" in end.message


def test_a_reflected_handshake_is_refused():
    """An attacker at a worker's address sends back what the dialling side sends."""
    dialler = conversation(view=VIEW, rank=1, secret=SECRET, dialled=True)
    hello = next(dialler).say
    proof = dialler.send(hello).say
    with pytest.raises(Refused):
        dialler.send(proof)
