"""Policies that workers carry out among themselves: steps of their own, and averages of weights in between.

With whom a worker meets after a step depends on nothing but the number of the step, so all know it without
asking. What it makes of a meeting is a function of tensors, element by element; `memory` keeps what it
needs from one meeting to the next, under names of its own.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from echelon.sync.policy import ClusterInfo, Family, Policy

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Average:
    """All members get the mean of their weights, by samples, and settle it with `MixPolicy.settle`."""

    members: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Neighbours:
    """x becomes the sum of w_j x_j over these workers, itself among them; weights sum to one."""

    weights: Mapping[int, float]


Meeting = Average | Neighbours


class MixPolicy(Policy):
    """A policy of averages between workers.

    `shown` is what is evaluated and saved after a pass over the data: the mean of all workers' weights,
    each worker's own, or what is kept in memory under "center" (the same on all workers). `weighs`: means
    are by the workers' shares of the samples; plain ones otherwise.
    """

    __slots__ = ()
    family: ClassVar[Family] = "mix"
    weighs: ClassVar[bool] = True
    shown: ClassVar[Literal["mean", "own", "center"]] = "mean"

    @abstractmethod
    def meeting(self, step: int, rank: int, cluster: ClusterInfo) -> Meeting | None:
        """With whom worker `rank` meets after its step number `step`, from 0; None: with nobody."""

    def start(self, own: Tensor, memory: dict[str, Tensor]) -> None:
        """Before the first step, when all workers have the same weights; remember what is needed."""
        return

    def settle(
        self, own: Tensor, mean: Tensor, memory: dict[str, Tensor], meeting: Average, cluster: ClusterInfo
    ) -> None:
        """Change a worker's own weights in place, given the mean of those who met."""
        own.copy_(mean)
