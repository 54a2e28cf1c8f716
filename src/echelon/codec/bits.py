"""Packs numbers of few bits into bytes.

Numbers are packed in blocks of `BLOCK`, and each block in planes, the widest first: a number of 13 bits has
its low 8 bits in one plane, the next 4 in a second, the last one in a third. In a plane of 4 bits, number i
and number i + half of the block share a byte; in a plane of 2 bits, four numbers do, each a quarter of the
block apart. Packing is then a few operations on long ranges, without shuffling neighbours. A plane of 1 bit
keeps neighbours in a byte, the first in its highest bit. Base-3 digits are packed five to a byte, a fifth
of the block apart: 3^5 = 243.

Only the last block may be short, and only there are bytes padded with zeros: less than three bytes for all
planes together. So a block begins where `packed_bytes` of the numbers before it ends, and can be written
and read alone.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from echelon.errors import Corrupt

Bytes = npt.NDArray[np.uint8]
Codes = npt.NDArray[np.unsignedinteger]

BLOCK = 81_920  # fits the second-level cache as float32; whole bytes at 1 bit and at base 3
MOST_BITS = 32
_DIGITS = 5


def blocks(count: int) -> Iterator[tuple[int, int]]:
    """The begin and end of each block."""
    return ((begin, min(begin + BLOCK, count)) for begin in range(0, count, BLOCK))


def planes(bits: int) -> list[int]:
    """The widths of the planes for numbers of `bits` bits: 13 is 8, 4 and 1."""
    return [8] * (bits // 8) + [width for width in (4, 2, 1) if bits & width]


def code_type(bits: int) -> type[np.uint8] | type[np.uint16] | type[np.uint32]:
    """The smallest unsigned type for numbers of `bits` bits."""
    if not 1 <= bits <= MOST_BITS:
        raise ValueError(f"{bits} bits: numbers are packed with 1 to {MOST_BITS}")
    return np.uint8 if bits <= 8 else np.uint16 if bits <= 16 else np.uint32


def packed_bytes(count: int, bits: int) -> int:
    """The size of `count` packed numbers."""
    whole, rest = divmod(count, BLOCK)
    return whole * (BLOCK * bits // 8) + sum(-(-rest * width // 8) for width in planes(bits))


def pack(values: Codes, bits: int, out: Bytes | None = None) -> Bytes:
    """Pack numbers below 2^bits into `out`, or into a new array."""
    count = len(values)
    if out is None:
        out = np.empty(packed_bytes(count, bits), np.uint8)
    for begin, end in blocks(count):
        _pack_block(values[begin:end], bits, out[packed_bytes(begin, bits) : packed_bytes(end, bits)])
    return out


def unpack(data: Bytes, bits: int, count: int) -> Codes:
    """Unpack `count` numbers, in the smallest type for that many bits.

    Raises Corrupt if the data does not have the length of `count` numbers.
    """
    if len(data) != packed_bytes(count, bits):
        raise Corrupt(f"{len(data)} bytes are not {count} numbers of {bits} bits", where="codec")
    out = np.empty(count, code_type(bits))
    for begin, end in blocks(count):
        _unpack_block(data[packed_bytes(begin, bits) : packed_bytes(end, bits)], bits, out[begin:end])
    return out


def _pack_block(values: Codes, bits: int, out: Bytes) -> None:
    count, at, shift = len(values), 0, 0
    for width in planes(bits):
        size = -(-count * width // 8)
        plane = out[at : at + size]
        part = values >> shift if shift else values
        if width < 8:
            if shift + width < bits:  # the last plane has no higher bits to mask
                part = part & (1 << width) - 1
            part = part.astype(np.uint8, copy=False)
        if width == 1:
            plane[:] = np.packbits(part)
        else:
            np.copyto(plane, part[:size], casting="unsafe")
            for index in range(1, 8 // width):
                more = part[index * size : (index + 1) * size]
                np.bitwise_or(plane[: len(more)], more << (index * width), out=plane[: len(more)])
        at += size
        shift += width


def _unpack_block(data: Bytes, bits: int, out: Codes) -> None:
    count, at, shift = len(out), 0, 0
    for width in planes(bits):
        size = -(-count * width // 8)
        plane = data[at : at + size]
        if width == 8:
            _put(plane, shift, out)
        elif width == 1:
            _put(np.unpackbits(plane, count=count), shift, out)
        else:
            mask = np.uint8((1 << width) - 1)
            for index in range(8 // width):
                share = out[index * size : (index + 1) * size]
                _put(np.bitwise_and(plane[: len(share)] >> np.uint8(index * width), mask), shift, share)
        at += size
        shift += width


def _put(part: Bytes, shift: int, out: Codes) -> None:
    if shift:
        out |= part.astype(out.dtype) << shift
    else:
        np.copyto(out, part)


def digits_bytes(count: int) -> int:
    """The size of `count` packed base-3 digits."""
    return -(-count // _DIGITS)  # a block is a multiple of five


def pack_digits(values: Bytes, out: Bytes | None = None) -> Bytes:
    """Pack digits 0, 1 and 2, five to a byte, into `out` or a new array."""
    count = len(values)
    if out is None:
        out = np.empty(digits_bytes(count), np.uint8)
    for begin, end in blocks(count):
        block, packed = values[begin:end], out[digits_bytes(begin) : digits_bytes(end)]
        size = len(packed)
        packed[:] = 0
        for index in reversed(range(_DIGITS)):
            part = block[index * size : (index + 1) * size]
            packed *= 3
            packed[: len(part)] += part
    return out


def unpack_digits(data: Bytes, count: int) -> Bytes:
    """Unpack `count` base-3 digits. Raises Corrupt if the data is not that."""
    if len(data) != digits_bytes(count) or (count and data.max() >= 3**_DIGITS):
        raise Corrupt(f"these {len(data)} bytes are not {count} digits of base 3", where="codec")
    out = np.empty(count, np.uint8)
    for begin, end in blocks(count):
        left, block = data[digits_bytes(begin) : digits_bytes(end)], out[begin:end]
        size = len(left)
        for index in range(_DIGITS):
            part = block[index * size : (index + 1) * size]
            higher = left // 3
            np.subtract(left[: len(part)], higher[: len(part)] * 3, out=part)
            left = higher
    return out
