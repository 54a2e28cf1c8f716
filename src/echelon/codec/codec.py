"""The contract of a codec: it writes a parameter's gradient in fewer bytes, and defines how these add up.

A codec works on pieces: contiguous ranges of one parameter's gradient, flat, float32, contiguous and finite
(the caller has checked). Its state between steps is a dictionary of tensors that belongs to the
*parameter*: float32 tensors as long as the parameter are cut like the gradient; all others belong to it as
a whole. So states survive re-bucketing, checkpoints and membership changes.

How the gradients of several workers become one (`travels`):

    gather   all workers get all workers' bytes, and add them up in the order of ranks (sparse codecs)
    scatter  each worker gets all workers' bytes of one piece, adds them up, and writes the total for all
    sum      the numbers can be added as they are, by any all-reduce (`Summed`)

Feedback. What a codec with `feedback` leaves out of a step stays in the state as `residual`, and is added
to the next step's values. At any time, the sum of everything read plus the residual is the sum of all
inputs.
"""

from __future__ import annotations

import math
import zlib
from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np

from echelon.config.registry import Registry, Strategy

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

Travels = Literal["gather", "scatter", "sum"]
State = dict[str, "Tensor"]
RESIDUAL = "residual"
_LEAST_PIECE = 1024
SATURATED = "saturated"  # int64, one element: how many values were too large for the range so far


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecContext:
    """Everything that a codec may depend on besides values and state.

    `step` counts the parameter's rounds; `seed` identifies the parameter, the same on all workers and in
    all steps; `start` is where the piece begins in the parameter; `rank` is the writer's. `further` marks
    another part of the same gradient, whose result is added to that of the previous round.
    """

    step: int = 0
    workers: int = 1
    rank: int = 0
    seed: int = 0
    start: int = 0
    shape: tuple[int, ...] = ()
    further: bool = False

    def stream(self, *, shared: bool = False) -> np.random.Generator:
        """A random generator for this context: one per worker, or `shared`, the same on all workers."""
        who = 0 if shared else self.rank + 1
        return np.random.Generator(np.random.SFC64([self.seed, self.step, self.start, who]))


class Codec(Strategy):
    """A way to write gradients. Reading gives approximately what was written; `bound` limits the error."""

    __slots__ = ()
    travels: ClassVar[Travels]
    whole: ClassVar[bool] = False
    """Whether it writes only whole parameters, not parts of them."""

    @property
    def feedback(self) -> bool:
        """Whether what is left out is kept, and added to the next step's values."""
        return False

    @property
    def contracts(self) -> bool:
        """Whether the norm of what is left out is always smaller than that of the input.

        Feedback needs this; otherwise residuals grow from step to step (Karimireddy et al. 2019).
        """
        return True

    @property
    def momentum(self) -> float:
        """The momentum that the codec applies itself; the optimizer must then have none."""
        return 0.0

    def begin(self, length: int) -> State:
        """The initial state of a parameter with `length` elements."""
        import torch

        return {RESIDUAL: torch.zeros(length, dtype=torch.float32)} if self.feedback else {}

    def encode(self, values: Tensor, state: State, context: CodecContext) -> Tensor:
        """Write a piece as bytes, and update the piece's part of the state. `values` do not change."""
        if not self.feedback:
            return self.write(values, state, context)
        kept = state[RESIDUAL].add_(values)
        return self.write(kept, state, context, kept)

    def take_back(self, payload: Tensor, values: Tensor, state: State, context: CodecContext) -> None:
        """Undo an `encode` whose bytes will never be read: restore the residual.

        It is exact up to rounding, and works only for residuals (not for what dgc accumulates).
        """
        import torch

        if self.feedback and RESIDUAL in state:
            read = torch.empty_like(values)
            self.read(payload, read, context)
            state[RESIDUAL].add_(read).sub_(values)

    @abstractmethod
    def write(
        self, values: Tensor, state: State, context: CodecContext, rest: Tensor | None = None
    ) -> Tensor:
        """Write values as bytes. What the bytes leave out goes to `rest`, which may be `values` itself.

        `values - rest` is what `read` gives, up to the rounding of one subtraction.
        """

    @abstractmethod
    def read(self, payload: Tensor, out: Tensor, context: CodecContext, *, add: bool = False) -> None:
        """Read the values into a flat tensor of the piece's length, or add them to it.

        Raises Corrupt if the payload is not a piece of that length.
        """

    @abstractmethod
    def bound(self, values: Tensor) -> Tensor:
        """The largest possible error of each element that is read, without a state."""

    # Only for codecs that travel by `scatter` --------------------------------------------------------

    def merge(self, parts: Sequence[Tensor], own: Tensor, state: State, context: CodecContext) -> Tensor:
        """Write a total as bytes: the owner's unencoded values plus the other workers' bytes, by rank.

        The state is the owner's; its residual on this piece is what earlier totals left out. Raises
        OverflowError if the total is beyond float32.
        """
        import torch

        total = own.clone()
        read = torch.empty_like(own)
        for part in parts:
            self.read(part, read, context)
            total += read
        if len(total) and not all(end.isfinite() for end in torch.aminmax(total)):
            raise OverflowError("the total of finite gradients is infinite")
        return self.encode(total, state, context)

    def read_total(self, payload: Tensor, out: Tensor, state: State, context: CodecContext) -> None:
        """Read the bytes that `merge` wrote into `out`; the state is the whole parameter's."""
        self.read(payload, out, context)

    def settle(self, state: State, context: CodecContext) -> None:
        """Called when all pieces of a parameter have been read; must do the same on all workers."""
        return


