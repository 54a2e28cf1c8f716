"""What a codec is: a way to write a parameter's gradient in fewer bytes, and how such gradients add up.

A codec is given pieces: contiguous ranges of one parameter's gradient, flat, float32, contiguous, finite
(who calls it has looked). What it must remember from step to step is a dictionary of tensors that belongs
to the *parameter*: float32 tensors as long as the parameter are cut like the gradient, all others belong to
it as a whole. So states survive other buckets, checkpoints and other members.

How gradients of several workers become one (`travels`):

    gather   everybody gets everybody's bytes, and adds them up in the order of ranks (sparse ones)
    scatter  each worker gets everybody's bytes of one piece, adds them up, and writes the total for all
    sum      numbers that can be added as they are, by any all-reduce (`Summed`)

Feedback. What a codec with `feedback` leaves out of a step is kept in the state as `residual`, and is added
to the next step's values: the sum of all that was read, and the residual, is the sum of all that was given.
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
SATURATED = "saturated"  # int64, one element: how many values were too large to be written, so far


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecContext:
    """All that a codec may depend on besides values and state.

    `step` counts the rounds that the parameter has been through; `seed` is the parameter's, the same on all
    workers and in all steps; `start` is where the piece begins in it; `rank` is the writer's. `further`:
    this is added to the result of the round before, so it is another part of the same gradient.
    """

    step: int = 0
    workers: int = 1
    rank: int = 0
    seed: int = 0
    start: int = 0
    shape: tuple[int, ...] = ()
    further: bool = False

    def stream(self, *, shared: bool = False) -> np.random.Generator:
        """Random numbers of this turn: each worker's own, or `shared`, the same on all of them."""
        who = 0 if shared else self.rank + 1
        return np.random.Generator(np.random.SFC64([self.seed, self.step, self.start, who]))


class Codec(Strategy):
    """A way to write gradients. Reading gives nearly what was written: `bound` says how nearly."""

    __slots__ = ()
    travels: ClassVar[Travels]
    whole: ClassVar[bool] = False
    """Whether it writes whole parameters only, no parts of them."""

    @property
    def feedback(self) -> bool:
        """Whether what is left out is kept, and added to the next values."""
        return False

    @property
    def contracts(self) -> bool:
        """Whether what is left out is always less than what was given, by norm: feedback needs that, for
        residuals grow from step to step otherwise (Karimireddy et al. 2019).
        """
        return True

    @property
    def momentum(self) -> float:
        """The momentum that the codec applies itself; the optimizer must have none then."""
        return 0.0

    def begin(self, length: int) -> State:
        """The state of a parameter of so many elements before its first step."""
        import torch

        return {RESIDUAL: torch.zeros(length, dtype=torch.float32)} if self.feedback else {}

    def encode(self, values: Tensor, state: State, turn: CodecContext) -> Tensor:
        """The bytes of a piece; the state is this piece's, and is changed. `values` stay as they are."""
        if not self.feedback:
            return self.write(values, state, turn)
        kept = state[RESIDUAL].add_(values)
        return self.write(kept, state, turn, kept)

    def take_back(self, payload: Tensor, values: Tensor, state: State, turn: CodecContext) -> None:
        """What `encode` gave for these values will never be read: owe again what was owed before.

        To rounding, and only where what is owed is a residual (not what dgc gathers).
        """
        import torch

        if self.feedback and RESIDUAL in state:
            read = torch.empty_like(values)
            self.read(payload, read, turn)
            state[RESIDUAL].add_(read).sub_(values)

    @abstractmethod
    def write(self, values: Tensor, state: State, turn: CodecContext, rest: Tensor | None = None) -> Tensor:
        """The bytes of these values. What they leave out goes to `rest`, which may be `values` itself:
        after it, `values - rest` is what `read` gives, to the rounding of one subtraction.
        """

    @abstractmethod
    def read(self, payload: Tensor, out: Tensor, turn: CodecContext, *, add: bool = False) -> None:
        """What was written, to a flat tensor of the piece's length, or added to what is there.

        Raises Corrupt if these are not the bytes of a piece of that length.
        """

    @abstractmethod
    def bound(self, values: Tensor) -> Tensor:
        """How far each element that is read may be from the one that was written, without a state."""

    # Only for those that travel by `scatter` ---------------------------------------------------------

    def merge(self, parts: Sequence[Tensor], own: Tensor, state: State, turn: CodecContext) -> Tensor:
        """The bytes of a total: the owner's values, not written yet, and the others' bytes, by rank.

        The state is the owner's; its residual on this piece is what totals have left out before. Raises
        OverflowError if the total is beyond float32.
        """
        import torch

        total = own.clone()
        read = torch.empty_like(own)
        for part in parts:
            self.read(part, read, turn)
            total += read
        if len(total) and not all(end.isfinite() for end in torch.aminmax(total)):
            raise OverflowError("the total of finite gradients is infinite")
        return self.encode(total, state, turn)

    def read_total(self, payload: Tensor, out: Tensor, state: State, turn: CodecContext) -> None:
        """What `merge` has written, to `out`; the state is the whole parameter's."""
        self.read(payload, out, turn)

    def settle(self, state: State, turn: CodecContext) -> None:
        """All pieces of a parameter have been read: the same on all workers."""
        return


