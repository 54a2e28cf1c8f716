"""DGC: momentum before the choice, so that very few elements are enough (Lin, Han, Mao, Wang, Dally 2018).

For a gradient g, each element's velocity u and what it has gathered v, all on the worker:

    u = m u + g,   v = v + u,   send v where it is largest,   there v = 0 and u = 0 (masking)

A further part of a step's gradient (several backward passes before the optimizer steps) is added to both as
it is. With `nesterov`, v = v + g + m u, as torch has it. Before it, g is clipped to the norm
clip / sqrt(workers): the sum of that many independent gradients has about the norm `clip`. The optimizer
must have no momentum: it is in here. What is gathered is the feedback; for m = 0, the residual of top-k.

Masking drops the velocity of elements that are late: what they gathered has been sent. Where many elements
are sent in each step few are late, and masking would only take the momentum away: so nothing is masked in
the warm-up, nor where all elements are sent; then DGC is momentum SGD, to the bit.

In the warm-up the ratio falls: 1/4, 1/16, 1/64 and so on, each for the same number of steps, then `ratio`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from echelon.codec.codec import CodecContext, State, chosen
from echelon.codec.positions import Positions
from echelon.codec.sparse import BLOCK, Floats, Source, Sparse, check_ratio, check_sample, largest
from echelon.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

VELOCITY = "velocity"
GATHERED = "gathered"
_WARM_RATIO = 0.25  # of the first stage, and of each stage to the one before


@dataclass(frozen=True, slots=True, kw_only=True)
class Dgc(Sparse):
    """Sends a part `ratio` of the elements, those that have gathered most, momentum included.

    `momentum` and `nesterov` are instead of the optimizer's. `clip` is the largest norm of a parameter's
    gradient, 0 for any. `warmup` is the number of steps in which the ratio falls from 1/4. `masking` stops
    elements that are sent. `sample` is the part of the elements that is looked at to guess a threshold, 0
    to look at all: which ones are sent does not depend on it.
    """

    name: ClassVar[str] = "dgc"
    ratio: float = 0.001
    momentum: float = 0.9
    nesterov: bool = False
    clip: float = 0.0
    warmup: int = 0
    masking: bool = True
    sample: float = 0.01

    def __post_init__(self) -> None:
        check_ratio(self.ratio)
        check_sample(self.sample)
        if not 0 <= self.momentum < 1:
            raise ConfigError(
                f"momentum is {self.momentum:g}, it has to be at least 0 and below 1",
                where="momentum",
                fix="give the momentum that the optimizer would have, such as 0.9",
            )
        if self.nesterov and not self.momentum:
            raise ConfigError(
                "nesterov needs a momentum",
                where="nesterov",
                fix="give momentum=0.9, or leave nesterov out",
            )
        if not 0 <= self.clip < math.inf:
            raise ConfigError(
                f"clip is {self.clip:g}, which is no norm",
                where="clip",
                fix="give a norm, or 0 for no clipping",
            )
        if self.warmup < 0:
            raise ConfigError(
                f"a warm-up of {self.warmup} steps",
                where="warmup",
                fix="give a number of steps, or 0 for none",
            )

    @property
    def feedback(self) -> bool:
        """What is not sent is gathered."""
        return True

    @property
    def stages(self) -> tuple[int, ...]:
        """The steps from which on the ratio is another one."""
        later = range(1, self.warmup + 1)
        return (0, *(step for step in later if self.ratio_at(step) != self.ratio_at(step - 1)))

    def ratio_at(self, step: int) -> float:
        """The part of the elements that is sent in a step."""
        warm = self._warm_ratios()
        if step >= self.warmup or not warm:
            return self.ratio
        return warm[step * len(warm) // self.warmup]

    def begin(self, length: int) -> State:
        """Nothing is moving, nothing is gathered."""
        import torch

        state = {GATHERED: torch.zeros(length, dtype=torch.float32)}
        return state | {VELOCITY: torch.zeros(length, dtype=torch.float32)} if self.momentum else state

    def choose(self, values: Tensor, turn: CodecContext) -> Positions:
        """The largest ones."""
        return self._largest(Source(values.numpy()), turn)

    def pick(self, values: Tensor, state: State, turn: CodecContext) -> tuple[Tensor, Positions]:
        """What is gathered, this step's values included, and its largest elements; their velocity is 0."""
        gathered = state[GATHERED]
        velocity: Floats | None = state[VELOCITY].numpy() if self.momentum else None
        factor = self._factor(values, turn)
        source = _Gathering(self, values.numpy(), velocity, gathered.numpy(), factor, further=turn.further)
        with np.errstate(over="ignore", invalid="ignore"):
            positions = self._largest(source, turn)
        late = turn.step >= self.warmup and self._count(len(values), turn) < len(values)
        if velocity is not None and self.masking and late:
            velocity[positions] = 0
        return gathered, positions

    def _warm_ratios(self) -> list[float]:
        ratios = []
        ratio = _WARM_RATIO
        while ratio > self.ratio and self.warmup:
            ratios.append(ratio)
            ratio *= _WARM_RATIO
        return ratios

    def _count(self, length: int, turn: CodecContext) -> int:
        return chosen(length, self.ratio_at(turn.step))

    def _largest(self, source: Source, turn: CodecContext) -> Positions:
        count = self._count(len(source.values), turn)
        return largest(source, count, sample=self.sample, step=turn.step)

    def _factor(self, values: Tensor, turn: CodecContext) -> float:
        """What clipping multiplies the gradient by. A part of a parameter may have its part of the norm."""
        if not self.clip or not len(values):
            return 1.0
        part = len(values) / max(len(values), math.prod(turn.shape))
        most = self.clip * math.sqrt(part / turn.workers)
        norm = _norm(values.numpy())
        return most / norm if norm > most else 1.0


