"""Chooses elements of a gradient and writes them, for all sparse codecs.

Choosing. `largest` finds the k largest magnitudes without sorting all of them. A sample, every s-th
element, gives a threshold that slightly more than k elements should reach; one pass over the values, in
blocks that fit the cache, finds those that do; of these few, the k largest are taken. If the threshold was
too high, a lower one is tried, and finally all values are compared. So the sample only affects speed.
Invariant: the choice depends only on the values. Of equal magnitudes the first ones are taken; zeros never
are.

Writing. A piece holds the number of chosen elements m (uint32), their positions (`positions.py`), and their
values (float32, or as another codec writes them). All numbers are little-endian.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import TYPE_CHECKING, ClassVar, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from echelon.codec import positions as places
from echelon.codec.bits import Bytes
from echelon.codec.codec import RESIDUAL, Codec, CodecContext, State, Travels
from echelon.codec.positions import Positions
from echelon.errors import ConfigError, Corrupt

if TYPE_CHECKING:
    from torch import Tensor

Floats: TypeAlias = npt.NDArray[np.float32]
Side = Literal[-1, 0, 1]  # only negative, all, or only positive elements

BLOCK = 1 << 16  # elements per block: small enough to stay in the cache
HEAD_BYTES = 4
ROUNDING = 2.0**-20  # more than the sum of a few roundings, for bounds that are computed in float32
_ENOUGH = 100  # chosen elements that a sample should contain to estimate the threshold well
_SMALLEST = np.nextafter(np.float32(0), np.float32(1))


class Source:
    """Values to choose from, possibly computed block by block.

    `peek` gives some elements early; `block` is called once for each block, in order; then `values` is
    complete.
    """

    def __init__(self, values: Floats) -> None:
        self.values = values

    def peek(self, cut: slice) -> Floats:
        """Some elements with their final values."""
        return self.values[cut]

    def block(self, start: int, stop: int) -> Floats:
        """Complete and return a range of elements."""
        return self.values[start:stop]


def largest(source: Source, count: int, *, sample: float, step: int = 0, side: Side = 0) -> Positions:
    """The positions, sorted, of the `count` largest elements by magnitude; fewer if the rest are zeros."""
    length = len(source.values)
    stride = _stride(length, count, sample)
    if stride > 1:
        seen = _magnitude(source.peek(slice(step % stride, None, stride)), side)
        for factor in (1, 4):
            threshold = _threshold(seen, count / length, factor)
            found = reaching(source, threshold, side)
            if len(found) >= count or threshold == _SMALLEST:
                return found[_top(_magnitude(source.values[found], side), count)]
            source = Source(source.values)
    else:
        for start in range(0, length, BLOCK):
            source.block(start, min(start + BLOCK, length))
    return _top(_magnitude(source.values, side), count)


def reaching(source: Source, threshold: np.float32, side: Side = 0) -> Positions:
    """The positions, sorted, of the elements whose magnitude is at least a threshold."""
    length = len(source.values)
    magnitude = np.empty(min(BLOCK, length), np.float32)
    reached = np.empty(len(magnitude), np.bool_)
    found = []
    for start in range(0, length, BLOCK):
        values = source.block(start, min(start + BLOCK, length))
        part, which = magnitude[: len(values)], reached[: len(values)]
        if side == 0:
            np.greater_equal(np.abs(values, out=part), threshold, out=which)
        elif side > 0:
            np.greater_equal(values, threshold, out=which)
        else:
            np.less_equal(values, -threshold, out=which)
        found.append(np.flatnonzero(which) + start)
    return np.concatenate(found) if found else np.empty(0, np.int64)


def _stride(length: int, count: int, sample: float) -> int:
    """Sampling stride, 1 for all elements. It is odd, because rows often have even lengths."""
    if not 0 < count < length or not sample:
        return 1
    wanted = max(length * sample, _ENOUGH * length / count)
    return max(1, int(length / wanted) - 1 | 1)


def _threshold(seen: Floats, ratio: float, factor: int) -> np.float32:
    """A magnitude that `factor` times this part of the elements, or a few more, should reach."""
    expected = len(seen) * ratio * factor
    rank = min(len(seen), math.ceil(expected + 3 * math.sqrt(expected)))
    return max(np.float32(np.partition(seen, len(seen) - rank)[len(seen) - rank]), _SMALLEST)


def _magnitude(values: Floats, side: Side) -> Floats:
    if side == 0:
        return np.abs(values)
    return np.maximum(values if side > 0 else -values, np.float32(0))


def _top(magnitude: Floats, count: int) -> Positions:
    """The positions of the `count` largest magnitudes, sorted. Of equal ones the first are taken, so that
    the choice does not depend on smaller elements that were removed before.
    """
    if count >= len(magnitude):
        return np.flatnonzero(magnitude)
    if count == 0:
        return np.empty(0, np.int64)
    at = len(magnitude) - count
    least = np.partition(magnitude, at)[at]
    taken = magnitude > max(least, np.float32(0))
    if least > 0:
        equal = np.flatnonzero(magnitude == least)
        taken[equal[: count - int(np.count_nonzero(taken))]] = True
    return np.flatnonzero(taken)


def pack(positions: Positions, length: int, values: Bytes) -> Tensor:
    """The bytes of a piece, from the chosen positions and the bytes of their values."""
    import torch

    count = np.array([len(positions)], "<u4").view(np.uint8)
    return torch.from_numpy(np.concatenate([count, places.write(positions, length), values]))


def unpack(payload: Tensor, length: int) -> tuple[Positions, Bytes]:
    """Split a piece into positions and value bytes; raises Corrupt if it is not a piece of that length."""
    data: Bytes = payload.numpy()
    if len(data) < HEAD_BYTES:
        raise Corrupt(f"a sparse piece of {len(data)} bytes", where="codec")
    count = int(data[:HEAD_BYTES].view("<u4")[0])
    if count > length:
        raise Corrupt(f"{count} elements chosen out of {length}", where="codec")
    stop = HEAD_BYTES + places.size_bytes(length, count)
    if len(data) < stop:
        raise Corrupt(f"a piece of {len(data)} bytes is cut off", where="codec")
    return places.read(data[HEAD_BYTES:stop], length, count), data[stop:]


def bytes_of(values: Tensor) -> Tensor:
    """Copy float32 numbers to bytes."""
    import torch

    # With numpy, because torch cannot view an empty tensor as another type.
    return torch.from_numpy(values.numpy().astype("<f4").view(np.uint8))


def numbers_of(payload: Tensor, count: int) -> Tensor:
    """Copy bytes to `count` float32 numbers; raises Corrupt for any other length."""
    import torch

    if len(payload) != 4 * count:
        raise Corrupt(f"{len(payload)} bytes for {count} numbers", where="codec")
    return torch.from_numpy(payload.numpy().view("<f4").astype(np.float32))


def put(positions: Positions, values: Floats | np.float32, out: Tensor, *, add: bool) -> None:
    """Write the values at their positions and zeros elsewhere, or add the values to `out`."""
    target: Floats = out.numpy()
    if add:
        with np.errstate(invalid="ignore", over="ignore"):  # a gradient may be infinite
            target[positions] += values
    else:
        target.fill(0)
        target[positions] = values


def leave(values: Tensor, positions: Positions, left: Floats | np.float32, rest: Tensor | None) -> None:
    """Write what remains after sending to `rest`: all other elements, and `left` of the chosen ones."""
    if rest is None:
        return
    if rest is not values:
        rest.copy_(values)
    rest.numpy()[positions] = left


def check_ratio(ratio: float, name: str = "ratio") -> None:
    """Refuse a ratio that is not in (0, 1]."""
    if not 0 < ratio <= 1:
        raise ConfigError(
            f"{name} is {ratio:g}, it has to be above 0 and at most 1",
            where=name,
            fix="give the fraction of elements to send, such as 0.01",
        )


def check_sample(sample: float) -> None:
    """Refuse a sample that is not in [0, 1]."""
    if not 0 <= sample <= 1:
        raise ConfigError(
            f"sample is {sample:g}, it has to be from 0 to 1",
            where="sample",
            fix="give the fraction of elements to sample first, such as 0.01, or 0 for no sampling",
        )


class Sparse(Codec):
    """A codec that sends some elements exactly, and leaves out the others."""

    __slots__ = ()
    travels: ClassVar[Travels] = "gather"

    @abstractmethod
    def choose(self, values: Tensor, context: CodecContext) -> Positions:
        """The elements to send; depends only on the values and the context's step."""

    @property
    def stages(self) -> tuple[int, ...]:
        """The steps at which the way of choosing changes."""
        return (0,)

    def pick(self, values: Tensor, state: State, context: CodecContext) -> tuple[Tensor, Positions]:
        """The values to choose from, including the residual, and the positions chosen.

        With feedback these values are the state's residual: the caller removes the elements that it sends.
        """
        given = state[RESIDUAL].add_(values) if self.feedback else values
        return given, self.choose(given, context)

    def encode(self, values: Tensor, state: State, context: CodecContext) -> Tensor:
        """The chosen elements; with feedback they are removed from the residual."""
        given, positions = self.pick(values, state, context)
        return self._written(given, positions, given if self.feedback else None)

    def write(
        self, values: Tensor, state: State, context: CodecContext, rest: Tensor | None = None
    ) -> Tensor:
        """The chosen elements."""
        return self._written(values, self.choose(values, context), rest)

    def _written(self, values: Tensor, positions: Positions, rest: Tensor | None) -> Tensor:
        taken: Floats = values.numpy()[positions]
        leave(values, positions, np.float32(0), rest)
        return pack(positions, len(values), taken.astype("<f4", copy=False).view(np.uint8))

    def read(self, payload: Tensor, out: Tensor, context: CodecContext, *, add: bool = False) -> None:
        """The chosen elements, zeros elsewhere."""
        positions, data = unpack(payload, len(out))
        if len(data) != 4 * len(positions):
            raise Corrupt(f"{len(data)} bytes for {len(positions)} values", where=f"codec {self.name}")
        put(positions, data.view("<f4"), out, add=add)

    def bound(self, values: Tensor) -> Tensor:
        """Zero for chosen elements, the magnitude for others."""
        bound = values.abs()
        bound.numpy()[self.choose(values, CodecContext(step=self.stages[-1]))] = 0
        return bound
