"""Rounds values to evenly spaced levels, written as codes of few bits, and reads them back.

Code c means (c - top/2) step, c = 0 ... top: levels on both sides of zero, and zero itself if `top` is
even. Codes of several writers on one grid can be added as they are: the sum of w codes is exactly a code on
the grid of the same step with w times the top. Three levels are packed in base 3, all others in bits.

Values are rounded to the nearest level, or randomly to one of the two neighbouring levels so that the mean
is the value (stochastic): 16 random bits are compared with the fraction between the levels. The mean is
then right to 2^-17 of a step, and to the rounding of float32.

Nothing here overflows or underflows for any finite float32: if steps are below 2^-60 or above 2^40, values
are first multiplied by a power of two (`lift`). A value that is read is never beyond the outermost level.
All work is done in blocks that stay in the cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from echelon.codec.bits import (
    BLOCK,
    Bytes,
    Codes,
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

if TYPE_CHECKING:
    from torch import Tensor

_MAGIC = 1.5 * 2**23  # adding it to a small float32 leaves the rounded integer in the lowest bits
_MAGIC_WORD = 0x4B400000  # its bits
_ONE = 1 << 16  # a step in stochastic rounding
_SLACK = 2.0**-22  # of the range: the rounding error of multiplying by 1/step and by step
_MOST = float(np.finfo(np.float32).max)
_LEAST = 2.0**-148  # two of the smallest float32


@dataclass(frozen=True, slots=True)
class Grid:
    """Levels `step` apart around zero, with codes from 0 to `top`."""

    top: int
    step: float

    @property
    def limit(self) -> float:
        """The value of the outermost level."""
        return self.top / 2 * self.step

    @property
    def lift(self) -> float:
        """The power of two that scales values to a range where float32 computes well."""
        return 2.0**64 if self.step < 2.0**-60 else 2.0**-64 if self.step > 2.0**40 else 1.0

    @property
    def code(self) -> type[np.uint8] | type[np.uint16] | type[np.uint32]:
        """The type of a code."""
        return code_type(self.top.bit_length())

    def bound(self, values: Tensor, *, stochastic: bool) -> Tensor:
        """The largest error of each value: a step or half a step, plus any excess over the limit."""
        error = self.step * (1.0 if stochastic else 0.5) + self.limit * _SLACK + _LEAST
        beyond = values.abs().sub_(min(self.limit, _MOST)).clamp_(min=0)
        return beyond.mul_(1 + _SLACK).add_(min(error * (1 + _SLACK), _MOST))

    def total(self, writers: int) -> Grid:
        """The grid of sums of `writers` codes."""
        return Grid(self.top * writers, self.step)

    def size_bytes(self, count: int) -> int:
        """The size of `count` codes."""
        return digits_bytes(count) if self.top == 2 else packed_bytes(count, self.top.bit_length())

    def pack(self, codes: Codes, out: Bytes) -> None:
        """Write the codes of a block to these bytes."""
        if self.top == 2:
            pack_digits(codes.view(np.uint8), out)
        else:
            pack(codes, self.top.bit_length(), out)

    def unpack(self, data: Bytes, count: int) -> Codes:
        """Read the codes of a block. Raises Corrupt if a code is not on this grid."""
        if self.top == 2:
            return unpack_digits(data, count)
        codes = unpack(data, self.top.bit_length(), count)
        if count and codes.max() > self.top:
            raise Corrupt(f"a number is {codes.max()} where {self.top} is the largest", where="codec")
        return codes


def most_code(bits: int) -> int:
    """The largest code of `bits` bits: an odd number of levels, so that one is zero; two for 1 bit."""
    return 2**bits - 2 if bits > 1 else 1


def reaching(most: float, top: int) -> Grid:
    """The grid with this largest code whose outermost level is `most`, or the next float32 below it."""
    half = top / 2
    lift = Grid(top, most / half).lift
    step = np.float32(most * lift / half)
    if float(step) * half > most * lift:  # or the outermost level would be infinite
        step = np.nextafter(step, np.float32(0))
    return Grid(top, float(step) / lift)


def largest(values: Tensor) -> float:
    """The largest magnitude; 0 for an empty tensor."""
    array, most = values.numpy(), 0.0
    for begin, end in blocks(len(array)):
        block = array[begin:end]
        most = max(most, float(block.max()), -float(block.min()))
    return most


class Coder:
    """Writes values as codes on one grid, and reads them; it reuses its own memory.

    `limits`, in falling order, are magnitudes to watch: `beyond` counts the values above each, and
    `largest` is the largest value. Values above the first limit are clamped to it. Without limits, no value
    may exceed the grid's limit, unless `random` gives the bits for stochastic rounding.
    """

    def __init__(
        self,
        grid: Grid,
        count: int,
        *,
        random: np.random.Generator | None = None,
        limits: Sequence[float] = (),
    ) -> None:
        import torch

        self.grid = grid
        self.limits = tuple(limits)
        self.beyond = [0] * len(self.limits)
        self.largest = 0.0
        self._random = random.bit_generator if random is not None else None
        self._floats = torch.empty(min(count, BLOCK))
        self._clamped = torch.empty(min(count, BLOCK) if limits else 0)
        self._words = np.empty(min(count, BLOCK) if random is not None else 0, np.int32)

    def write(self, values: Tensor, out: Bytes, rest: Tensor | None = None) -> None:
        """Write the codes of the values to `out`, and the rounding errors to `rest`."""
        grid = self.grid
        for begin, end in blocks(len(values)):
            codes = self._codes_of(values[begin:end], rest[begin:end] if rest is not None else None)
            grid.pack(codes, out[grid.size_bytes(begin) : grid.size_bytes(end)])

    def merge(self, parts: Sequence[Bytes], own: Tensor, out: Bytes, rest: Tensor | None = None) -> None:
        """Write the sums of the codes of `own` and of the codes in `parts`."""
        grid, total = self.grid, self.grid.total(len(parts) + 1)
        for begin, end in blocks(len(own)):
            codes = self._codes_of(own[begin:end], rest[begin:end] if rest is not None else None)
            codes = codes.astype(total.code)
            for part in parts:
                codes += grid.unpack(part[grid.size_bytes(begin) : grid.size_bytes(end)], end - begin)
            total.pack(codes, out[total.size_bytes(begin) : total.size_bytes(end)])

    def read(self, data: Bytes, out: Tensor, *, writers: int = 1, add: bool = False) -> None:
        """Read the values of codes summed over `writers` into `out`, or add them to it."""
        total = self.grid.total(writers)
        for begin, end in blocks(len(out)):
            block = out[begin:end]
            codes = total.unpack(data[total.size_bytes(begin) : total.size_bytes(end)], end - begin)
            if add:
                block.add_(self._values_of(codes, total, self._floats[: len(codes)]))
            else:
                self._values_of(codes, total, block)

    def _codes_of(self, values: Tensor, rest: Tensor | None) -> Codes:
        import torch

        codes = np.empty(len(values), self.grid.code)
        near = self._watched(values) if self.limits else values
        if not self.grid.step:
            codes.fill(self.grid.top // 2)
        elif self._random is not None:
            self._stochastic(near, codes, self._random)
        elif self.grid.top == 1:
            np.greater_equal(near.numpy(), 0, out=codes.view(np.bool_))
        else:
            self._nearest(near, codes)
        if rest is not None:
            read = self._values_of(codes.copy(), self.grid, self._floats[: len(codes)])
            torch.sub(values, read, out=rest)
        return codes

    def _watched(self, values: Tensor) -> Tensor:
        """The values, clamped to the first limit; counts the values above each limit."""
        import torch

        array = values.numpy()
        most = max(float(array.max()), -float(array.min()))
        self.largest = max(self.largest, most)
        if most > self.limits[-1]:
            magnitudes = np.abs(array, out=self._floats[: len(array)].numpy())
            for at, limit in enumerate(self.limits):
                if most > limit:
                    self.beyond[at] += int(np.count_nonzero(magnitudes > np.float32(limit)))
        if most <= self.limits[0]:
            return values
        return torch.clamp(values, -self.limits[0], self.limits[0], out=self._clamped[: len(array)])

    def _nearest(self, values: Tensor, codes: Codes) -> None:
        import torch

        grid, floats = self.grid, self._floats[: len(codes)]
        if grid.lift != 1:
            values = torch.mul(values, grid.lift, out=floats)
        centre = torch.tensor(_MAGIC + grid.top // 2)
        torch.add(centre, values, alpha=1 / (grid.step * grid.lift), out=floats)
        np.copyto(codes, floats.numpy().view(np.int32), casting="unsafe")

    def _stochastic(self, values: Tensor, codes: Codes, random: np.random.BitGenerator) -> None:
        import torch

        grid, floats, words = self.grid, self._floats[: len(codes)], self._words[: len(codes)]
        if grid.lift != 1:
            values = torch.mul(values, grid.lift, out=floats)
        scale, most = _ONE / (grid.step * grid.lift), grid.top / 2 * _ONE
        # A rounding error beyond the outermost level would carry, so both branches clamp.
        if most < 2**22:
            torch.add(torch.tensor(_MAGIC), values, alpha=scale, out=floats)
            floats.clamp_(_MAGIC - most, _MAGIC + most)
            words, zero = floats.numpy().view(np.int32), _MAGIC_WORD >> 16
        else:
            torch.mul(values, scale, out=floats).clamp_(-most, most).round_()
            torch.from_numpy(words).copy_(floats)
            zero = 0
        chances = random.random_raw(-(-len(codes) // 4)).view(np.uint16)
        np.add(words, chances[: len(codes)], out=words, casting="unsafe")
        if grid.top % 2:  # zero is halfway between two levels
            words += _ONE // 2
        words >>= 16
        np.copyto(codes, words, casting="unsafe")
        codes += np.array(grid.top // 2 - zero).astype(codes.dtype)  # wraps around to the lowest bits

    def _values_of(self, codes: Codes, grid: Grid, out: Tensor) -> Tensor:
        """The values of codes on a grid; overwrites the codes."""
        import torch

        if grid.top % 2:
            out.copy_(torch.from_numpy(codes)).sub_(grid.top / 2)
        else:  # after this subtraction they are signed numbers of the same size
            np.subtract(codes, grid.top // 2, out=codes)
            out.copy_(torch.from_numpy(codes.view(f"i{codes.itemsize}")))
        out.mul_(grid.step * grid.lift)
        return out if grid.lift == 1 else out.mul_(1 / grid.lift)
