"""one-bit: the sign of each element, and two numbers that the signs are read as, with error feedback.

Seide et al. (2014), "1-Bit Stochastic Gradient Descent". A negative element is read as the mean of the
negative ones, any other as the mean of the others; no other two values are closer. Training fails without
feedback, so feedback is always on.

The means are those of the piece, or with per=column those of the piece's part of each output of a weight
(its first index: a column if the weight is written input by output, as in the paper), 8 bytes each. Outputs
of fewer than 64 elements use the piece's means, because their own would take more bytes than their signs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from echelon.codec.bits import BLOCK, Bytes
from echelon.codec.codec import RESIDUAL, Codec, CodecContext, State, Travels
from echelon.errors import ConfigError, Corrupt

if TYPE_CHECKING:
    from torch import Tensor

Floats = npt.NDArray[np.float32]
_SHORTEST_ROW = 64
_MEANS_BYTES = 8  # two float32
_SLACK = 2.0**-16


class _Span(NamedTuple):
    """Whole rows, `rows` of them from `row` on; or one row, or a part of one."""

    begin: int
    end: int
    row: int
    rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OneBit(Codec):
    """Sends signs and two means, per tensor or per output (column), with error feedback: 32x smaller."""

    name: ClassVar[str] = "one-bit"
    travels: ClassVar[Travels] = "scatter"
    per: Literal["tensor", "column"] = "tensor"

    def __post_init__(self) -> None:
        if self.per not in ("tensor", "column"):
            raise ConfigError(
                f"unknown value of per: {self.per!r}",
                where="codec one-bit, per",
                fix="give tensor or column",
            )

    @property
    def feedback(self) -> bool:
        """Always."""
        return True

    def encode(self, values: Tensor, state: State, context: CodecContext) -> Tensor:
        """As in the contract, but each block is added and encoded while it is in the cache."""
        kept = state[RESIDUAL]
        return self._write(kept, context, kept, values)

    def write(
        self, values: Tensor, state: State, context: CodecContext, rest: Tensor | None = None
    ) -> Tensor:
        """The means of the negative and of the other elements, row by row, and the signs."""
        return self._write(values, context, rest)

    def _write(
        self, values: Tensor, context: CodecContext, rest: Tensor | None, added: Tensor | None = None
    ) -> Tensor:
        import torch

        width = self._width(context)
        head_bytes = _MEANS_BYTES * _rows(len(values), width, context.start)
        payload = torch.empty(head_bytes + -(-len(values) // 8), dtype=torch.uint8)
        data = payload.numpy()
        signs = data[head_bytes:]
        means = _means(values, width, context.start, signs, added)
        data[:head_bytes] = np.frombuffer(means.tobytes(), np.uint8)
        if rest is not None:
            for span, read in _read(signs, means, len(values), width, context.start):
                torch.sub(values[span.begin : span.end], read, out=rest[span.begin : span.end])
        return payload

    def read(self, payload: Tensor, out: Tensor, context: CodecContext, *, add: bool = False) -> None:
        """The mean for each sign."""
        import torch

        width = self._width(context)
        rows = _rows(len(out), width, context.start)
        data, head_bytes = payload.numpy(), rows * _MEANS_BYTES
        if len(data) != head_bytes + -(-len(out) // 8):
            raise Corrupt(
                f"{len(data)} bytes are not {len(out)} signs and their means", where="codec one-bit"
            )
        means = np.frombuffer(data[:head_bytes].tobytes(), np.float32).reshape(2, rows)
        if not (np.isfinite(means).all() and (means[0] <= 0).all() and (means[1] >= 0).all()):
            raise Corrupt("the means do not have the signs of their elements", where="codec one-bit")
        whole = len(out) // 8 * 8
        if rows == 1 and not add and whole:  # write directly to `out`
            table, signs = _table(means[:, 0]), data[head_bytes:]
            for begin in range(0, whole, BLOCK):
                end = min(begin + BLOCK, whole)
                there = out[begin:end].numpy().reshape(-1, 8)
                np.take(table, signs[begin // 8 : end // 8], axis=0, out=there, mode="clip")
            out[whole:] = torch.from_numpy(table[signs[-1]])[: len(out) - whole]
            return
        for span, read in _read(data[head_bytes:], means, len(out), width, context.start):
            block = out[span.begin : span.end]
            if add:
                block.add_(read)
            else:
                block.copy_(read)

    def bound(self, values: Tensor) -> Tensor:
        """The distance to the mean; with per=column, to the furthest possible mean."""
        import torch

        negative = values < 0
        if self.per == "tensor" and len(values):
            below, above = (float(mean) for mean in _means(values, 0, 0)[:, 0])
            distance = (values - torch.where(negative, below, above)).abs_()
            # Sums and this difference may round differently than when they were written.
            return distance.mul_(1 + _SLACK).add_(torch.where(negative, -below, above) * _SLACK)
        magnitudes = values.abs()
        lowest = float(values.min().clamp(max=0)) if len(values) else 0.0
        highest = float(values.max().clamp(min=0)) if len(values) else 0.0
        most = torch.where(negative, -lowest, highest)
        return torch.maximum(magnitudes, most - magnitudes).add_(most * _SLACK)

    def _width(self, context: CodecContext) -> int:
        """The elements per row; 0 if the whole piece shares its means."""
        width = math.prod(context.shape[1:]) if context.shape else 0
        return width if self.per == "column" and width >= _SHORTEST_ROW else 0


def _rows(length: int, width: int, start: int) -> int:
    """The number of rows that a piece overlaps."""
    if not length or not width:
        return min(length, 1)
    return (start + length - 1) // width - start // width + 1


def _spans(length: int, width: int, start: int) -> Iterator[_Span]:
    """Split the piece into spans that fit the cache: whole rows, or parts of one."""
    at = row = 0
    if not width:
        width, start = length, 0
    while at < length:
        left = width - (start + at) % width  # of the current row
        if left == width <= min(BLOCK, length - at):
            rows = min(BLOCK, length - at) // width
            end = at + rows * width
        else:
            rows = 1
            end = min(at + min(left, BLOCK), length)
        yield _Span(at, end, row, rows)
        row += rows if end - at >= left else 0
        at = end


def _means(
    values: Tensor,
    width: int,
    start: int,
    signs: Bytes | None = None,
    added: Tensor | None = None,
) -> Floats:
    """For each row, the mean of its negative elements and the mean of the others; 0 if there are none.

    Also writes the signs of all elements to `signs`, and first adds `added` to the values.
    """
    import torch

    rows = _rows(len(values), width, start)
    sums, counts = np.zeros((2, rows)), np.zeros((2, rows), np.int64)
    scratch = torch.empty(min(len(values), BLOCK))
    for span in _spans(len(values), width, start):
        part = values[span.begin : span.end].view(span.rows, -1)
        if added is not None:
            part.add_(added[span.begin : span.end].view(span.rows, -1))
        place, room = slice(span.row, span.row + span.rows), scratch[: part.numel()].view(part.shape)
        below = part.numpy() < 0
        marks = np.packbits(below, axis=1)
        if signs is not None:
            _put_signs(signs, below, marks, span)
        negative = np.bitwise_count(marks).sum(axis=1, dtype=np.int64)
        counts[0, place] += negative
        counts[1, place] += part.shape[1] - negative
        for side, clamped in enumerate(({"max": 0.0}, {"min": 0.0})):
            torch.clamp(part, **clamped, out=room)
            total = room.sum(1)
            if not bool(total.isfinite().all()):  # values near the largest float32
                total = room.sum(1, dtype=torch.float64)
            sums[side, place] += total.numpy()
    return (sums / np.maximum(counts, 1)).astype(np.float32)


def _put_signs(signs: Bytes, flags: npt.NDArray[np.bool_], marks: Bytes, span: _Span) -> None:
    """Write a span's signs; `marks` are the same, but each row begins at a new byte."""
    inside = span.begin % 8
    if not inside and (span.rows == 1 or flags.shape[1] % 8 == 0):
        packed = marks.reshape(-1)
    else:
        packed = np.packbits(np.concatenate([np.zeros(inside, np.bool_), flags.reshape(-1)]))
        if inside:
            packed[0] |= signs[span.begin // 8]  # keep the end of the previous span
    signs[span.begin // 8 : -(-span.end // 8)] = packed


def _read(
    signs: Bytes, means: Floats, length: int, width: int, start: int
) -> Iterator[tuple[_Span, Tensor]]:
    """The values of the signs, span by span, in reused memory."""
    import torch

    scratch = np.empty(-(-min(length, BLOCK) // 8) * 8, np.float32)
    table = _table(means[:, 0]) if means.shape[1] == 1 else None
    words = means.view(np.int32)
    differing = words[0] ^ words[1]
    for span in _spans(length, width, start):
        size = span.end - span.begin
        if table is not None:  # then all spans begin at whole bytes
            packed = signs[span.begin // 8 : -(-span.end // 8)]
            np.take(table, packed, axis=0, out=scratch[: 8 * len(packed)].reshape(-1, 8), mode="clip")
        else:
            flags = np.unpackbits(signs[span.begin // 8 : -(-span.end // 8)])[span.begin % 8 :][:size]
            place = slice(span.row, span.row + span.rows)
            out = scratch[:size].view(np.int32)
            np.negative(flags, out=out, dtype=np.int32)  # all bits where negative
            grid = out.reshape(span.rows, -1)
            grid &= differing[place, None]
            grid ^= words[1, place, None]
        yield span, torch.from_numpy(scratch[:size])


def _table(means: Floats) -> Floats:
    """The values of eight elements, for every possible byte of signs."""
    flags = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1)
    table: Floats = np.where(flags, means[0], means[1])
    return table
