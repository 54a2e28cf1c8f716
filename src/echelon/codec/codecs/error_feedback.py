"""Error-feedback: what a codec loses in a step is added to the next one's values (Karimireddy et al. 2019).

It is the contract's own feedback (`codec.py`), for codecs that do without. The bytes are the inner codec's.
It suits codecs that come nearer to what they are given: where the error may be larger than the values, as
with ternary, residuals grow with every step. A codec that adds up totals in its own way (`merge`) goes on
doing so: what a total differs by from the sum of what it was made of stays with its owner.
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
    """Any codec that loses something, with what it loses added to the next step's values."""

    name: ClassVar[str] = "error-feedback"
    codec: str = "fixed(bits=4)"

    def __post_init__(self) -> None:
        inner = _built(self.codec)
        alone = f"use {self.codec} without error-feedback"
        if isinstance(inner, StandIn):
            raise ConfigError(
                f"{self.codec} stands for another codec", where="codec", fix="name the codec itself"
            )
        if inner.feedback:
            raise ConfigError(f"{self.codec} has feedback already", where="codec", fix=alone)
        if isinstance(inner, Summed):
            own = any(option.name == "feedback" for option in options_of(type(inner)))
            why = "must keep for itself what it leaves out" if own else "loses nothing"
            raise ConfigError(
                f"{self.codec} {why}",
                where="codec",
                fix=f"use {inner.name} with feedback=true" if own else alone,
            )

    @property
    def contracts(self) -> bool:
        """As the inner codec."""
        return self.inner.contracts

    @property
    def inner(self) -> Codec:
        """The codec that writes."""
        return _built(self.codec)

    @property
    def travels(self) -> Travels:  # type: ignore[override]
        """As the inner codec."""
        return self.inner.travels

    @property
    def feedback(self) -> bool:
        """It is what this is for."""
        return True

    @property
    def momentum(self) -> float:
        """The inner codec's."""
        return self.inner.momentum

    def begin(self, length: int) -> State:
        """The inner codec's state, and nothing left out yet."""
        import torch

        return self.inner.begin(length) | {RESIDUAL: torch.zeros(length)}

    def write(self, values: Tensor, state: State, turn: CodecContext, rest: Tensor | None = None) -> Tensor:
        """The inner codec's bytes."""
        return self.inner.write(values, state, turn, rest)

    def read(self, payload: Tensor, out: Tensor, turn: CodecContext, *, add: bool = False) -> None:
        """What the inner codec reads."""
        self.inner.read(payload, out, turn, add=add)

    def bound(self, values: Tensor) -> Tensor:
        """The inner codec's."""
        return self.inner.bound(values)

    def merge(self, parts: Sequence[Tensor], own: Tensor, state: State, turn: CodecContext) -> Tensor:
        """The total as the inner codec writes it, with what totals have left out before."""
        if type(self.inner).merge is Codec.merge:
            return Codec.merge(self, parts, own, state, turn)
        import torch

        kept = state[RESIDUAL].add_(own)
        payload = self.inner.merge(parts, kept, state, turn)
        read = torch.empty_like(own)
        for part in parts:
            self.inner.read(part, read, turn)
            kept += read
        # Reading a total may count things in the state: that is for those who read it, here it is a look.
        self.inner.read_total(payload, read, {name: kind.clone() for name, kind in state.items()}, turn)
        kept -= read
        return payload

    def read_total(self, payload: Tensor, out: Tensor, state: State, turn: CodecContext) -> None:
        """What the inner codec reads."""
        self.inner.read_total(payload, out, state, turn)

    def settle(self, state: State, turn: CodecContext) -> None:
        """As the inner codec does."""
        self.inner.settle(state, turn)


@lru_cache(maxsize=64)
def _built(text: str) -> Codec:
    """Kept, for every piece asks for it."""
    return CODECS.build(text, where="error-feedback, codec")
