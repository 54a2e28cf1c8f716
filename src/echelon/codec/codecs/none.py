"""None: unencoded numbers. The total is that of the all-reduce, to the bit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from echelon.codec.codec import CodecContext, State, Summed
from echelon.codec.sparse import bytes_of, numbers_of

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class NoCodec(Summed):
    """Sends float32 numbers as they are: nothing is saved, nothing is lost."""

    name: ClassVar[str] = "none"

    def write(
        self, values: Tensor, state: State, context: CodecContext, rest: Tensor | None = None
    ) -> Tensor:
        """The bytes of the values."""
        payload = bytes_of(values)
        if rest is not None:
            rest.zero_()
        return payload

    def read(self, payload: Tensor, out: Tensor, context: CodecContext, *, add: bool = False) -> None:
        """The same values."""
        values = numbers_of(payload, len(out))
        if add:
            out += values
        else:
            out.copy_(values)

    def bound(self, values: Tensor) -> Tensor:
        """Nothing is lost."""
        return values.new_zeros(len(values))

    def first(self, values: Tensor, state: State, context: CodecContext) -> Tensor:
        """The values themselves, not a copy."""
        return values

    def finish(self, total: Tensor, out: Tensor, state: State, context: CodecContext) -> None:
        """The total itself."""
        if out is not total:
            out.copy_(total)
