"""Error-feedback: adds what a codec loses in a step to the next step's values (Karimireddy et al. 2019).

It adds the feedback of the contract (`codec.py`) to codecs without it. The bytes are the inner codec's. It
suits codecs whose error is smaller than the input: if the error may be larger, as with ternary, residuals
grow with every step. A codec with its own `merge` keeps using it: the difference between the total it
writes and the sum of its inputs stays with the owner.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, ClassVar

from echelon.codec.codec import CODECS, RESIDUAL, Codec, CodecContext, StandIn, State, Summed, Travels
from echelon.config.registry import options_of
from echelon.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorFeedback(Codec):
    """Adds feedback to a lossy codec: what it loses in a step is added to the next step's values."""

    name: ClassVar[str] = "error-feedback"
    codec: str = "fixed(bits=4)"

    def __post_init__(self) -> None:
        inner = _built(self.codec)
        alone = f"use {self.codec} without error-feedback"
        if isinstance(inner, StandIn):
            raise ConfigError(
                f"{self.codec} cannot be used inside error-feedback",
                where="codec",
                fix="name another codec, such as bf16",
            )
        if inner.feedback:
            raise ConfigError(f"{self.codec} has feedback already", where="codec", fix=alone)
        if isinstance(inner, Summed):
            own = any(option.name == "feedback" for option in options_of(type(inner)))
            why = "has its own feedback option" if own else "loses nothing"
            raise ConfigError(
                f"{self.codec} {why}",
                where="codec",
                fix=f"use {inner.name} with feedback=true" if own else alone,
            )

    @property
    def contracts(self) -> bool:
        """That of the inner codec."""
        return self.inner.contracts

    @property
    def inner(self) -> Codec:
        """The codec that writes."""
        return _built(self.codec)

    @property
    def travels(self) -> Travels:  # type: ignore[override]
        """That of the inner codec."""
        return self.inner.travels

    @property
    def feedback(self) -> bool:
        """Always: this is its purpose."""
        return True

    @property
    def momentum(self) -> float:
        """The inner codec's."""
        return self.inner.momentum

    def begin(self, length: int) -> State:
        """The inner codec's state, and a zero residual."""
        import torch

        return self.inner.begin(length) | {RESIDUAL: torch.zeros(length)}

    def write(
        self, values: Tensor, state: State, context: CodecContext, rest: Tensor | None = None
    ) -> Tensor:
        """The inner codec's bytes."""
        return self.inner.write(values, state, context, rest)

    def read(self, payload: Tensor, out: Tensor, context: CodecContext, *, add: bool = False) -> None:
        """Read with the inner codec."""
        self.inner.read(payload, out, context, add=add)

    def bound(self, values: Tensor) -> Tensor:
        """The inner codec's."""
        return self.inner.bound(values)

    def merge(self, parts: Sequence[Tensor], own: Tensor, state: State, context: CodecContext) -> Tensor:
        """The total as the inner codec writes it, including what earlier totals left out."""
        if type(self.inner).merge is Codec.merge:
            return Codec.merge(self, parts, own, state, context)
        import torch

        kept = state[RESIDUAL].add_(own)
        payload = self.inner.merge(parts, kept, state, context)
        read = torch.empty_like(own)
        for part in parts:
            self.inner.read(part, read, context)
            kept += read
        # Reading a total may change counts in the state; this read must not, so it works on a copy.
        self.inner.read_total(payload, read, {name: kind.clone() for name, kind in state.items()}, context)
        kept -= read
        return payload

    def read_total(self, payload: Tensor, out: Tensor, state: State, context: CodecContext) -> None:
        """Read with the inner codec."""
        self.inner.read_total(payload, out, state, context)

    def settle(self, state: State, context: CodecContext) -> None:
        """Settle the inner codec."""
        self.inner.settle(state, context)


@lru_cache(maxsize=64)
def _built(text: str) -> Codec:
    """Cached, because every piece needs it."""
    return CODECS.build(text, where="error-feedback, codec")
