"""None: numbers as they are. The total is that of the all-reduce, to the bit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from echelon.codec.codec import CodecContext, State, Summed
from echelon.codec.sparse import bytes_of, numbers_of

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class NoCodec(Summed):
    """All numbers as they are, in 32 bits: nothing is saved, nothing is lost."""

    name: ClassVar[str] = "none"

    def write(self, values: Tensor, state: State, turn: CodecContext, rest: Tensor | None = None) -> Tensor:
        """The values' own bytes."""
        payload = bytes_of(values)
        if rest is not None:
            rest.zero_()
        return payload

    def read(self, payload: Tensor, out: Tensor, turn: CodecContext, *, add: bool = False) -> None:
        """The same values again."""
        values = numbers_of(payload, len(out))
        if add:
            out += values
        else:
            out.copy_(values)

    def bound(self, values: Tensor) -> Tensor:
        """Nothing is lost."""
        return values.new_zeros(len(values))

    def first(self, values: Tensor, state: State, turn: CodecContext) -> Tensor:
        """The values themselves, not a copy."""
        return values

    def finish(self, total: Tensor, out: Tensor, state: State, turn: CodecContext) -> None:
        """The total as it is."""
        if out is not total:
            out.copy_(total)
