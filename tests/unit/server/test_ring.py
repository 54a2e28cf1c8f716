"""A ring gives messages in order and unchanged; if it is full it refuses them, and has room for marks."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.server.ring import MOST_BYTES, RING_BYTES, MessageRing


def ends():
    """A sender and a receiver over the same memory."""
    memory = torch.zeros(RING_BYTES, dtype=torch.uint8)
    return MessageRing(memory), MessageRing(memory)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, MOST_BYTES), st.integers(0, 255)), max_size=80))
def test_messages_come_out_as_they_went_in_whatever_their_lengths(calls):
    sender, receiver = ends()
    inside = []
    for takes, length, value in calls:
        if takes:
            assert receiver.has_entries == bool(inside)
            assert receiver.take() == (inside.pop(0) if inside else None)
        header, payload = (
            bytes([value]) * (1 + length // 3),
            bytes([255 - value]) * (length - length // 3 - 1),
        )
        if sender.put(header, memoryview(payload)):
            inside.append((header, payload))
    while inside:
        assert receiver.take() == inside.pop(0)
    assert receiver.take() is None


def test_a_full_ring_takes_marks_but_no_messages_until_some_are_read():
    sender, receiver = ends()
    assert not receiver.is_used
    count = 0
    while sender.put(b"x" * MOST_BYTES):
        count += 1
    assert receiver.is_used
    assert sender.mark()
    assert not sender.put(b"x" * MOST_BYTES)
    for _ in range(count):
        assert receiver.take() == (b"x" * MOST_BYTES, b"")
    assert receiver.take() == (b"", b""), "the mark"
    assert sender.put(b"x" * MOST_BYTES)


def test_a_ring_that_is_full_of_marks_takes_no_more():
    sender, receiver = ends()
    marks = 0
    while sender.mark():
        marks += 1
    assert marks == (RING_BYTES - 128) // 8
    assert receiver.take() == (b"", b"")
    assert sender.mark()
