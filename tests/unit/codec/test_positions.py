"""Positions in few bits: their size, and errors for damaged data."""

from __future__ import annotations

import math

import numpy as np
import pytest

from echelon.codec import positions
from echelon.errors import Corrupt


def _some(n: int, m: int) -> np.ndarray:
    return np.sort(np.random.default_rng(n + m).choice(n, m, replace=False))


@pytest.mark.parametrize("n", [1, 2, 7, 255, 256, 257, 70_001, 1_000_000])
def test_reading_gives_the_written_positions_for_any_ratio(n):
    for m in {0, 1, n // 1000, n // 100, n // 33, n // 7, n // 3, n // 2, n - 1, n}:
        chosen = _some(n, m)
        data = positions.write(chosen, n)
        assert len(data) == positions.size_bytes(n, m)
        assert np.array_equal(positions.read(data, n, m), chosen)


@pytest.mark.parametrize("ratio", [0.5, 0.25, 0.1, 0.03, 0.01, 0.001, 0.0001])
def test_a_position_takes_two_bits_more_than_the_logarithm_of_the_ratio(ratio):
    n = 1_000_000
    m = int(n * ratio)
    assert positions.size_bytes(n, m) <= m * (2 + math.log2(n / m)) / 8 + 5
    assert positions.size_bytes(n, m) <= n / 8


def test_none_and_all_take_no_bytes():
    assert positions.size_bytes(1000, 0) == positions.size_bytes(1000, 1000) == 0
    assert positions.read(np.empty(0, np.uint8), 3, 3).tolist() == [0, 1, 2]
    assert positions.read(np.empty(0, np.uint8), 0, 0).tolist() == []


def test_positions_just_below_two_to_the_thirty_two_can_be_read():
    n = 2**32
    chosen = np.array([0, 1, 2**31 - 1, 2**31, n - 2, n - 1])
    assert np.array_equal(positions.read(positions.write(chosen, n), n, 6), chosen)


@pytest.mark.parametrize(("n", "m"), [(5000, 13), (5000, 2400)])
def test_data_of_the_wrong_length_is_refused(n, m):
    data = positions.write(_some(n, m), n)
    for wrong in (data[:-1], data[:0], np.append(data, np.uint8(0))):
        with pytest.raises(Corrupt, match="bytes instead of"):
            positions.read(wrong, n, m)


@pytest.mark.parametrize(("n", "m"), [(5000, 13), (5000, 2400)])
def test_another_number_of_positions_is_refused(n, m):
    data = positions.write(_some(n, m), n)
    with pytest.raises(Corrupt, match=f"positions instead of {m}"):
        positions.read(np.zeros_like(data), n, m)


def test_more_positions_than_elements_are_refused():
    with pytest.raises(Corrupt, match="5 positions below 4"):
        positions.read(np.empty(0, np.uint8), 4, 5)


def test_positions_beyond_the_end_are_refused():
    data = positions.write(np.array([3, 999]), 1000)
    data[:2] |= 0xFF  # sets the low bits of both: 511 and 1023
    with pytest.raises(Corrupt, match="not below 1000"):
        positions.read(data, 1000, 2)


def test_positions_that_do_not_increase_are_refused():
    data = positions.write(np.array([3, 5]), 1000)
    data[:2] = 4
    with pytest.raises(Corrupt, match="not increasing"):
        positions.read(data, 1000, 2)
