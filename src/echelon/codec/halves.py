"""Writes float32 values in a 16-bit floating-point type, so that nothing becomes infinite.

The payload holds the values, rounded to nearest, and one byte: an exponent e. Values are written times
2^-e. e is 0 unless a value would become infinite; then it is the smallest exponent that avoids it. So an
overflow costs small values some of their last bits, and nothing else.

    |read - written| <= relative |written| + smallest 2^e
"""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from echelon.codec.bits import blocks
from echelon.codec.codec import Codec, CodecContext, State, Travels
from echelon.codec.grid import largest
from echelon.errors import Corrupt

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_MOST_EXPONENT = 127
_MOST = float(np.finfo(np.float32).max)


class Halves(Codec):
    """A codec that rounds to a 16-bit floating-point type."""

    __slots__ = ()
    travels: ClassVar[Travels] = "scatter"
    infinity: ClassVar[int]  # the bits of infinity, without the sign
    overflow: ClassVar[float]  # the smallest magnitude that is rounded to infinity
    relative: ClassVar[float]
    smallest: ClassVar[float]

    @abstractmethod
    def dtype(self) -> torch.dtype:
        """The type that values are rounded to."""

    def write(
        self, values: Tensor, state: State, context: CodecContext, rest: Tensor | None = None
    ) -> Tensor:
        """The rounded values, and the exponent in the last byte."""
        import torch

        count = len(values)
        payload = torch.from_numpy(np.empty(2 * count + 1, np.uint8))  # numpy uses large pages where it can
        halves = payload[: 2 * count].view(self.dtype())
        exponent = 0
        if not self._cast(values, halves):
            exponent = self._exponent(largest(values))
            self._cast(values, halves, 2.0**-exponent)
        payload[-1] = exponent
        if rest is not None:
            scratch = torch.empty(_room(count))
            for begin, end in blocks(count):
                read = _scaled(scratch[: end - begin].copy_(halves[begin:end]), exponent)
                torch.sub(values[begin:end], read, out=rest[begin:end])
        return payload

    def read(self, payload: Tensor, out: Tensor, context: CodecContext, *, add: bool = False) -> None:
        """The values as float32."""
        if len(payload) != 2 * len(out) + 1:
            raise Corrupt(
                f"{len(payload)} bytes are not {len(out)} halves and an exponent",
                where=f"codec {self.name}",
            )
        exponent = int(payload[-1])
        if exponent > _MOST_EXPONENT:
            raise Corrupt(f"an exponent is {exponent}", where=f"codec {self.name}")
        payload = payload[:-1]
        if payload.data_ptr() % 2 or payload.storage_offset() % 2:  # not aligned in the received message
            payload = payload.clone()
        halves = payload.view(self.dtype())
        for begin, end in blocks(len(out)):
            if add:
                out[begin:end].add_(_scaled(halves[begin:end].float(), exponent))
            else:
                _scaled(out[begin:end].copy_(halves[begin:end]), exponent)

    def bound(self, values: Tensor) -> Tensor:
        """Half a unit in the last place, and half the smallest number, scaled like the values."""
        most = largest(values)
        exponent = self._exponent(most) if most >= self.overflow else 0
        return values.abs().mul_(self.relative).add_(self.smallest * 2.0**exponent)

    def _exponent(self, most: float) -> int:
        exponent = max(0, math.frexp(most)[1] - math.frexp(self.overflow)[1])
        return exponent + (most * 2.0**-exponent >= self.overflow)

    def _cast(self, values: Tensor, halves: Tensor, scale: float = 1.0) -> bool:
        """Write the values; returns whether all are finite. Checks each block while it is in the cache."""
        import torch

        scaled = torch.empty(_room(len(values)) if scale != 1 else 0)
        for begin, end in blocks(len(values)):
            block, written = values[begin:end], halves[begin:end]
            if scale != 1:
                block = torch.mul(block, scale, out=scaled[: end - begin])
            written.copy_(block)
            bits = written.view(torch.int16).numpy()
            # As signed numbers, infinity is above all finite values; as unsigned ones, minus infinity is.
            if bits.max() >= self.infinity or bits.view(np.uint16).max() >= self.infinity + 2**15:
                return False
        return True


def _scaled(block: Tensor, exponent: int) -> Tensor:
    """A block times 2^exponent; clamped, because the largest float32 may have rounded up to infinity."""
    return block.mul_(2.0**exponent).clamp_(-_MOST, _MOST) if exponent else block


def _room(count: int) -> int:
    return next((end for _, end in blocks(count)), 0)
