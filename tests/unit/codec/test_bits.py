"""Packed numbers of few bits: nothing is lost or wasted, and damage is detected."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.codec.bits import (
    BLOCK,
    blocks,
    code_type,
    digits_bytes,
    pack,
    pack_digits,
    packed_bytes,
    unpack,
    unpack_digits,
)
from echelon.errors import Corrupt

BITS = st.integers(1, 32)
COUNTS = st.one_of(st.integers(0, 40), st.integers(0, 3000))
SEEDS = st.integers(0, 2**32 - 1)
LONG = [BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 13]


def numbers(count: int, bits: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 2**bits, count, np.uint64).astype(code_type(bits))


@given(COUNTS, BITS, SEEDS)
@settings(max_examples=100, deadline=None)
def test_unpacking_gives_the_packed_numbers(count, bits, seed):
    values = numbers(count, bits, seed)
    before = values.copy()
    back = unpack(pack(values, bits), bits, count)
    assert back.dtype == code_type(bits)
    assert np.array_equal(back, before)
    assert np.array_equal(values, before)


@given(COUNTS, BITS, SEEDS)
@settings(max_examples=50, deadline=None)
def test_no_more_than_two_bytes_are_padding(count, bits, seed):
    size_bytes = len(pack(numbers(count, bits, seed), bits))
    assert size_bytes == packed_bytes(count, bits)
    assert -(-count * bits // 8) <= size_bytes <= -(-count * bits // 8) + 2


@pytest.mark.parametrize("count", LONG)
@pytest.mark.parametrize("bits", [1, 3, 6, 8, 13, 18])
def test_single_block_can_be_read(count, bits):
    values = numbers(count, bits, 1)
    data = pack(values, bits)
    assert len(data) == packed_bytes(count, bits)
    for begin, end in blocks(count):
        block = data[packed_bytes(begin, bits) : packed_bytes(end, bits)]
        assert np.array_equal(unpack(block, bits, end - begin), values[begin:end])


@given(st.integers(1, 300), BITS, SEEDS, st.integers(-300, 300))
@settings(max_examples=50, deadline=None)
def test_wrong_lengths_are_refused(count, bits, seed, off):
    data = pack(numbers(count, bits, seed), bits)
    wrong = max(0, len(data) + off)
    if wrong != len(data):
        with pytest.raises(Corrupt, match="are not"):
            unpack(np.zeros(wrong, np.uint8), bits, count)


@pytest.mark.parametrize("bits", [0, 33])
def test_zero_and_too_many_bits_are_refused(bits):
    with pytest.raises(ValueError, match="1 to 32"):
        code_type(bits)


@given(COUNTS, SEEDS)
@settings(max_examples=60, deadline=None)
def test_five_digits_fit_a_byte(count, seed):
    digits = np.random.default_rng(seed).integers(0, 3, count, np.uint8)
    data = pack_digits(digits)
    assert len(data) == digits_bytes(count) == -(-count // 5)
    assert np.array_equal(unpack_digits(data, count), digits)


@pytest.mark.parametrize("count", LONG)
def test_single_block_of_digits_can_be_read(count):
    digits = np.random.default_rng(1).integers(0, 3, count, np.uint8)
    data = pack_digits(digits)
    for begin, end in blocks(count):
        block = data[digits_bytes(begin) : digits_bytes(end)]
        assert np.array_equal(unpack_digits(block, end - begin), digits[begin:end])


@pytest.mark.parametrize("data", [[1], [1, 1, 1], [1, 243], [255, 0]])
def test_bytes_that_are_not_digits_are_refused(data):
    with pytest.raises(Corrupt, match="base 3"):
        unpack_digits(np.array(data, np.uint8), 10)
