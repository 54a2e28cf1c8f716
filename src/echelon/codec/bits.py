"""How do numbers of few bits lie side by side in bytes?

In blocks of `BLOCK` numbers, and in each block in planes, the widest first: a number of 13 bits is its low
8 bits in one plane, the next 4 in a second, the last one in a third. A plane of 4 bits keeps number i and
number i + half of the block in one byte, a plane of 2 bits four numbers, each a quarter of the block apart;
so packing is a few operations on long ranges, and no neighbours are pulled apart. A plane of 1 bit keeps
neighbours in a byte, the first in its highest bit. Digits of base 3 go five in a byte, a fifth of the block
apart: 3^5 = 243.

Only the last block may be short, and only there may bytes be padded, with zeros: less than three bytes for
all planes together. So a block begins where `packed_bytes` of the numbers before it ends, and can be
written and read alone.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from echelon.errors import Corrupt

Bytes = npt.NDArray[np.uint8]
Codes = npt.NDArray[np.unsignedinteger]

BLOCK = 81_920  # small enough for the second-level cache as float32; whole bytes at 1 bit and at base 3
MOST_BITS = 32
_DIGITS = 5


def blocks(count: int) -> Iterator[tuple[int, int]]:
    """Where each block begins and ends."""
    return ((begin, min(begin + BLOCK, count)) for begin in range(0, count, BLOCK))


def planes(bits: int) -> list[int]:
    """The widths of the planes that together are so many bits: 13 is 8, 4 and 1."""
    return [8] * (bits // 8) + [width for width in (4, 2, 1) if bits & width]


def code_type(bits: int) -> type[np.uint8] | type[np.uint16] | type[np.uint32]:
    """The smallest type for numbers of so many bits."""
    if not 1 <= bits <= MOST_BITS:
        raise ValueError(f"{bits} bits: numbers are packed with 1 to {MOST_BITS}")
    return np.uint8 if bits <= 8 else np.uint16 if bits <= 16 else np.uint32


def packed_bytes(count: int, bits: int) -> int:
    """How many bytes so many numbers take."""
    whole, rest = divmod(count, BLOCK)
    return whole * (BLOCK * bits // 8) + sum(-(-rest * width // 8) for width in planes(bits))


def pack(values: Codes, bits: int, out: Bytes | None = None) -> Bytes:
    """Numbers below 2^bits, as bytes, in `out` if it is given."""
    count = len(values)
    if out is None:
        out = np.empty(packed_bytes(count, bits), np.uint8)
    for begin, end in blocks(count):
        _pack_block(values[begin:end], bits, out[packed_bytes(begin, bits) : packed_bytes(end, bits)])
    return out


def unpack(data: Bytes, bits: int, count: int) -> Codes:
    """The numbers that `pack` was given, in the smallest type for so many bits.

    Raises Corrupt if this is not the length of so many numbers.
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
            if shift + width < bits:  # in the last plane, there is nothing above to cut off
                part = part & (1 << width) - 1
            part = part.astype(np.uint8, copy=False)
        if width == 1:
            plane[:] = np.packbits(part)
        else:
            np.copyto(plane, part[:size], casting="unsafe")
            for turn in range(1, 8 // width):
                more = part[turn * size : (turn + 1) * size]
                np.bitwise_or(plane[: len(more)], more << (turn * width), out=plane[: len(more)])
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
            for turn in range(8 // width):
                share = out[turn * size : (turn + 1) * size]
                _put(np.bitwise_and(plane[: len(share)] >> np.uint8(turn * width), mask), shift, share)
        at += size
        shift += width


def _put(part: Bytes, shift: int, out: Codes) -> None:
    if shift:
        out |= part.astype(out.dtype) << shift
    else:
        np.copyto(out, part)


def digits_bytes(count: int) -> int:
    """How many bytes so many digits of base 3 take."""
    return -(-count // _DIGITS)  # a block is a multiple of five


def pack_digits(values: Bytes, out: Bytes | None = None) -> Bytes:
    """Digits 0, 1 and 2, five to a byte, in `out` if it is given."""
    count = len(values)
    if out is None:
        out = np.empty(digits_bytes(count), np.uint8)
    for begin, end in blocks(count):
        block, packed = values[begin:end], out[digits_bytes(begin) : digits_bytes(end)]
        size = len(packed)
        packed[:] = 0
        for turn in reversed(range(_DIGITS)):
            part = block[turn * size : (turn + 1) * size]
            packed *= 3
            packed[: len(part)] += part
    return out


def unpack_digits(data: Bytes, count: int) -> Bytes:
    """The digits that `pack_digits` was given. Raises Corrupt if these are no such bytes."""
    if len(data) != digits_bytes(count) or (count and data.max() >= 3**_DIGITS):
        raise Corrupt(f"these {len(data)} bytes are not {count} digits of base 3", where="codec")
    out = np.empty(count, np.uint8)
    for begin, end in blocks(count):
        left, block = data[digits_bytes(begin) : digits_bytes(end)], out[begin:end]
        size = len(left)
        for turn in range(_DIGITS):
            part = block[turn * size : (turn + 1) * size]
            higher = left // 3
            np.subtract(left[: len(part)], higher[: len(part)] * 3, out=part)
            left = higher
    return out
