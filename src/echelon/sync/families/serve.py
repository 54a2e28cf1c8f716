"""Policies that a parameter server carries out: what has arrived goes in, what to do comes out.

A worker computes a gradient on weights that it was handed, pushes it, and gets weights in return when it is
released. The server's coordinator hears of every push once all of it is there, and asks the rule. A rule is
a state machine: it sees nothing but what it is told, in the order in which it is told, so the same
arrivals always lead to the same decisions.

A worker whose next step needs leave before anything is pushed is released with `ask`: it then only says
that it is there (an arrival of kind "ask"), and the rule lets it go on alone or invites it to push.

    kind of arrival   what the worker has pushed                    how it is applied
    gradient          a gradient                                    by the server's optimizer
    delta             how its weights changed since it got some     added to the weights
    weights           its weights                                   by `ServePolicy.meet`
    ask               nothing                                       is answered by Release or Invite

Every arrival of another kind than "ask" is settled exactly once: it is part of an Apply, or it is dropped.
Every arrival is answered exactly once, by a Release or an Invite, now or later, before the worker arrives
again; except that an Invite is followed by that worker's push of the same step. A Release that is not fresh
answers an ask or a push that was dropped, never one that was applied: the worker makes a step of its own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import msgspec

from echelon.errors import ConfigError
from echelon.sync.policy import ClusterInfo, Family, Policy

if TYPE_CHECKING:
    from torch import Tensor

Kind = Literal["gradient", "delta", "weights", "ask"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """What the coordinator knows about a push.

    `step` counts the worker's own arrivals at the server from 0; an "ask" and the push it is invited to
    have the same one. `read` is the version of the weights that it was last handed. `compute_s` is how
    long it computed, `transfer_s` how long its last push and pull took, without waiting; `square` is the
    gradient's squared norm and `dot` its product with the gradient before it, if the policy listens.
    """

    worker: int
    step: int
    t: float
    kind: Kind = "gradient"
    read: int = 0
    samples: float = 1.0
    compute_s: float = 0.0
    transfer_s: float = 0.0
    square: float = 0.0
    dot: float = 0.0


class WeightedPush(msgspec.Struct, frozen=True):
    """A pushed gradient (delta, weights) and what it is multiplied by."""

    worker: int
    step: int
    weight: float


class Apply(msgspec.Struct, frozen=True, tag="apply"):
    """Make one update of these parts; the version of the weights grows by one."""

    parts: tuple[WeightedPush, ...]


class Drop(msgspec.Struct, frozen=True, tag="drop"):
    """Forget a push."""

    worker: int
    step: int
    reason: str


class Release(msgspec.Struct, frozen=True):
    """Let a worker go on: with the weights as they are now, or (not fresh) with its own, alone."""

    worker: int
    fresh: bool = True
    ask: bool = False


class Invite(msgspec.Struct, frozen=True, tag="invite"):
    """Let a worker that asked push now."""

    worker: int


class Wake(msgspec.Struct, frozen=True):
    """Call `tick` at this time, or somewhat later."""

    t: float


Decision = Apply | Drop | Release | Invite | Wake


class Rule(ABC):
    """One run of a served policy. Decisions are carried out in their order."""

    @abstractmethod
    def arrive(self, arrival: Arrival) -> list[Decision]:
        """A push is there as a whole, or a worker asks."""

    def leave(self, worker: int, t: float) -> list[Decision]:
        """A worker that was released takes no part until it joins again: its data is used up, say."""
        return []

    def join(self, worker: int, t: float) -> list[Decision]:
        """A worker that had left takes part again, with fresh weights. All take part at first."""
        return []

    def tick(self, t: float) -> list[Decision]:
        """The time that was asked for has come."""
        return []

    def state(self) -> dict[str, float]:
        """Numbers worth drawing over time, by name: K of a buffer, who is left out."""
        return {}


class ServePolicy(Policy):
    """A policy that a server carries out.

    push_every, pull_every: a worker pushes at every n-th of its steps and takes weights at every m-th; in
    between it takes steps of its own, and what it pushes are its gradients since the last push, summed.
    `pushes` is what a worker sends that has not been on its own (one that was sends its delta). `listens`:
    arrivals carry `square` and `dot`. `amends`: see `amend`. `alone`: a
    worker may be told to go on by itself (a Release that is not fresh).
    """

    __slots__ = ()
    family: ClassVar[Family] = "serve"
    pushes: ClassVar[Literal["gradient", "weights"]] = "gradient"
    listens: ClassVar[bool] = False
    amends: ClassVar[bool] = False
    alone: ClassVar[bool] = False

    @abstractmethod
    def rule(self, cluster: ClusterInfo) -> Rule:
        """A state machine for one run."""

    @property
    def push_every(self) -> int:
        """After how many steps a worker pushes."""
        return 1

    @property
    def pull_every(self) -> int:
        """After how many steps a worker takes the server's weights."""
        return 1

    def amend(self, gradient: Tensor, weights: Tensor, read: Tensor, memory: dict[str, Tensor]) -> Tensor:
        """A gradient as it should have been; `read` are the weights that it was computed on."""
        return gradient

    def meet(self, center: Tensor, theirs: Tensor) -> Tensor:
        """Pushed weights meet the server's, which change in place; returns the worker's new ones."""
        raise NotImplementedError(f"sync {self.name} pushes weights, and has no `meet`")


def mean(arrivals: Sequence[Arrival]) -> Apply:
    """An update by the mean over all samples: sum_i (n_i / N) g_i."""
    total = sum(arrival.samples for arrival in arrivals)
    return Apply(tuple(WeightedPush(a.worker, a.step, a.samples / total) for a in arrivals))


def needs_server(policy: Policy, cluster: ClusterInfo) -> None:
    """Refuse a crew without a server."""
    if cluster.servers < 1:
        raise ConfigError(
            f"{policy.name} is decided by a parameter server, and there is none",
            where="--sync",
            fix="start one with --servers 1",
        )
