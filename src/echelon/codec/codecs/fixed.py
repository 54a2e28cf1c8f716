"""fixed: integers of a few bits, on evenly spaced levels from -range to +range.

With b bits, the levels are -L ... L times range / L, L = 2^(b-1) - 1; with one bit, -range and +range.
Three levels (2 bits) take 1.6 bits. The error of an element is at most half a step (a step with stochastic
rounding), and no level is beyond the range.

`range=0` uses the largest magnitude of the piece, which is sent along; a total is added up in float32 and
written again. A given `range` is equal on all workers, so that their numbers are added as they are: the
total is exact, takes lg(workers) more bits, and needs no second rounding. Values beyond a given range are
clamped, and counted in the state as `saturated`.

Gupta et al. (2015), "Deep Learning with Limited Numerical Precision", for stochastic rounding: its mean is
the value itself, to 2^-17 of a step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np

from echelon.codec.bits import Bytes
from echelon.codec.codec import SATURATED, Codec, CodecContext, State, Travels
from echelon.codec.grid import Coder, Grid, largest, most_code, reaching
from echelon.errors import ConfigError, Corrupt

if TYPE_CHECKING:
    from torch import Tensor

_HEAD_BYTES = 4  # the range as float32, or in a total of added numbers, the number of workers


@dataclass(frozen=True, slots=True, kw_only=True)
class Fixed(Codec):
    """Fixed point of `bits` bits, up to the largest magnitude or `range`; with `range`, sums are exact."""

    name: ClassVar[str] = "fixed"
    travels: ClassVar[Travels] = "scatter"
    bits: int = 8
    rounding: Literal["nearest", "stochastic"] = "nearest"
    range: float = 0.0

    @property
    def contracts(self) -> bool:
        """Only if small values are never rounded to large ones, randomly or for lack of a level zero."""
        return self.bits > 1 and self.rounding == "nearest"

    def __post_init__(self) -> None:
        if not 1 <= self.bits <= 16:
            raise ConfigError(
                f"a fixed-point number cannot have {self.bits} bits",
                where="codec fixed, bits",
                fix="give 1 to 16; at 16 bits, fp16 and bf16 are better for small values",
            )
        if self.rounding not in ("nearest", "stochastic"):
            raise ConfigError(
                f"unknown rounding {self.rounding!r}",
                where="codec fixed, rounding",
                fix="give nearest or stochastic",
            )
        if self.range != 0 and not 2.0**-126 <= self.range <= 2.0**127:
            raise ConfigError(
                f"range cannot be {self.range:g}",
                where="codec fixed, range",
                fix="give the largest magnitude to expect, or 0 for that of each piece",
            )

    def begin(self, length: int) -> State:
        """A count of saturated values, if there is a range."""
        import torch

        return {SATURATED: torch.zeros(1, dtype=torch.int64)} if self.range else {}

    def write(
        self, values: Tensor, state: State, context: CodecContext, rest: Tensor | None = None
    ) -> Tensor:
        """The range, if it is the piece's own, and the codes."""
        if self.range:
            coder = self._coder(len(values), context)
            payload, data = _room(coder.grid.size_bytes(len(values)))
            coder.write(values, data, rest)
            _count(state, coder)
            return payload
        most = np.float32(largest(values))
        coder = self._coder(len(values), context, float(most))
        payload, data = _room(_HEAD_BYTES + coder.grid.size_bytes(len(values)))
        data[:_HEAD_BYTES] = np.frombuffer(most.tobytes(), np.uint8)
        coder.write(values, data[_HEAD_BYTES:], rest)
        return payload

    def read(self, payload: Tensor, out: Tensor, context: CodecContext, *, add: bool = False) -> None:
        """The levels of the codes."""
        data, most = payload.numpy(), self.range
        if not self.range:
            self._check(len(data) >= _HEAD_BYTES, data, out)
            most = float(np.frombuffer(data[:_HEAD_BYTES].tobytes(), np.float32)[0])
            self._check(math.isfinite(most) and most >= 0, data, out)
            data = data[_HEAD_BYTES:]
        grid = self._grid(most)
        self._check(len(data) == grid.size_bytes(len(out)), data, out)
        Coder(grid, len(out)).read(data, out, add=add)

    def merge(self, parts: Sequence[Tensor], own: Tensor, state: State, context: CodecContext) -> Tensor:
        """With a given range, the sum of all workers' codes; otherwise the default."""
        if not self.range:
            return Codec.merge(self, parts, own, state, context)
        coder = self._coder(len(own), context)
        for part in parts:
            self._check(len(part) == coder.grid.size_bytes(len(own)), part.numpy(), own)
        writers = len(parts) + 1
        payload, data = _room(_HEAD_BYTES + coder.grid.total(writers).size_bytes(len(own)))
        data[:_HEAD_BYTES] = np.frombuffer(np.uint32(writers).tobytes(), np.uint8)
        coder.merge([part.numpy() for part in parts], own, data[_HEAD_BYTES:])
        _count(state, coder)
        return payload

    def read_total(self, payload: Tensor, out: Tensor, state: State, context: CodecContext) -> None:
        """Read what `merge` wrote."""
        if not self.range:
            self.read(payload, out, context)
            return
        data = payload.numpy()
        self._check(len(data) >= _HEAD_BYTES, data, out)
        writers = int(np.frombuffer(data[:_HEAD_BYTES].tobytes(), np.uint32)[0])
        grid = self._grid(self.range)
        self._check(0 < writers < 2**16, data, out)
        self._check(len(data) == _HEAD_BYTES + grid.total(writers).size_bytes(len(out)), data, out)
        Coder(grid, len(out)).read(data[_HEAD_BYTES:], out, writers=writers)

    def bound(self, values: Tensor) -> Tensor:
        """Half a step, or a step with stochastic rounding, plus any excess over a given range."""
        most = self.range or largest(values)
        return self._grid(most).bound(values, stochastic=self.rounding == "stochastic")

    def _grid(self, most: float) -> Grid:
        return reaching(most, most_code(self.bits))

    def _coder(self, count: int, context: CodecContext, most: float = 0.0) -> Coder:
        random = context.stream() if self.rounding == "stochastic" else None
        limits = (self.range,) if self.range else ()
        return Coder(self._grid(self.range or most), count, random=random, limits=limits)

    def _check(self, right: bool, data: Bytes, out: Tensor) -> None:
        if not right:
            raise Corrupt(
                f"these {len(data)} bytes are not {len(out)} numbers of {self.bits} bits",
                where="codec fixed",
            )


def _room(size_bytes: int) -> tuple[Tensor, Bytes]:
    import torch

    payload = torch.empty(size_bytes, dtype=torch.uint8)
    return payload, payload.numpy()


def _count(state: State, coder: Coder) -> None:
    if SATURATED in state and coder.beyond[0]:
        state[SATURATED] += coder.beyond[0]
