"""Headers say what they were made of, and wrong ones are refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echelon.comm.wire import frames
from echelon.comm.wire.frames import HEADER_BYTES, MOST_FRAME_BYTES, Header
from echelon.errors import Corrupt, StaleView

VIEW = bytes(range(16))


def header(**changes):
    fields = {
        "view": VIEW,
        "sequence": 7,
        "operation": 3 << 40 | 1,
        "message": 2,
        "size": 5000,
        "offset": 1000,
        "length": 500,
        "checksum": 0xDEADBEEF,
    }
    return Header(**{**fields, **changes})


def unpack(data, **changes):
    return frames.unpack(data, **{"view": VIEW, "sequence": 7, "peer": "rank 1 on b", **changes})


@given(
    sequence=st.integers(0, 2**64 - 1),
    operation=st.integers(0, 2**64 - 1),
    message=st.integers(0, 2**32 - 1),
    length=st.integers(0, MOST_FRAME_BYTES),
    before=st.integers(0, 2**40),
    after=st.integers(0, 2**40),
    checksum=st.integers(0, 2**64 - 1),
)
def test_packed_header_unpacks_to_the_same_fields(
    sequence, operation, message, length, before, after, checksum
):
    made = Header(VIEW, sequence, operation, message, before + length + after, before, length, checksum)
    data = made.pack()
    assert len(data) == HEADER_BYTES
    assert unpack(data, sequence=sequence) == made


@given(bit=st.integers(0, 8 * HEADER_BYTES - 1))
def test_a_header_with_any_bit_flipped_is_refused(bit):
    data = bytearray(header().pack())
    data[bit // 8] ^= 1 << bit % 8
    with pytest.raises(Corrupt) as caught:
        unpack(data)
    assert "rank 1 on b" in caught.value.message


@given(data=st.binary(min_size=HEADER_BYTES, max_size=HEADER_BYTES))
def test_junk_bytes_are_refused_as_a_frame(data):
    with pytest.raises(Corrupt, match="not a frame"):
        unpack(data)


def test_a_header_of_another_view_is_stale():
    with pytest.raises(StaleView, match="another view"):
        unpack(header(view=bytes(16)).pack())


@pytest.mark.parametrize("sequence", [6, 8])
def test_a_replayed_or_lost_frame_is_refused(sequence):
    with pytest.raises(Corrupt, match="frame 7 where"):
        unpack(header().pack(), sequence=sequence)


def test_an_oversized_frame_is_refused_before_it_is_received():
    whole = header(size=1 << 30, offset=0, length=MOST_FRAME_BYTES)
    assert unpack(whole.pack()) == whole
    with pytest.raises(Corrupt, match="announced a frame"):
        unpack(header(size=1 << 30, offset=0, length=MOST_FRAME_BYTES + 1).pack())


def test_a_frame_that_reaches_beyond_its_message_is_refused():
    assert unpack(header(offset=4500).pack()).offset == 4500
    with pytest.raises(Corrupt, match="beyond its message"):
        unpack(header(offset=4501).pack())


@given(payload=st.binary(min_size=1, max_size=300), data=st.data())
def test_the_checksum_of_a_payload_changes_with_every_byte(payload, data):
    changed = bytearray(payload)
    changed[data.draw(st.integers(0, len(payload) - 1))] ^= data.draw(st.integers(1, 255))
    assert frames.checksum(memoryview(payload)) != frames.checksum(memoryview(changed))


def test_an_empty_payload_has_a_checksum():
    assert frames.checksum(memoryview(b"")) == 0