class _Gathering(Source):
    """What is gathered, block by block: momentum, and the sum, while a block is in the cache."""

    def __init__(
        self,
        codec: Dgc,
        gradient: Floats,
        velocity: Floats | None,
        gathered: Floats,
        factor: float,
        *,
        further: bool,
    ) -> None:
        super().__init__(gathered)
        self.gradient = gradient
        self.velocity = velocity
        self.momentum = np.float32(codec.momentum)
        self.nesterov = codec.nesterov
        self.further = further
        self.factor = np.float32(factor)
        self.scratch = np.empty(min(BLOCK, len(gradient)), np.float32)

    def peek(self, cut: slice) -> Floats:
        """Some elements as they will be, to a rounding."""
        moved = self.gradient[cut] * self.factor
        if self.further:
            moved = moved * (1 + self.momentum) if self.nesterov else moved
        elif self.velocity is not None:
            pushed = moved if self.nesterov else 0
            moved = moved + self.momentum * self.velocity[cut]
            moved = pushed + self.momentum * moved if self.nesterov else moved
        found: Floats = self.values[cut] + moved
        return found

    def block(self, start: int, stop: int) -> Floats:
        """A range with this step's gradient in it."""
        gradient, gathered = self.gradient[start:stop], self.values[start:stop]
        scratch = self.scratch[: stop - start]
        if self.factor != 1:
            gradient = np.multiply(gradient, self.factor, out=scratch)
        if self.velocity is None:
            return np.add(gathered, gradient, out=gathered)
        velocity = self.velocity[start:stop]
        if self.further:  # the rest of the velocity was gathered in the round before
            np.add(velocity, gradient, out=velocity)
            ahead = np.multiply(gradient, 1 + self.momentum, out=scratch) if self.nesterov else gradient
            return np.add(gathered, ahead, out=gathered)
        np.multiply(velocity, self.momentum, out=velocity)
        np.add(velocity, gradient, out=velocity)
        if not self.nesterov:
            return np.add(gathered, velocity, out=gathered)
        return np.add(gathered, _ahead(gradient, velocity, float(self.momentum), scratch), out=gathered)


def _norm(values: Floats) -> float:
    """The norm; in float32, which is quicker, if squares neither overflow nor underflow there."""
    square = 0.0
    with np.errstate(over="ignore"):
        for start in range(0, len(values), BLOCK):
            block = values[start : start + BLOCK]
            square += float(np.dot(block, block))
    if not 1e-20 < square < math.inf:
        square = float(np.square(values, dtype=np.float64).sum())
    return math.sqrt(square)


def _ahead(gradient: Floats, velocity: Floats, momentum: float, out: Floats) -> Floats:
    """g + m u, rounded once, as torch's optimizer does it: numpy would round the product too."""
    import torch

    added = torch.from_numpy(out)
    torch.add(torch.from_numpy(gradient), torch.from_numpy(velocity), alpha=momentum, out=added)
    return out
