"""Encoded messages are read as written; damaged ones are refused with the sender's name."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.errors import Corrupt
from echelon.reduce.encoded.rounds import EncodedMessage, NonFinite, any_used, read_message, write_message

flags = st.lists(st.booleans(), min_size=1, max_size=20)
payloads = st.lists(st.binary(max_size=30), max_size=6)


def tensors(texts):
    return [torch.tensor(list(text), dtype=torch.uint8) for text in texts]


@settings(deadline=None)
@given(used=flags, texts=payloads)
def test_a_message_is_read_as_written(used, texts):
    data = write_message(EncodedMessage(used, tensors(texts)))
    read = read_message(data, len(used), len(texts), "rank 3")
    assert read.used == used
    assert [bytes(payload.tolist()) for payload in read.payloads] == texts
    assert read.non_finite is None


@settings(deadline=None)
@given(used=flags, rank=st.integers(0, 0xFFFE), parameter=st.integers(0, 0xFFFE), pieces=st.integers(0, 9))
def test_a_message_with_a_non_finite_report_holds_no_ranges(used, rank, parameter, pieces):
    data = write_message(EncodedMessage(used, [], NonFinite(rank, parameter)))
    read = read_message(data, len(used), pieces, "rank 3")
    assert read == EncodedMessage(used, [], NonFinite(rank, parameter))


@settings(deadline=None)
@given(used=flags, texts=payloads, data=st.data())
def test_a_message_of_the_wrong_length_is_refused_and_its_sender_named(used, texts, data):
    whole = write_message(EncodedMessage(used, tensors(texts)))
    length = data.draw(st.integers(0, len(whole) + 3).filter(lambda n: n != len(whole)))
    damaged = torch.cat([whole, torch.zeros(3, dtype=torch.uint8)])[:length]
    with pytest.raises(Corrupt, match="rank 3 on gpu-b sent") as caught:
        read_message(damaged, len(used), len(texts), "rank 3 on gpu-b")
    assert caught.value.fix


@settings(deadline=None)
@given(used=flags, texts=st.lists(st.binary(min_size=1, max_size=30), min_size=1, max_size=6))
def test_a_message_with_another_number_of_ranges_is_refused(used, texts):
    data = write_message(EncodedMessage(used, tensors(texts)))
    with pytest.raises(Corrupt):
        read_message(data, len(used), 0, "rank 3")


@settings(deadline=None)
@given(
    st.integers(1, 5).flatmap(
        lambda n: st.lists(st.lists(st.booleans(), min_size=n, max_size=n), min_size=1)
    )
)
def test_a_parameter_is_used_if_any_worker_used_it(used):
    assert any_used(used) == [any(one[n] for one in used) for n in range(len(used[0]))]
