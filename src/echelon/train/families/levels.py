"""Groups of workers that act as one worker: a policy inside each group, another one between the groups.

Inside, gradients are reduced or weights averaged over the group. The group's first member takes part in
the policy between groups for all members, and sends them the resulting weights. A codec encodes messages
to a server; inside a group everything is sent unencoded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from echelon.codec.codec import CODECS
from echelon.codec.codecs.between import Between
from echelon.codec.fitting import refuse_for_weights, served_codec
from echelon.comm.group import Group
from echelon.comm.schedule.cost import LinkCost
from echelon.plan.shares import split
from echelon.server.channel import ServerChannel
from echelon.sync.families.mix import MixPolicy
from echelon.sync.families.serve import ServePolicy
from echelon.sync.policies.levels import Levels, members_of, units_of
from echelon.sync.policy import ClusterInfo
from echelon.train import consistency as agree
from echelon.train.clock import StepClock
from echelon.train.families.mix import MixSynchronizer
from echelon.train.families.reduce import ReduceSynchronizer
from echelon.train.families.serve import ServeSynchronizer
from echelon.train.families.synchronizer import (
    Explain,
    IndependentSynchronizer,
    ModelOptions,
    Overlap,
    Synchronizer,
    replace_step,
)


class LevelsSynchronizer(IndependentSynchronizer):
    """Synchronises one worker inside its group, and its group with the others."""

    def __init__(
        self,
        group: Group,
        clock: StepClock,
        policy: Levels,
        cluster: ClusterInfo,
        *,
        link: LinkCost | None,
        replicas: int,
        explain: Explain,
        codec: str = "none",
    ) -> None:
        super().__init__(group, policy.name, explain)
        self._clock = clock
        self._cluster = cluster
        self._units = units_of(cluster)
        self.unit = next(index for index, ranks in enumerate(cluster.groups) if group.rank in ranks)
        self._mates, leaders = _open(group, cluster)
        self._inside: Synchronizer
        inside, between = policy.inside, policy.between
        if isinstance(inside, MixPolicy):
            members = members_of(cluster, cluster.groups[self.unit])
            self._inside = MixSynchronizer(self._mates, clock, inside, members, explain=explain)
        else:
            self._inside = ReduceSynchronizer(self._mates, clock, link=link, explain=explain)
        self._served = isinstance(between, ServePolicy)
        codec = self._towards_server(codec)
        self.claims = self._served and len({len(ranks) for ranks in cluster.groups}) == 1
        self._between: ServeSynchronizer | MixSynchronizer | None = None
        self._line: ServerChannel | None = None
        self._plan: MixPolicy | None = between if isinstance(between, MixPolicy) else None
        if leaders is not None and isinstance(between, ServePolicy):
            self._between = ServeSynchronizer(
                leaders,
                clock,
                between,
                policy.outer,
                self._units,
                replicas=replicas,
                explain=explain,
                codec=codec,
                after_step=lambda optimizer: self._spread(optimizer),
                members=[group.ranks[rank] for rank in cluster.groups[self.unit]],
            )
        elif leaders is not None and isinstance(between, MixPolicy):
            self._between = MixSynchronizer(leaders, clock, between, self._units, explain=explain)
        elif self._served:
            self._line = ServerChannel.open(group)
        self._optimizers: list[Optimizer] = []
        self._steps: dict[int, int] = {}
        self._undo: list[Callable[[], None]] = []

    def _towards_server(self, codec: str) -> str:
        """The codec of messages to a server; of `between(codec)` the inner one, since a group is a site."""
        if not self._served:
            refuse_for_weights(codec, self._name)
            return codec
        built = CODECS.build(codec, where="--codec")
        inner = built.codec if isinstance(built, Between) else codec
        served_codec(inner)
        return inner

    @property
    def slots(self) -> tuple[int, Callable[[int], int]]:
        """How many groups claim parts of a batch, and which part of its group's is this worker's."""
        size, place = self._mates.size, self._mates.rank
        return len(self._cluster.groups), lambda slot: slot * size + place

    def claim(self, ticket: Callable[[], int]) -> int:
        """The first member claims for its group."""
        drawn = torch.tensor([ticket() if self._mates.rank == 0 else 0])
        self._mates.broadcast(drawn)
        return int(drawn)

    def add(self, model: nn.Module, rules: ModelOptions) -> None:
        """Start from the leader's weights; then each group synchronises its own."""
        super().add(model, rules)
        self._inside.add(model, rules)
        if isinstance(self._between, ServeSynchronizer):
            self._between.know(model)

    def adopt(
        self, optimizer: Optimizer, overlap: Overlap, before: Callable[[], None], after: Callable[[], None]
    ) -> None:
        """Make the optimizer's steps those of the group."""
        self._optimizers.append(optimizer)
        if not self._served:
            self._inside.adopt(optimizer, "backward", before, after)
            handle = optimizer.register_step_post_hook(lambda *_: self._average_groups(optimizer))
            self._undo.append(handle.remove)
        if self._between is not None:
            if self._served:
                self._between.adopt(optimizer, "backward", before, after)
            else:
                self._between.watch(optimizer)  # type: ignore[union-attr]
        elif self._served:
            self._undo.append(replace_step(optimizer, lambda own: self._follow(optimizer, before, after)))

    def begin(self) -> None:
        """Open the level between the groups."""
        self._inside.begin()
        if self._between is not None:
            self._between.begin()
            if isinstance(self._between, ServeSynchronizer):
                self._between.push_late()
        self._group.barrier()

    def _follow(self, optimizer: Optimizer, before: Callable[[], None], after: Callable[[], None]) -> None:
        """Take the weights that the first member sends."""
        self._clock.arrived()
        self._spread(optimizer)
        self._clock.reduced(0)
        before()
        after()

    def _average_groups(self, optimizer: Optimizer) -> None:
        """After a step: if the groups average now, the first members do, and share the result."""
        assert self._plan is not None
        step = self._steps.get(id(optimizer), 0)
        self._steps[id(optimizer)] = step + 1
        if self._plan.averaging(step, self.unit, self._units) is None:
            if isinstance(self._between, MixSynchronizer):
                self._between.average(optimizer)
            return
        if isinstance(self._inside, MixSynchronizer):
            self._average_members(optimizer)
        if isinstance(self._between, MixSynchronizer):
            self._between.average(optimizer)
        self._spread(optimizer)

    @torch.no_grad()
    def _average_members(self, optimizer: Optimizer) -> None:
        """Set the weights to the members' mean, by shares, before groups average."""
        shares = (
            members_of(self._cluster, self._cluster.groups[self.unit]).shares or (1.0,) * self._mates.size
        )
        part = shares[self._mates.rank] / sum(shares)
        for p in _parameters(optimizer):
            mean = p.detach() * part
            self._mates.all_reduce(mean).wait()
            p.copy_(mean)

    def _spread(self, optimizer: Optimizer) -> None:
        """Give all members the first member's weights."""
        agree.share_tensors(self._mates, [p.data for p in _parameters(optimizer)])

    def keep(self, active: bool) -> None:
        """Keep gradients on this worker while `active`."""
        self._inside.keep(active)

    def weigh(self, weight: float, batch: int = 0) -> None:
        """Set the worker's weight in its group, and the group's weight among the groups."""
        if batch:
            shares: list[float] = list(self._cluster.shares) or [1.0] * self._cluster.workers
            parts = split(batch, shares)
            whole = sum(parts[rank] for rank in self._cluster.groups[self.unit]) / batch
        else:  # from `session.weigh`
            total = torch.tensor([weight], dtype=torch.float64)
            whole = float(self._mates.all_reduce(total).wait())
        self._inside.weigh(weight / whole)
        if self._between is not None:
            self._between.weigh(whole)

    def resolve_with(self, resolve: Callable[[], None]) -> None:
        """Call it before the policy inside the group uses a weight."""
        self._inside.resolve_with(resolve)

    def refresh(self, *, ended: bool, trains: bool) -> None:
        """Refresh both levels. Members that differ continue with the weights shown."""
        if (
            isinstance(self._inside, MixSynchronizer)
            and isinstance(self._between, MixSynchronizer)
            and trains
        ):
            self._between.stay()
        if isinstance(self._inside, MixSynchronizer) and trains and not ended:
            self._inside.stay()
        self._inside.refresh(ended=ended, trains=trains)
        if self._between is not None:
            self._between.refresh(ended=ended, trains=trains)
        for optimizer in self._optimizers:
            self._spread(optimizer)
        self._group.barrier()
        self._share_buffers()

    def left(self) -> None:
        """Report it for the group, whose members leave a loop together."""
        if self._between is not None:
            self._between.left()

    def depart(self) -> None:
        """Report it for the group, whose members leave a loop together."""
        if self._between is not None:
            self._between.depart()

    def before_step(self, optimizer: Optimizer, where: str) -> None:
        """Do as the policy inside the group does."""
        self._inside.before_step(optimizer, where)

    def settle(self) -> None:
        """Do as the policy inside the group does."""
        self._inside.settle()

    def before_save(self) -> None:
        """Show the weights to save."""
        if self._between is not None:
            self._between.before_save()
        for optimizer in self._optimizers:
            self._spread(optimizer)

    def after_save(self) -> None:
        """Restore the weights."""
        if self._between is not None:
            self._between.after_save()
        for optimizer in self._optimizers:
            self._spread(optimizer)

    def loaded(self) -> None:
        """Start again from the loaded weights."""
        self._inside.loaded()
        if self._between is not None:
            self._between.loaded()
        self._group.barrier()

    def own_state(self) -> dict[str, Any]:
        """Both levels' own states; without a server also the weights and the states of optimizers."""
        state: dict[str, Any] = {
            "inside": self._inside.own_state(),
            "between": {} if self._between is None else self._between.own_state(),
            "groups": [list(ranks) for ranks in self._cluster.groups],
            "steps": [self._steps.get(id(optimizer), 0) for optimizer in self._optimizers],
        }
        if not self._served:
            state["optimizers"] = [optimizer.state_dict() for optimizer in self._optimizers]
            state["weights"] = [[p.detach().clone() for p in _parameters(o)] for o in self._optimizers]
        return state

    @torch.no_grad()
    def restore_own(self, states: Sequence[dict[str, Any]]) -> None:
        """Take them over if the groups are the same; otherwise only how many steps there were."""
        if not states or len(states[0].get("steps", ())) != len(self._optimizers):
            return
        for optimizer, steps in zip(self._optimizers, states[0]["steps"], strict=True):
            self._steps[id(optimizer)] = steps
        groups = [list(ranks) for ranks in self._cluster.groups]
        if len(states) != self._group.size or states[0]["groups"] != groups:
            return
        mine = states[self._group.rank]
        for optimizer, state in zip(self._optimizers, mine.get("optimizers", ()), strict=False):
            optimizer.load_state_dict(state)
        for optimizer, values in zip(self._optimizers, mine.get("weights", ()), strict=False):
            for p, value in zip(_parameters(optimizer), values, strict=True):
                p.copy_(value)
        self._inside.restore_own([states[rank]["inside"] for rank in self._cluster.groups[self.unit]])
        if self._between is not None:
            self._between.restore_own([states[ranks[0]]["between"] for ranks in self._cluster.groups])

    def residuals(self) -> dict[str, Any]:
        """The residuals of the first member's codec."""
        return {} if self._between is None else self._between.residuals()

    def restore_residuals(self, residuals: Sequence[dict[str, Any]]) -> None:
        """First members take over first members' residuals; if groups differ, their sum stays the same."""
        if self._between is None:
            return
        leaders = [ranks[0] for ranks in self._cluster.groups]
        owing = [rank for rank, one in enumerate(residuals) if "tables" in one]
        same = len(residuals) == self._cluster.workers and owing == sorted(leaders)
        self._between.restore_residuals([residuals[rank] for rank in leaders] if same else residuals)

    def finish(self) -> None:
        """End with the same weights on all workers."""
        self._inside.finish()
        if self._between is not None:
            self._between.finish()
        for optimizer in self._optimizers:
            self._spread(optimizer)

    def close(self) -> None:
        """Remove all hooks from models and optimizers."""
        while self._undo:
            self._undo.pop()()
        if self._between is not None:
            self._between.close()
        if self._line is not None:
            self._line.close()
        self._inside.close()


def _open(group: Group, cluster: ClusterInfo) -> tuple[Group, Group | None]:
    """This worker's group, and that of the first members. All workers open all groups in this order."""
    mates = [group.subgroup(ranks) for ranks in cluster.groups]
    own = next(found for found in mates if found is not None)
    return own, group.subgroup([ranks[0] for ranks in cluster.groups])


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]
