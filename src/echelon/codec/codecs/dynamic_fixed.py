"""dynamic-fixed: fixed point whose scale follows the gradients of each parameter.

As in Courbariaux et al. (2014), "Training deep neural networks with low precision multiplications": a
parameter has an exponent e; its values are written with b bits in steps of 2^(e-b+1), up to (2^(b-1) - 1)
steps. After each training step, e rises by one if more than `most_overflow` of the values were out of
range; e falls by one if no more than that would have been out of half the range. It begins at 0. It jumps
to where the largest value fits after the first step, and whenever most values were out of range or all
rounded to zero.

e is equal on all workers, because it depends only on data that all of them read. So numbers are added
exactly as they are, as in `fixed` with a range. Each part reports how many of its values were beyond e and
beyond e-1, and which e would fit; totals report it for all workers; `settle` decides.

What is clamped or rounded is kept and added to the next step's values, unless `feedback` is off. The
writer's state counts clamped values as `saturated`.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import numpy as np

from echelon.codec.bits import Bytes
from echelon.codec.codec import RESIDUAL, SATURATED, Codec, CodecContext, State, Travels
from echelon.codec.grid import Coder, Grid, most_code
from echelon.errors import ConfigError, Corrupt

if TYPE_CHECKING:
    from torch import Tensor

EXPONENT = "exponent"
TALLY = (
    "tally"  # of this step: values, those out of range, those out of half the range, the fitting exponent
)
BEGUN = "begun"  # whether a step has been decided already

_FIRST = 0
_LOWEST, _HIGHEST = -126, 128  # all steps and levels in between are float32 numbers
_NOTHING = -(2**15)  # the fitting exponent of zeros
_HEAD = struct.Struct("<hhIQQ")


class _Head(NamedTuple):
    exponent: int
    fit: int
    writers: int
    beyond: int
    beyond_half: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DynamicFixed(Codec):
    """Fixed point of `bits` bits; the scale of each parameter follows how many values overflow it."""

    name: ClassVar[str] = "dynamic-fixed"
    travels: ClassVar[Travels] = "scatter"
    bits: int = 12
    most_overflow: float = 1e-4
    feedback: bool = True

    def __post_init__(self) -> None:
        if not 2 <= self.bits <= 16:
            raise ConfigError(
                f"a dynamic fixed-point number cannot have {self.bits} bits",
                where="codec dynamic-fixed, bits",
                fix="give 2 to 16; one-bit writes signs",
            )
        if not 0 <= self.most_overflow < 0.5:
            raise ConfigError(
                f"most_overflow cannot be {self.most_overflow:g}",
                where="codec dynamic-fixed, most_overflow",
                fix="give the share of values that may overflow, below one half, such as 1e-4",
            )

    def begin(self, length: int) -> State:
        """A scale with range 1, and empty counts."""
        import torch

        return Codec.begin(self, length) | {
            EXPONENT: torch.tensor([_FIRST]),
            TALLY: torch.tensor([0, 0, 0, _NOTHING]),
            BEGUN: torch.tensor([0]),
            SATURATED: torch.tensor([0]),
        }

    def write(
        self, values: Tensor, state: State, context: CodecContext, rest: Tensor | None = None
    ) -> Tensor:
        """The header for `settle`, and the codes; nothing for an empty piece."""
        return self._write(values, (), state, rest)

    def read(self, payload: Tensor, out: Tensor, context: CodecContext, *, add: bool = False) -> None:
        """The levels of the codes, or of sums of codes."""
        data = payload.numpy()
        if len(out) or len(data):
            head = self._head(data, len(out))
            coder = Coder(self._grid(head.exponent), len(out))
            coder.read(data[_HEAD.size :], out, writers=head.writers, add=add)

    def merge(self, parts: Sequence[Tensor], own: Tensor, state: State, context: CodecContext) -> Tensor:
        """The sums of all workers' codes and counts."""
        ranks = (rank for rank in range(len(parts) + 1) if rank != context.rank)
        written = []
        for part, rank in zip(parts, ranks, strict=False):
            if len(own):
                head = self._head(part.numpy(), len(own))
                if head.exponent != self._exponent(state) or head.writers != 1:
                    raise Corrupt(
                        f"worker {rank} has exponent {head.exponent}, this worker {self._exponent(state)}",
                        ranks=(rank,),
                        where="codec dynamic-fixed",
                        fix="give workers that join or resume the codec state of the others",
                    )
            written.append(part.numpy())
        if not self.feedback:
            return self._write(own, written, state, None)
        kept = state[RESIDUAL].add_(own)
        return self._write(kept, written, state, kept)

    def read_total(self, payload: Tensor, out: Tensor, state: State, context: CodecContext) -> None:
        """Read what `merge` wrote, and add its counts to those of other pieces."""
        self.read(payload, out, context)
        if not len(out):
            return
        head = self._head(payload.numpy(), len(out))
        if head.exponent != self._exponent(state):
            raise Corrupt(
                f"a total has exponent {head.exponent}, this worker {self._exponent(state)}",
                where="codec dynamic-fixed",
                fix="give workers that join or resume the codec state of the others",
            )
        values, beyond, beyond_half, fit = state[TALLY].tolist()
        counts = (
            values + len(out) * head.writers,
            beyond + head.beyond,
            beyond_half + head.beyond_half,
            max(fit, head.fit),
        )
        state[TALLY].copy_(state[TALLY].new_tensor(counts))

    def settle(self, state: State, context: CodecContext) -> None:
        """Decide the exponent of the next step."""
        values, beyond, beyond_half, fit = state[TALLY].tolist()
        state[TALLY].copy_(state[TALLY].new_tensor((0, 0, 0, _NOTHING)))
        if fit == _NOTHING:
            return
        exponent = self._exponent(state)
        all_zero = fit <= exponent - self.bits  # the largest value is less than half a step
        if not int(state[BEGUN]) or all_zero or 2 * beyond >= values:
            exponent = fit
        elif beyond > self.most_overflow * values:
            exponent += 1
        elif beyond_half <= self.most_overflow * values:
            exponent -= 1
        state[EXPONENT].fill_(min(max(exponent, _LOWEST), _HIGHEST))
        state[BEGUN].fill_(1)

    def bound(self, values: Tensor) -> Tensor:
        """Half a step of the first scale, plus any excess over its range."""
        return self._grid(_FIRST).bound(values, stochastic=False)

    def _write(self, values: Tensor, parts: Sequence[Bytes], state: State, rest: Tensor | None) -> Tensor:
        import torch

        count, writers = len(values), len(parts) + 1
        if not count:  # an empty piece of a one-element parameter has no state
            return torch.empty(0, dtype=torch.uint8)
        exponent = self._exponent(state)
        grid = self._grid(exponent)
        coder = Coder(grid, count, limits=(grid.limit, grid.limit / 2))
        payload = torch.empty(_HEAD.size + grid.total(writers).size_bytes(count), dtype=torch.uint8)
        data = payload.numpy()
        heads = [self._head(part, count) for part in parts]
        coder.merge([part[_HEAD.size :] for part in parts], values, data[_HEAD.size :], rest)
        own = _Head(exponent, self._fit(coder.largest), 1, *coder.beyond)
        total = _Head(
            exponent,
            max(head.fit for head in (own, *heads)),
            writers,
            sum(head.beyond for head in (own, *heads)),
            sum(head.beyond_half for head in (own, *heads)),
        )
        data[: _HEAD.size] = np.frombuffer(_HEAD.pack(*total), np.uint8)
        if SATURATED in state:
            state[SATURATED] += own.beyond
        return payload

    def _exponent(self, state: State) -> int:
        return int(state[EXPONENT]) if EXPONENT in state else _FIRST

    def _grid(self, exponent: int) -> Grid:
        return Grid(most_code(self.bits), 2.0 ** (exponent - self.bits + 1))

    def _fit(self, most: float) -> int:
        """The smallest exponent whose range includes this magnitude."""
        if not most:
            return _NOTHING
        exponent = math.frexp(most)[1]
        return exponent + (most > self._grid(exponent).limit)

    def _head(self, data: Bytes, count: int) -> _Head:
        """The header of a part or total of `count` values. Raises Corrupt if it is not one."""
        head = _Head(*_HEAD.unpack(data[: _HEAD.size].tobytes())) if len(data) >= _HEAD.size else None
        if head is not None and _LOWEST <= head.exponent <= _HIGHEST and 0 < head.writers < 2**16:
            size_bytes = self._grid(head.exponent).total(head.writers).size_bytes(count)
            most = count * head.writers
            if len(data) == _HEAD.size + size_bytes and head.beyond <= most and head.beyond_half <= most:
                return head
        raise Corrupt(
            f"these {len(data)} bytes are not {count} numbers of {self.bits} bits and their scale",
            where="codec dynamic-fixed",
        )
