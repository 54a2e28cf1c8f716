"""Writes the positions of the chosen elements of a sparse vector (sorted, distinct, below n) in few bits.

There are three forms for m positions below n, and the smallest is used:

    nothing      if m is 0 or n
    a bitmap     n bits
    Elias-Fano   with k = floor(lg(n / m)): the low k bits of each position as they are, and the high ones
                 in unary, as a vector of m + (n - 1 >> k) + 1 bits, of which bit (position >> k) + i stands
                 for the i-th position; at most 2 + lg(n / m) bits a position, and a few bytes

(P. Elias 1974, R. M. Fano 1971.) Invariant: n and m alone determine the form and its length, so only m has
to be sent along. Low bits are stored in planes of 8, 4, 2 and 1 bits, one after the other, so that every
operation works on whole arrays. Positions fit into 32 bits.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from echelon.codec.bits import Bytes, planes
from echelon.errors import Corrupt

Positions: TypeAlias = npt.NDArray[np.int64]


def size_bytes(n: int, m: int) -> int:
    """The exact size of m positions below n."""
    if m in (0, n):
        return 0
    return min(_bytes_for(n), _fano_bytes(n, m))


def write(positions: Positions, n: int) -> Bytes:
    """Write sorted, distinct positions below n as bytes."""
    m = len(positions)
    if m in (0, n):
        return np.empty(0, np.uint8)
    if _is_bitmap(n, m):
        return _bits(positions, n)
    k = _low_bits(n, m)
    highs = (positions >> k) + np.arange(m)
    return np.concatenate([*_low_planes(positions, k), _bits(highs, _high_bits(n, m, k))])


def read(data: Bytes, n: int, m: int) -> Positions:
    """Read m positions below n; raises Corrupt if the bytes are not that."""
    if not 0 <= m <= n:
        raise Corrupt(f"{m} positions below {n} are impossible", where="positions")
    if len(data) != size_bytes(n, m):
        raise Corrupt(
            f"{len(data)} bytes instead of {size_bytes(n, m)} for {m} positions below {n}",
            where="positions",
        )
    if m in (0, n):
        return np.arange(m)
    if _is_bitmap(n, m):
        return _set_bits(data, n, m)
    k = _low_bits(n, m)
    cut = _low_bytes(m, k)
    found = (_set_bits(data[cut:], _high_bits(n, m, k), m) - np.arange(m)) << k
    found |= _low_of(data[:cut], m, k)
    if found[-1] >= n or (np.diff(found) <= 0).any():
        raise Corrupt(f"positions that are not increasing, or not below {n}", where="positions")
    return found


def _bytes_for(bits: int) -> int:
    return -(-bits // 8)


def _low_bits(n: int, m: int) -> int:
    return (n // m).bit_length() - 1


def _high_bits(n: int, m: int, k: int) -> int:
    return m + ((n - 1) >> k) + 1


def _low_bytes(m: int, k: int) -> int:
    return sum(-(-m * width // 8) for width in planes(k))


def _fano_bytes(n: int, m: int) -> int:
    k = _low_bits(n, m)
    return _low_bytes(m, k) + _bytes_for(_high_bits(n, m, k))


def _is_bitmap(n: int, m: int) -> bool:
    return _bytes_for(n) <= _fano_bytes(n, m)


def _bits(positions: Positions, length: int) -> Bytes:
    """A vector of `length` bits with the bits at the positions set."""
    bits = np.zeros(length, np.uint8)
    bits[positions] = 1
    return np.packbits(bits, bitorder="little")


def _set_bits(data: Bytes, length: int, m: int) -> Positions:
    found = np.flatnonzero(np.unpackbits(data, count=length, bitorder="little"))
    if len(found) != m:
        raise Corrupt(f"{len(found)} positions instead of {m}", where="positions")
    return found


def _low_planes(positions: Positions, k: int) -> list[Bytes]:
    """The planes: each holds its bits of all positions.

    With P values per byte, the first value of each byte comes from the first P-th of the positions, and so
    on, so that whole ranges are shifted, not single values.
    """
    packed = []
    low = positions.astype(np.uint32)
    for width in planes(k):
        per_byte = 8 // width
        length = -(-len(low) // per_byte)
        values = np.zeros(length * per_byte, np.uint8)
        np.bitwise_and(low, (1 << width) - 1, out=values[: len(low)], casting="unsafe")
        plane = values[:length].copy()
        for part in range(1, per_byte):
            plane |= values[part * length : (part + 1) * length] << np.uint8(width * part)
        packed.append(plane)
        low >>= np.uint32(width)
    return packed


def _low_of(data: Bytes, m: int, k: int) -> Positions:
    low = np.zeros(m, np.int64)
    shift = start = 0
    for width in planes(k):
        per_byte = 8 // width
        length = -(-m // per_byte)
        plane = data[start : start + length]
        parts = [(plane >> np.uint8(width * part)) & np.uint8((1 << width) - 1) for part in range(per_byte)]
        low |= np.concatenate(parts)[:m].astype(np.int64) << shift
        start += length
        shift += width
    return low
