"""Policies by which workers take steps of their own and average weights with each other in between.

Which workers average after a step depends only on the step's number, so all know it without communication.
How a worker uses the mean is an element-wise function of tensors; `memory` keeps the policy's tensors from
one averaging to the next.
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
    """All members get the mean of their weights, and use it as `MixPolicy.settle` says."""

    members: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Neighbours:
    """A worker's weights become the sum of w_j x_j over these workers and itself; the w_j sum to one."""

    weights: Mapping[int, float]


Averaging = Average | Neighbours


class MixPolicy(Policy):
    """A policy by which workers average weights with each other.

    `shown` is what is evaluated and saved after a pass over the data: the mean of all workers' weights,
    each worker's own, or the tensor "center" in memory (the same on all workers). With `weighs` means are
    weighted by the workers' shares of the samples.
    """

    __slots__ = ()
    family: ClassVar[Family] = "mix"
    weighs: ClassVar[bool] = True
    shown: ClassVar[Literal["mean", "own", "center"]] = "mean"

    @abstractmethod
    def averaging(self, step: int, rank: int, cluster: ClusterInfo) -> Averaging | None:
        """Which workers `rank` averages with after step number `step`, from 0; None if with nobody."""

    def start(self, own: Tensor, memory: dict[str, Tensor]) -> None:
        """Called before the first step, when all workers have the same weights; may fill `memory`."""
        return

    def settle(
        self, own: Tensor, mean: Tensor, memory: dict[str, Tensor], average: Average, cluster: ClusterInfo
    ) -> None:
        """Change a worker's own weights in place, given the mean of the members' weights."""
        own.copy_(mean)
