"""DGC: applies momentum before choosing, so very few elements suffice (Lin, Han, Mao, Wang, Dally 2018).

For a gradient g, a velocity u and an accumulated value v per element, all local to the worker:

    u = m u + g,   v = v + u,   send v where it is largest,   there v = 0 and u = 0 (masking)

A further part of a step's gradient (several backward passes before the optimizer steps) is added unchanged
to both. With `nesterov`, v = v + g + m u, as in torch. Before that, g is clipped to the norm clip /
sqrt(workers): the sum of that many independent gradients has about the norm `clip`. The optimizer must have
no momentum, because it is applied here. The accumulated values are the feedback; for m = 0 they are the
residual of top-k.

Masking drops the velocity of elements that were delayed: their accumulated value has just been sent. If
many elements are sent in each step, few are delayed, and masking would only remove momentum. So nothing is
masked during warm-up, nor if all elements are sent; then DGC equals momentum SGD, to the bit.

During warm-up the ratio falls: 1/4, 1/16, 1/64 and so on, each for the same number of steps, then `ratio`.
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
_WARM_RATIO = 0.25  # of the first warm-up stage, and of each stage relative to the previous one


@dataclass(frozen=True, slots=True, kw_only=True)
class Dgc(Sparse):
    """Deep gradient compression: applies momentum, then sends the fraction `ratio` of largest elements.

    `momentum` and `nesterov` replace the optimizer's. `clip` is the largest norm of a parameter's gradient,
    0 for no limit. `warmup` is the number of steps in which the ratio falls from 1/4. `masking` resets the
    velocity of elements that are sent. `sample` is the fraction of elements that is sampled to estimate a
    threshold, 0 for no sampling; it does not change which elements are sent.
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
                f"clip is {self.clip:g}, which is not a norm",
                where="clip",
                fix="give a norm, or 0 for no clipping",
            )
        if self.warmup < 0:
            raise ConfigError(
                f"warmup is {self.warmup}, which is not a number of steps",
                where="warmup",
                fix="give a number of steps, or 0 for no warm-up",
            )

    @property
    def feedback(self) -> bool:
        """What is not sent accumulates."""
        return True

    @property
    def stages(self) -> tuple[int, ...]:
        """The steps at which the ratio changes."""
        later = range(1, self.warmup + 1)
        return (0, *(step for step in later if self.ratio_at(step) != self.ratio_at(step - 1)))

    def ratio_at(self, step: int) -> float:
        """The part of the elements that is sent in a step."""
        warm = self._warm_ratios()
        if step >= self.warmup or not warm:
            return self.ratio
        return warm[step * len(warm) // self.warmup]

    def begin(self, length: int) -> State:
        """Zero velocity and zero accumulated gradient."""
        import torch

        state = {GATHERED: torch.zeros(length, dtype=torch.float32)}
        return state | {VELOCITY: torch.zeros(length, dtype=torch.float32)} if self.momentum else state

    def choose(self, values: Tensor, context: CodecContext) -> Positions:
        """The largest elements."""
        return self._largest(Source(values.numpy()), context)

    def pick(self, values: Tensor, state: State, context: CodecContext) -> tuple[Tensor, Positions]:
        """The accumulated gradient, including this step's, and its largest elements; masks velocity."""
        gathered = state[GATHERED]
        velocity: Floats | None = state[VELOCITY].numpy() if self.momentum else None
        factor = self._factor(values, context)
        source = _Gathering(
            self, values.numpy(), velocity, gathered.numpy(), factor, further=context.further
        )
        with np.errstate(over="ignore", invalid="ignore"):
            positions = self._largest(source, context)
        delayed = context.step >= self.warmup and self._count(len(values), context) < len(values)
        if velocity is not None and self.masking and delayed:
            velocity[positions] = 0
        return gathered, positions

    def _warm_ratios(self) -> list[float]:
        ratios = []
        ratio = _WARM_RATIO
        while ratio > self.ratio and self.warmup:
            ratios.append(ratio)
            ratio *= _WARM_RATIO
        return ratios

    def _count(self, length: int, context: CodecContext) -> int:
        return chosen(length, self.ratio_at(context.step))

    def _largest(self, source: Source, context: CodecContext) -> Positions:
        count = self._count(len(source.values), context)
        return largest(source, count, sample=self.sample, step=context.step)

    def _factor(self, values: Tensor, context: CodecContext) -> float:
        """The factor of gradient clipping. A part of a parameter gets its part of the norm."""
        if not self.clip or not len(values):
            return 1.0
        part = len(values) / max(len(values), math.prod(context.shape))
        most = self.clip * math.sqrt(part / context.workers)
        norm = _norm(values.numpy())
        return most / norm if norm > most else 1.0


class _Gathering(Source):
    """The accumulated gradient, block by block: applies momentum and adds while a block is in the cache."""

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
        """Some elements with their final values, up to rounding."""
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
        """A range with this step's gradient added."""
        gradient, gathered = self.gradient[start:stop], self.values[start:stop]
        scratch = self.scratch[: stop - start]
        if self.factor != 1:
            gradient = np.multiply(gradient, self.factor, out=scratch)
        if self.velocity is None:
            return np.add(gathered, gradient, out=gathered)
        velocity = self.velocity[start:stop]
        if self.further:  # the previous round has already added the rest of the velocity
            np.add(velocity, gradient, out=velocity)
            ahead = np.multiply(gradient, 1 + self.momentum, out=scratch) if self.nesterov else gradient
            return np.add(gathered, ahead, out=gathered)
        np.multiply(velocity, self.momentum, out=velocity)
        np.add(velocity, gradient, out=velocity)
        if not self.nesterov:
            return np.add(gathered, velocity, out=gathered)
        return np.add(gathered, _ahead(gradient, velocity, float(self.momentum), scratch), out=gathered)


def _norm(values: Floats) -> float:
    """The norm; in float32, which is faster, unless squares overflow or underflow."""
    square = 0.0
    with np.errstate(over="ignore"):
        for start in range(0, len(values), BLOCK):
            block = values[start : start + BLOCK]
            square += float(np.dot(block, block))
    if not 1e-20 < square < math.inf:
        square = float(np.square(values, dtype=np.float64).sum())
    return math.sqrt(square)


def _ahead(gradient: Floats, velocity: Floats, momentum: float, out: Floats) -> Floats:
    """g + m u, rounded once, as in torch's optimizer: numpy would also round the product."""
    import torch

    added = torch.from_numpy(out)
    torch.add(torch.from_numpy(gradient), torch.from_numpy(velocity), alpha=momentum, out=added)
    return out
