"""What a synchronisation policy is, and what it may know.

There are five families, by who carries the policy out:

    reduce  every step's gradients are reduced by a collective; nobody decides anything (full)
    serve   a parameter server is told of every arrival and decides (`served.py`)
    mix     workers take steps of their own and average weights among each other (`mixed.py`)
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
    """What a policy may know before training starts: who takes part.

    `workers` counts those whom the policy lets agree: workers, or groups that act as one. `shares` are
    their parts of a batch, `speeds` how fast they compute and `links` their bytes per second, relative to
    each other or absolute; empty where nothing is known. `lr` is the optimizer's learning rate.
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


class Policy(Strategy):
    """When, and with whom, workers agree. Holds its options only."""

    __slots__ = ()
    family: ClassVar[Family]

    @abstractmethod
    def check(self, cluster: ClusterInfo) -> None:
        """Refuse, with a reason and a fix, what cannot work with this crew; before anybody starts."""

    def resolved(self) -> Policy:
        """What is carried out: a policy of one name may be of another family for some of its options."""
        return self


# mypy cannot take an abstract class as a value; the registry never instantiates the contract.
POLICIES: Registry[Policy] = Registry("sync", Policy, "echelon.sync.policies")  # type: ignore[type-abstract]
