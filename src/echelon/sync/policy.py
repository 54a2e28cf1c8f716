"""The contract of a synchronisation policy, and what a policy knows of the cluster.

There are five families, by who executes the policy:

    reduce  a collective reduces the gradients of every step; nothing is decided (full)
    serve   a parameter server decides on every arrival (`families/serve.py`)
    mix     workers take steps of their own and average weights with each other (`families/mix.py`)
    share   all workers of a machine update the same memory (hogwild)
    levels  one policy inside groups, another one between them
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal

from echelon.config.registry import Registry, Strategy

Family = Literal["reduce", "serve", "mix", "share", "levels"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterInfo:
    """What a policy knows before training starts.

    `workers` counts the workers that the policy synchronises, or the groups, if groups act as workers.
    `shares` are their parts of a batch, `speeds` their computing speeds and `links` their bytes per second,
    absolute or relative to each other; empty if unknown. `lr` is the optimizer's learning rate. `absent`
    are workers that were lost and are not back.
    """

    workers: int
    servers: int = 0
    machines: int = 1
    groups: tuple[tuple[int, ...], ...] = ()
    shares: tuple[float, ...] = ()
    speeds: tuple[float, ...] = ()
    links: tuple[float, ...] = ()
    lr: float | None = None
    seed: int = 0
    absent: tuple[int, ...] = ()


class Policy(Strategy):
    """When workers synchronise, and with whom. Holds only its options."""

    __slots__ = ()
    family: ClassVar[Family]

    @abstractmethod
    def check(self, cluster: ClusterInfo) -> None:
        """Raise ConfigError, with a fix, if the policy cannot work with this cluster."""

    def advice(self, cluster: ClusterInfo) -> str:
        """A sentence for the user on this cluster, such as on the learning rate; empty if there is none."""
        return ""

    def resolved(self) -> Policy:
        """The policy that is executed; with some options it belongs to another family."""
        return self


# mypy cannot take an abstract class as a value; the registry never instantiates the contract.
POLICIES: Registry[Policy] = Registry("sync", Policy, "echelon.sync.policies")  # type: ignore[type-abstract]
