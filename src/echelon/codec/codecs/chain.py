"""Chain: a sparse codec chooses the elements, another codec writes their values.

The format is that of any sparse codec, with the values as the other codec writes them. If the first codec
has feedback, the residual holds the elements that are not chosen and the second codec's error on the chosen
ones. The second codec's own feedback is not used, because it would see other elements in each step.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from echelon.codec.codec import CODECS, RESIDUAL, Codec, CodecContext, StandIn, State, Travels
from echelon.codec.codecs.dgc import Dgc
from echelon.codec.positions import Positions
from echelon.codec.sparse import Floats, Sparse, leave, pack, put, unpack
from echelon.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain(Codec):
    """Sends the elements that the sparse codec `first` chooses, with values written by the codec `then`."""

    name: ClassVar[str] = "chain"
    travels: ClassVar[Travels] = "gather"
    first: str = "top-k(ratio=0.01)"
    then: str = "fp16"

    def __post_init__(self) -> None:
        first, then = _built(self.first, "chain, first"), _built(self.then, "chain, then")
        if not isinstance(first, Sparse):
            raise ConfigError(
                f"{self.first} is not a sparse codec: it does not choose elements",
                where="first",
                fix="use top-k, threshold or dgc as first",
            )
        if then.travels == "sum" or then.momentum or isinstance(then, StandIn):
            raise ConfigError(
                f"{self.then} cannot write the values that a sparse codec chooses on each worker",
                where="then",
                fix="use a codec of values, such as fp16 or one-bit",
            )
        if type(then).settle is not Codec.settle:
            raise ConfigError(
                f"{self.then} depends on the totals of all workers, which a chain does not have",
                where="then",
                fix="use a codec that depends only on the values, such as fixed(bits=12)",
            )
        if isinstance(then, Dgc):
            raise ConfigError(
                f"{self.then} keeps a state for each element, but a chain's elements change in each step",
                where="then",
                fix="use a codec without such a state, such as fp16 or one-bit",
            )

    @property
    def contracts(self) -> bool:
        """That of the codec that writes the values."""
        return self._writer.contracts

    @property
    def _chooser(self) -> Sparse:
        first = _built(self.first, "chain, first")
        if not isinstance(first, Sparse):
            raise TypeError(self.first)  # unreachable: __post_init__ has checked it
        return first

    @property
    def _writer(self) -> Codec:
        return _built(self.then, "chain, then")

    @property
    def feedback(self) -> bool:
        """The first codec's."""
        return self._chooser.feedback

    @property
    def momentum(self) -> float:
        """The first codec's."""
        return self._chooser.momentum

    def begin(self, length: int) -> State:
        """The first codec's state, and the second's state except tensors with one entry per element."""
        state = self._chooser.begin(length)
        others, longer = self._writer.begin(length), self._writer.begin(length + 1)
        shared = {name for name in others if others[name].shape == longer[name].shape}
        if missing := sorted(others.keys() - shared - {RESIDUAL}):
            raise ConfigError(
                f"{self.then} keeps a state for each element ({missing[0]}), "
                "but a chain's elements change in each step",
                where="codec chain, then",
                fix="use a codec without such a state, such as fp16 or one-bit",
            )
        return state | {name: others[name] for name in shared}

    def encode(self, values: Tensor, state: State, context: CodecContext) -> Tensor:
        """The elements that the first codec picks, written by the second."""
        given, positions = self._chooser.pick(values, state, context)
        return self._written(given, positions, state, context, given if self.feedback else None)

    def write(
        self, values: Tensor, state: State, context: CodecContext, rest: Tensor | None = None
    ) -> Tensor:
        """The elements that the first codec chooses, written by the second."""
        return self._written(values, self._chooser.choose(values, context), state, context, rest)

    def _written(
        self, values: Tensor, positions: Positions, state: State, context: CodecContext, rest: Tensor | None
    ) -> Tensor:
        import torch

        taken = torch.from_numpy(values.numpy()[positions])
        left = torch.empty_like(taken)
        data = np.empty(0, np.uint8)
        if len(positions):
            data = self._writer.write(taken, state, _context_for(context, len(positions)), left).numpy()
        leave(values, positions, left.numpy(), rest)
        return pack(positions, len(values), data)

    def read(self, payload: Tensor, out: Tensor, context: CodecContext, *, add: bool = False) -> None:
        """The second codec's values at the chosen positions, zeros elsewhere."""
        import torch

        positions, data = unpack(payload, len(out))
        values = torch.empty(len(positions))
        if len(positions):  # a copy, because the data may be unaligned
            self._writer.read(torch.from_numpy(data.copy()), values, _context_for(context, len(positions)))
        put(positions, values.numpy(), out, add=add)

    def bound(self, values: Tensor) -> Tensor:
        """The second codec's bound for chosen elements, the magnitude for others."""
        import torch

        worst = torch.zeros(len(values))
        for step in self._chooser.stages:
            bound = values.abs()
            positions = self._chooser.choose(values, CodecContext(step=step))
            taken: Floats = values.numpy()[positions]
            bound.numpy()[positions] = self._writer.bound(torch.from_numpy(taken)).numpy()
            worst = torch.maximum(worst, bound)
        return worst


def _context_for(context: CodecContext, count: int) -> CodecContext:
    """The context of the chosen values: they are a vector, whatever the shape of the parameter."""
    return replace(context, shape=(count,))


@lru_cache(maxsize=64)
def _built(text: str, where: str) -> Codec:
    """Cached, because every piece needs it."""
    return CODECS.build(text, where=where)