class Summed(Codec):
    """A codec whose numbers are added as they are: the sum of the numbers is read as the sum of the values.

    It takes `rounds` rounds: `first` gives the numbers to add, and each further round makes new numbers
    from the totals. Their count depends only on the context, so it is the same on all workers. All rounds
    of a step get the same state, which may hold data between rounds; `first` may return `values` itself.
    """

    __slots__ = ()
    travels: ClassVar[Travels] = "sum"
    rounds: ClassVar[int] = 1

    @abstractmethod
    def first(self, values: Tensor, state: State, context: CodecContext) -> Tensor:
        """The float32 numbers of the first round, for the values of a whole parameter."""

    def further(self, total: Tensor, state: State, context: CodecContext) -> Tensor:
        """The numbers of the next round, from the totals of the previous one."""
        raise NotImplementedError(f"codec {self.name} has {self.rounds} rounds, and no `further`")

    @abstractmethod
    def finish(self, total: Tensor, out: Tensor, state: State, context: CodecContext) -> None:
        """The gradient of all workers, from the totals of the last round."""


class StandIn(Codec):
    """A codec that is replaced by another one, or by none, when a run begins."""

    __slots__ = ()
    travels: ClassVar[Travels] = "gather"

    def write(
        self, values: Tensor, state: State, context: CodecContext, rest: Tensor | None = None
    ) -> Tensor:
        """Not supported: must be replaced first."""
        raise NotImplementedError(f"codec {self.name} must be replaced before it is used")

    def read(self, payload: Tensor, out: Tensor, context: CodecContext, *, add: bool = False) -> None:
        """Not supported: must be replaced first."""
        raise NotImplementedError(f"codec {self.name} must be replaced before it is used")

    def bound(self, values: Tensor) -> Tensor:
        """Not supported: must be replaced first."""
        raise NotImplementedError(f"codec {self.name} must be replaced before it is used")


CODECS: Registry[Codec] = Registry("codec", Codec, "echelon.codec.codecs")  # type: ignore[type-abstract]


def seed_of(name: str) -> int:
    """A parameter's seed: the same on all workers, in all runs."""
    return zlib.crc32(name.encode())


def owners(length: int, workers: int, seed: int) -> list[tuple[int, int]]:
    """The part of a parameter that each worker adds up: nearly equal, or all at one worker if it is small.

    It depends on the parameter alone, not on its bucket.
    """
    if length < workers * _LEAST_PIECE:
        mine = seed % workers
        return [(0, 0)] * mine + [(0, length)] + [(length, length)] * (workers - mine - 1)
    return [(length * rank // workers, length * (rank + 1) // workers) for rank in range(workers)]


def chosen(length: int, ratio: float) -> int:
    """The number of elements that a ratio means: at least one, unless `length` is 0."""
    return min(length, max(1, math.ceil(length * ratio))) if length else 0
