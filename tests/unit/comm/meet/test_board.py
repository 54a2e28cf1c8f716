"""What a board answers, and what it refuses; a request that is no request is an error with a name."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echelon.comm.meet import board
from echelon.comm.meet.board import (
    AddCount,
    BoardError,
    CheckKeys,
    CountReply,
    GetValue,
    MeetingBoard,
    PrefixedStore,
    RefusalReply,
    SetValue,
    ValueReply,
    decode_reply,
    decode_request,
    encode,
)
from echelon.comm.meet.visit import LeaderStore
from echelon.errors import Corrupt, WorkerError


def test_a_value_is_read_as_it_was_written_and_counters_count():
    one = MeetingBoard()
    assert one.answer(GetValue("a")) == ValueReply(None)
    one.answer(SetValue("a", b"\0x"))
    assert one.answer(GetValue("a")) == ValueReply(b"\0x")
    assert one.answer(AddCount("n", 0)) == CountReply(0)
    assert one.answer(CheckKeys(["n"])) == CountReply(0), "asking makes no counter"
    assert [one.answer(AddCount("n", 3)), one.answer(AddCount("n", -1))] == [CountReply(3), CountReply(2)]
    assert one.answer(CheckKeys(["a", "n"])) == CountReply(1)
    assert one.answer(CheckKeys(["a", "b"])) == CountReply(0)


def test_a_value_is_not_a_counter_and_boards_do_not_grow_without_end(monkeypatch):
    monkeypatch.setattr(board, "_MOST_KEYS", 2)
    monkeypatch.setattr(board, "_MOST_BYTES", 10)
    one = MeetingBoard()
    one.answer(SetValue("a", b"x"))
    assert isinstance(one.answer(AddCount("a", 1)), RefusalReply)
    assert isinstance(one.answer(SetValue("k" * 9000, b"")), RefusalReply)
    one.answer(SetValue("b", b"x"))
    assert isinstance(one.answer(SetValue("c", b"")), RefusalReply)
    assert isinstance(one.answer(SetValue("b", bytes(10))), RefusalReply)
    assert one.answer(SetValue("b", bytes(9))) == ValueReply(), "what is there may change"
    with pytest.raises(WorkerError, match="the leader refused what this worker wrote"):
        LeaderStore(one, timeout_s=1).set("c", "x")


@given(st.binary(max_size=200))
def test_any_bytes_are_a_request_or_an_error_that_names_the_sender(data):
    for decode in (decode_request, decode_reply):
        try:
            decode(data, peer="rank 3")
        except Corrupt as error:
            assert "rank 3 sent what is not a re" in error.message  # noqa: PT017


@given(st.text(max_size=20), st.binary(max_size=50), st.integers(-(2**63), 2**63 - 1))
def test_requests_survive_their_encoding(key, value, count):
    for request in (SetValue(key, value), GetValue(key), AddCount(key, count), CheckKeys([key])):
        assert decode_request(encode(request), peer="rank 1") == request


def test_a_prefix_keeps_stores_apart_and_a_value_that_never_comes_is_named():
    whole = LeaderStore(MeetingBoard(), timeout_s=0.05)
    one, other = PrefixedStore("1", whole), PrefixedStore("2", whole)
    one.set("a", "x")
    assert (one.get("a"), one.check(["a"]), other.check(["a"])) == (b"x", True, False)
    assert (one.add("n", 2), other.add("n", 5), one.add("n", 1)) == (2, 5, 3)
    with pytest.raises(BoardError, match=r"no worker has written '2/a' within 0\.05 s"):
        other.get("a")
