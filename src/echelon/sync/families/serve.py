"""Policies that a parameter server carries out: arrivals in, decisions out.

A worker computes a gradient on the weights that it got last, pushes it, and gets weights in return when it
is released. When all of a push has arrived, the server's coordinator tells the rule, which decides. A rule
is a state machine: it sees only what it is told, in that order, so the same arrivals always lead to the
same decisions.

A worker that must ask before it pushes is released with `ask`. At its next step it only tells the
coordinator that it has arrived (an arrival of kind "ask"). The rule then lets it go on alone, or invites it
to push.

    kind of arrival   what the worker has pushed                    how it is applied
    gradient          a gradient                                    by the server's optimizer
    delta             how its weights changed since it got some     added to the weights
    weights           its weights                                   by `ServePolicy.meet`
    ask               nothing                                       is answered by Release or Invite

The contract of a rule:
- It settles every arrival but an "ask" exactly once: by an Apply that has it as a part, or by a Drop.
- It answers every arrival exactly once, by a Release or an Invite, before the worker arrives again. An
  Invite is followed by that worker's push of the same step.
- A Release that is not fresh answers an ask or a dropped push, never an applied one: the worker takes a
  step of its own.
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
    """What the coordinator knows about a push, or about an ask.

    `step` counts the worker's own arrivals from 0; an "ask" and the push that it is invited to have the
    same number. `read` is the version of the weights that the worker got last. `compute_s` is how long it
    computed, `transfer_s` how long its last push and pull took, without waiting. If the policy listens,
    `square` is the gradient's squared norm and `dot` its dot product with the gradient before it.
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
    """A push (gradient, delta or weights) and its weight in an update."""

    worker: int
    step: int
    weight: float


class Apply(msgspec.Struct, frozen=True, tag="apply"):
    """Make one update of these pushes; the version of the weights grows by one."""

    parts: tuple[WeightedPush, ...]


class Drop(msgspec.Struct, frozen=True, tag="drop"):
    """Drop a push without applying it."""

    worker: int
    step: int
    reason: str


class Release(msgspec.Struct, frozen=True):
    """Let a worker go on: with the current weights, or, if not `fresh`, alone with its own weights."""

    worker: int
    fresh: bool = True
    ask: bool = False


class Invite(msgspec.Struct, frozen=True, tag="invite"):
    """Let a worker that asked push now."""

    worker: int


class Wake(msgspec.Struct, frozen=True):
    """Call `tick` at this time or soon after."""

    t: float


Decision = Apply | Drop | Release | Invite | Wake


class Rule(ABC):
    """The decisions of one run; they are carried out in their order."""

    @abstractmethod
    def arrive(self, arrival: Arrival) -> list[Decision]:
        """All of a push has arrived, or a worker asks."""

    def leave(self, worker: int, t: float) -> list[Decision]:
        """A released worker takes no part until it joins again; its data may be used up, for example."""
        return []

    def join(self, worker: int, t: float) -> list[Decision]:
        """A worker that had left takes part again, with fresh weights. At first all take part."""
        return []

    def tick(self, t: float) -> list[Decision]:
        """The time of a Wake has come."""
        return []

    def state(self) -> dict[str, float]:
        """Numbers by name that are worth plotting over time, such as the size of a buffer."""
        return {}


class ServePolicy(Policy):
    """A policy that a server carries out.

    A worker pushes at every `push_every`-th of its steps and gets weights at every `pull_every`-th. In
    between it takes steps of its own, and then pushes the sum of its gradients since the last push.
    `pushes` is what a worker pushes; one that was alone pushes its delta. `listens`: arrivals carry
    `square` and `dot`. `amends`: see `amend`. `alone`: a worker may be told to go on alone (a Release that
    is not fresh).
    """

    __slots__ = ()
    family: ClassVar[Family] = "serve"
    pushes: ClassVar[Literal["gradient", "weights"]] = "gradient"
    listens: ClassVar[bool] = False
    amends: ClassVar[bool] = False
    alone: ClassVar[bool] = False

    @abstractmethod
    def rule(self, cluster: ClusterInfo) -> Rule:
        """A new rule for one run."""

    @property
    def push_every(self) -> int:
        """The number of steps from one push to the next."""
        return 1

    @property
    def pull_every(self) -> int:
        """The number of steps from one pull to the next."""
        return 1

    def amend(self, gradient: Tensor, weights: Tensor, read: Tensor, memory: dict[str, Tensor]) -> Tensor:
        """Correct a gradient that was computed on the weights `read`, for the weights of now."""
        return gradient

    def meet(self, center: Tensor, theirs: Tensor) -> Tensor:
        """Combine pushed weights with the server's, in place; returns the worker's new weights."""
        raise NotImplementedError(f"sync {self.name} pushes weights, but does not implement `meet`")


def mean(arrivals: Sequence[Arrival]) -> Apply:
    """An update by the mean over all samples: sum_i (n_i / N) g_i."""
    total = sum(arrival.samples for arrival in arrivals)
    return Apply(tuple(WeightedPush(a.worker, a.step, a.samples / total) for a in arrivals))


def needs_server(policy: Policy, cluster: ClusterInfo) -> None:
    """Refuse a cluster without a server."""
    if cluster.servers < 1:
        raise ConfigError(
            f"{policy.name} needs a parameter server, and there is none",
            where="--sync",
            fix="start one with --servers 1",
        )