class Summed(Codec):
    """A codec whose numbers are added as they are: the total of what all have written is what is read.

    In `rounds` rounds: `first` gives numbers to add, each further round makes the next ones from the
    totals. How many there are follows from the turn alone, so it is the same on all workers. All rounds of
    a turn get the same state, which may hold something between them; what `first` gives may be the values
    themselves.
    """

    __slots__ = ()
    travels: ClassVar[Travels] = "sum"
    rounds: ClassVar[int] = 1

    @abstractmethod
    def first(self, values: Tensor, state: State, turn: CodecContext) -> Tensor:
        """The float32 numbers of the first round, for the values of a whole parameter."""

    def further(self, total: Tensor, state: State, turn: CodecContext) -> Tensor:
        """The numbers of the next round, from the totals of the last."""
        raise NotImplementedError(f"codec {self.name} has {self.rounds} rounds, and no `further`")

    @abstractmethod
    def finish(self, total: Tensor, out: Tensor, state: State, turn: CodecContext) -> None:
        """The gradient of all workers, from the totals of the last round."""


class StandIn(Codec):
    """A codec that stands for another one, or for none: which, is found out when a run begins."""

    __slots__ = ()
    travels: ClassVar[Travels] = "gather"

    def write(self, values: Tensor, state: State, turn: CodecContext, rest: Tensor | None = None) -> Tensor:
        """Never: it was not replaced."""
        raise NotImplementedError(f"{self.name} stands for another codec")

    def read(self, payload: Tensor, out: Tensor, turn: CodecContext, *, add: bool = False) -> None:
        """Never: it was not replaced."""
        raise NotImplementedError(f"{self.name} stands for another codec")

    def bound(self, values: Tensor) -> Tensor:
        """Never: it was not replaced."""
        raise NotImplementedError(f"{self.name} stands for another codec")


CODECS: Registry[Codec] = Registry("codec", Codec, "echelon.codec.codecs")  # type: ignore[type-abstract]


def seed_of(name: str) -> int:
    """A parameter's seed: the same on all workers, in all runs."""
    return zlib.crc32(name.encode())


def owners(length: int, workers: int, seed: int) -> list[tuple[int, int]]:
    """Which part of a parameter each worker adds up: nearly equal ones; all of a small one is one worker's.

    It follows from the parameter alone, whatever it shares a bucket with.
    """
    if length < workers * _LEAST_PIECE:
        mine = seed % workers
        return [(0, 0)] * mine + [(0, length)] + [(length, length)] * (workers - mine - 1)
    return [(length * rank // workers, length * (rank + 1) // workers) for rank in range(workers)]


def chosen(length: int, ratio: float) -> int:
    """How many of so many elements a ratio stands for: at least one, if there is any."""
    return min(length, max(1, math.ceil(length * ratio))) if length else 0
