"""Who knows the secret is let in; nobody else is, whatever it says or does not say."""

from __future__ import annotations

import socket
import threading
from contextlib import contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echelon.comm.meet.handshake import HungUp, Refused, conversation, greet

VIEW = bytes(range(16))
SECRET = b"the run's secret"
HELLO_BYTES = 56


@contextmanager
def two_sockets():
    one, other = socket.socketpair()
    with one, other:
        yield one, other


def outcome(act):
    try:
        return act()
    except Refused as refusal:
        return refusal


def meet(dialler, answerer):
    """What becomes of both sides."""
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
    """A side of a conversation on the test's terms: what it says, and how it ends."""
    said = []
    try:
        turn = next(talk)
        while True:
            said.append(turn.say)
            turn = talk.send(hear(turn.awaits))
    except StopIteration as end:
        return said, end.value
    except Refused as refusal:
        return said, refusal


def answering(secret=SECRET, view=VIEW):
    return conversation(view=view, rank=0, secret=secret, dialled=False)


def test_two_who_know_the_secret_learn_each_others_rank():
    assert meet({"rank": 5}, {"rank": 2}) == (2, 5)


def test_a_wrong_secret_is_refused_by_both_who_both_say_so():
    for refusal, rank in zip(meet({"rank": 5, "secret": b"other"}, {"rank": 2}), (2, 5), strict=True):
        assert type(refusal) is Refused
        assert f"rank {rank} does not know the run's secret" in refusal.message
        assert refusal.ranks == (rank,)


def test_another_view_is_refused():
    dialled, answered = meet({"rank": 5, "view": bytes(16)}, {"rank": 2})
    assert type(answered) is Refused
    assert "stranger" in answered.message
    assert type(dialled) is HungUp


def test_who_hangs_up_is_refused():
    with two_sockets() as (one, other):
        one.sendall(b"EC")
        one.close()
        with pytest.raises(HungUp, match="hung up"):
            greet(other, view=VIEW, rank=0, secret=SECRET, dialled=False, timeout_s=90)


@pytest.mark.parametrize("dialled", [True, False])
def test_who_says_nothing_is_given_up_in_time(dialled):
    with two_sockets() as (_, other), pytest.raises(HungUp):
        greet(other, view=VIEW, rank=0, secret=SECRET, dialled=dialled, timeout_s=0.05)


def test_who_says_it_byte_by_byte_has_no_more_time_than_others():
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


def test_a_stranger_who_knows_the_view_gets_no_proof():
    hello, _ = next(t := conversation(view=VIEW, rank=1, secret=b"?", dialled=True)), t
    heard = iter([hello.say, bytes(32)])
    said, end = hold(answering(), lambda count: next(heard, b""))
    assert isinstance(end, Refused)
    assert said[-1] == bytes(32), "nothing that is made with the secret"


def test_a_recorded_handshake_is_worthless():
    """What an honest dialler said once is said again to another answerer."""
    dialler = conversation(view=VIEW, rank=1, secret=SECRET, dialled=True)
    answerer = answering()
    recorded = [next(dialler).say]
    next(answerer)
    recorded.append(dialler.send(answerer.send(recorded[0]).say).say)
    assert answerer.send(recorded[1]).say != bytes(32), "the first time it is let in"
    replayed = iter([*recorded, b""])
    _, end = hold(answering(), lambda count: next(replayed))
    assert isinstance(end, Refused)
    assert "does not know" in end.message


def test_a_handshake_that_is_reflected_is_worthless():
    """A stranger at the address of a worker sends back what the dialler says."""
    dialler = conversation(view=VIEW, rank=1, secret=SECRET, dialled=True)
    hello = next(dialler).say
    proof = dialler.send(hello).say
    with pytest.raises(Refused):
        dialler.send(proof)
