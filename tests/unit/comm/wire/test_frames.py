"""Headers say what they were made of, and wrong ones are refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echelon.comm.wire import frames
from echelon.comm.wire.frames import HEADER_BYTES, MOST_FRAME_BYTES, Header
from echelon.comm.wire.seals import PAYLOAD, Checksum, KeyedSeal
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
        "payload_seal": b"sixteen bytes ok",
    }
    return Header(**{**fields, **changes})


def unpack(data, **changes):
    return frames.unpack(
        data, **{"seal": Checksum(), "view": VIEW, "sequence": 7, "peer": "rank 1 on b", **changes}
    )


@given(
    sequence=st.integers(0, 2**64 - 1),
    operation=st.integers(0, 2**64 - 1),
    message=st.integers(0, 2**32 - 1),
    length=st.integers(0, MOST_FRAME_BYTES),
    before=st.integers(0, 2**40),
    after=st.integers(0, 2**40),
    seal=st.binary(min_size=16, max_size=16),
)
def test_packed_header_unpacks_to_the_same_fields(
    sequence, operation, message, length, before, after, seal
):
    made = Header(VIEW, sequence, operation, message, before + length + after, before, length, seal)
    data = made.pack(Checksum())
    assert len(data) == HEADER_BYTES
    assert unpack(data, sequence=sequence) == made


@given(bit=st.integers(0, 8 * HEADER_BYTES - 1))
def test_a_header_with_any_bit_flipped_is_refused(bit):
    data = bytearray(header().pack(Checksum()))
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
        unpack(header(view=bytes(16)).pack(Checksum()))


@pytest.mark.parametrize("sequence", [6, 8])
def test_a_replayed_or_lost_frame_is_refused(sequence):
    with pytest.raises(Corrupt, match="frame 7 where"):
        unpack(header().pack(Checksum()), sequence=sequence)


def test_an_oversized_frame_is_refused_before_it_is_received():
    whole = header(size=1 << 30, offset=0, length=MOST_FRAME_BYTES)
    assert unpack(whole.pack(Checksum())) == whole
    with pytest.raises(Corrupt, match="announced a frame"):
        unpack(header(size=1 << 30, offset=0, length=MOST_FRAME_BYTES + 1).pack(Checksum()))


def test_a_frame_that_reaches_beyond_its_message_is_refused():
    assert unpack(header(offset=4500).pack(Checksum())).offset == 4500
    with pytest.raises(Corrupt, match="beyond its message"):
        unpack(header(offset=4501).pack(Checksum()))


SEALS = [Checksum(), KeyedSeal(bytes(range(32)))]


@given(payload=st.binary(max_size=300), seal=st.sampled_from(SEALS), data=st.data())
def test_a_payload_with_any_byte_changed_is_refused(payload, seal, data):
    made = header(payload_seal=seal.of(7, PAYLOAD, payload), length=len(payload))
    frames.check_payload(made, memoryview(payload), seal=seal, peer="rank 1 on b")
    if not payload:
        return
    changed = bytearray(payload)
    changed[data.draw(st.integers(0, len(payload) - 1))] ^= data.draw(st.integers(1, 255))
    with pytest.raises(Corrupt, match="rank 1 on b"):
        frames.check_payload(made, memoryview(changed), seal=seal, peer="rank 1 on b")


@given(number=st.integers(0, 2**64 - 1))
def test_with_a_key_a_header_is_valid_at_its_own_position_only(number):
    seal = KeyedSeal(bytes(32))
    data = header().pack(seal)
    if number == 7:
        assert unpack(data, seal=seal) == header()
        return
    with pytest.raises(Corrupt, match="repeated, left out"):
        unpack(data, seal=seal, sequence=number)


def test_a_header_made_with_another_key_is_refused():
    with pytest.raises(Corrupt, match="not what it sent"):
        unpack(header().pack(KeyedSeal(bytes(32))), seal=KeyedSeal(b"k" * 32))
    with pytest.raises(Corrupt, match="not what it sent"):
        unpack(header().pack(Checksum()), seal=KeyedSeal(bytes(32)))
