"""Workers take steps of their own and average their weights by the policy's schedule.

An averaging treats all weights of an optimizer as one flat buffer. Between passes over the data the
models hold the weights to evaluate and save: the mean of all workers, a center, or each worker's own.
When the next pass begins, every worker continues with its own weights.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from echelon.comm.changing import ChangingGroup, GroupChanges
from echelon.comm.group import Group
from echelon.errors import ConfigError
from echelon.sync.families.mix import Average, MixPolicy, Neighbours
from echelon.sync.policy import ClusterInfo
from echelon.train.families.synchronizer import Explain, IndependentSynchronizer, Overlap

_MOST_SLOTS = 256  # for a flag of each worker; they travel with the weights


class Observer(Protocol):
    """Is told how long averagings take."""

    def computing(self) -> None:
        """A gradient is ready."""

    def waited(self, wait_s: float) -> None:
        """The trainer waited for other workers."""

    def averaged(self, sent_bytes: int) -> None:
        """An averaging is over."""


class _Weights:
    """One optimizer's weights, as one flat buffer."""

    def __init__(self, optimizer: Optimizer, policy: MixPolicy) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        kinds = {p.dtype for p in parameters}
        if len(kinds) != 1:
            raise ConfigError(
                f"only weights of one type can be averaged, and these are {sorted(map(str, kinds))}",
                where="--sync",
                fix="convert the model to one type, or use --sync full",
            )
        self.optimizer = optimizer
        self.parameters: list[nn.Parameter] = parameters
        self.memory: dict[str, Tensor] = {}
        self.steps = 0
        self.kept: Tensor | None = None
        policy.start(self.flat(), self.memory)

    @torch.no_grad()
    def flat(self) -> Tensor:
        """A flat copy of all weights."""
        return torch.cat([p.detach().reshape(-1) for p in self.parameters])

    @torch.no_grad()
    def put(self, flat: Tensor) -> None:
        """Set all weights from a flat copy."""
        at = 0
        for p in self.parameters:
            p.copy_(flat[at : at + p.numel()].view_as(p))
            at += p.numel()


class MixSynchronizer(IndependentSynchronizer):
    """Averages one worker's weights with other workers'."""

    def __init__(
        self, group: Group, observer: Observer, policy: MixPolicy, cluster: ClusterInfo, *, explain: Explain
    ) -> None:
        super().__init__(group, policy.name, explain)
        self._observer = observer
        self._policy = policy
        self._cluster = cluster
        self._weights: list[_Weights] = []
        self._new: list[Optimizer] = []
        self._handles: list[Callable[[], None]] = []
        self._borrowed: list[_Weights] = []
        self._levels: dict[tuple[int, ...], Group] = {}
        self._opened_on: Group | None = None  # which the levels belong to, where members may be lost
        self._averaged: list[int] = []  # whose weights the last mean was of, where workers may be lost

    def adopt(
        self, optimizer: Optimizer, overlap: Overlap, before: Callable[[], None], after: Callable[[], None]
    ) -> None:
        """After every step of this optimizer, average if the policy says so."""
        self.watch(optimizer)

        def stepped() -> None:
            after()
            self.average(optimizer)

        self._handles.append(optimizer.register_step_pre_hook(lambda *_: before()).remove)
        self._handles.append(optimizer.register_step_post_hook(lambda *_: stepped()).remove)

    def watch(self, optimizer: Optimizer) -> None:
        """Register an optimizer whose steps the caller reports with `average`."""
        self._new.append(optimizer)

    def begin(self) -> None:
        """Register the weights that all workers start from."""
        self._policy.check(self._cluster)
        for optimizer in self._new:
            weights = _Weights(optimizer, self._policy)
            for p in weights.parameters:
                handle = p.register_post_accumulate_grad_hook(lambda _: self._observer.computing())
                self._handles.append(handle.remove)
            self._weights.append(weights)
        self._new = []

    def _of(self, optimizer: Optimizer) -> _Weights:
        first = optimizer.param_groups[0]["params"][0]
        return next(weights for weights in self._weights if weights.parameters[0] is first)

    def average(self, optimizer: Optimizer) -> None:
        """Average after a step with the workers that the policy names, if it names any."""
        weights = self._of(optimizer)
        weights.kept = None  # no prepared loader: continue with the weights shown
        step = weights.steps
        weights.steps += 1
        if isinstance(self._group, ChangingGroup) and self._in_parts(step):
            self._average_in_parts(weights, step, self._group)
            return
        averaging = self._policy.averaging(step, self._group.slot, self._cluster)
        if averaging is None:
            return
        begun = time.perf_counter()
        own = weights.flat()
        if isinstance(averaging, Neighbours):
            mixed = _with_neighbours(self._group, own, averaging, range(self._group.size))
        else:
            mixed = own.clone()
            mean = self._mean(own, averaging.members)
            if self._group.changes is not None:
                self._group.changes.reduced(self._averaged)
            self._policy.settle(mixed, mean, weights.memory, averaging, self._cluster)
        self._put(weights, mixed, begun)

    def _put(self, weights: _Weights, mixed: Tensor, begun: float) -> None:
        weights.put(mixed)
        self._observer.waited(time.perf_counter() - begun)
        self._observer.averaged(mixed.numel() * mixed.element_size())

    def _in_parts(self, step: int) -> bool:
        """Whether workers average after this step, but not all with each other; whoever is lost."""
        everybody = range(self._cluster.workers)
        among = [self._policy.averaging(step, slot, self._cluster) for slot in everybody]
        whole = all(isinstance(one, Average) and len(one.members) == len(everybody) for one in among)
        return any(one is not None for one in among) and not whole

    def _average_in_parts(self, weights: _Weights, step: int, changing: ChangingGroup) -> None:
        """Where workers may be lost: those who are left average anew, unless all have what they need."""
        begun = time.perf_counter()
        own = weights.flat()

        def exchange(group: Group, members: tuple[int, ...]) -> Tensor:
            slot = members[group.rank]
            cluster = self._without(members)
            averaging = self._policy.averaging(step, slot, cluster)
            if isinstance(averaging, Neighbours):
                return _with_neighbours(group, own, averaging, members)
            others = (self._policy.averaging(step, one, cluster) for one in members)
            if any(isinstance(one, Neighbours) for one in others):
                group.neighbor_all_gather(own, [])  # all members make as many exchanges
                return own
            level = self._level_of(group, members, slot) if averaging is not None else None
            if level is None or averaging is None:
                return own
            part = self._share_of(slot) / sum(self._share_of(one) for one in averaging.members)
            mean = level.all_reduce(own * part).wait()
            mixed = own.clone()
            self._policy.settle(mixed, mean, weights.memory, averaging, self._cluster)
            return mixed

        mixed, members = changing.confirmed(exchange)
        cluster = self._without(members)
        alone = [one for one in members if self._policy.averaging(step, one, cluster) is None]
        changing.changes.reduced([one for one in members if one not in alone], alone)
        self._put(weights, mixed, begun)

    def _without(self, members: Sequence[int]) -> ClusterInfo:
        """The cluster, in which others than these workers are absent."""
        absent = tuple(slot for slot in range(self._cluster.workers) if slot not in members)
        return replace(self._cluster, absent=absent)

    def _share_of(self, slot: int) -> float:
        return self._cluster.shares[slot] if self._policy.weighs and self._cluster.shares else 1.0

    def _level_of(self, group: Group, members: tuple[int, ...], slot: int) -> Group | None:
        """The group of this worker as it is now; all members open all groups in the same order."""
        if self._opened_on is not group:
            self._opened_on, self._levels = group, {}
            for slots in self._cluster.groups:
                ranks = [members.index(one) for one in slots if one in members]
                level = group.subgroup(ranks) if len(ranks) > 1 else None
                if level is not None:
                    self._levels[slots] = level
        return next((level for slots, level in self._levels.items() if slot in slots), None)

    def _mean(self, own: Tensor, members: Sequence[int]) -> Tensor:
        if self._group.changes is not None:
            return self._mean_of_all(own, self._group.changes)
        equal = (1.0,) * self._group.size
        shares = self._cluster.shares or equal if self._policy.weighs else equal
        total = sum(shares[rank] for rank in members)
        group = self._subgroup(tuple(members))
        flat = own * (shares[self._group.rank] / total)
        return group.all_reduce(flat).wait()

    def _mean_of_all(self, own: Tensor, changes: GroupChanges) -> Tensor:
        """Where workers may be lost: the mean of those who are there. Who they are travels along."""
        shares = self._cluster.shares or (1.0,)
        share = 1.0
        if self._policy.weighs:  # one that has joined later has the mean
            share = dict(enumerate(shares)).get(changes.slot, sum(shares) / len(shares))
        along = own.new_zeros(1 + _MOST_SLOTS)
        along[0], along[1 + changes.slot] = share, 1.0
        total = self._group.all_reduce(torch.cat([own * share, along])).wait()
        self._averaged = [slot for slot, there in enumerate(total[-_MOST_SLOTS:].tolist()) if there]
        return total[: own.numel()] / total[own.numel()]

    def _subgroup(self, members: tuple[int, ...]) -> Group:
        """The group of these members; all workers request theirs at the same time."""
        if len(members) == self._group.size:
            return self._group
        if members not in self._levels:
            self._open_levels()
        return self._levels[members]

    def _open_levels(self) -> None:
        for members in self._cluster.groups:
            level = self._group.subgroup(members)
            if level is not None:
                self._levels[tuple(members)] = level

    def refresh(self, *, ended: bool, trains: bool) -> None:
        """After a pass, show the weights to evaluate; before one that trains, restore this worker's own."""
        for weights in self._weights:
            if ended:
                self._show(weights)
            elif trains and weights.kept is not None:
                weights.put(weights.kept)
                weights.kept = None
        if self._policy.shown != "own":
            self._share_buffers()

    def stay(self) -> None:
        """Continue with the weights that are shown."""
        for weights in self._weights:
            weights.kept = None

    def _show(self, weights: _Weights) -> None:
        if self._policy.shown == "own" or weights.kept is not None:
            return
        own = weights.flat()
        if self._policy.shown == "center":
            weights.put(weights.memory["center"])
        else:
            weights.put(self._mean(own, range(self._group.size)))
        weights.kept = own

    def before_save(self) -> None:
        """Show the weights to save."""
        self._borrowed = [weights for weights in self._weights if weights.kept is None]
        for weights in self._weights:
            self._show(weights)

    def after_save(self) -> None:
        """Restore this worker's own weights."""
        for weights in self._borrowed:
            if weights.kept is not None:
                weights.put(weights.kept)
                weights.kept = None
        self._borrowed = []

    def loaded(self) -> None:
        """Start again from the loaded weights."""
        for weights in self._weights:
            weights.kept = None
            weights.memory.clear()
            self._policy.start(weights.flat(), weights.memory)

    def own_state(self) -> dict[str, Any]:
        """This worker's weights, optimizer states, buffers, and what the policy keeps."""
        return {
            "weights": [
                {
                    "own": weights.flat() if weights.kept is None else weights.kept.clone(),
                    "shown": weights.kept is not None,
                    "memory": {name: value.clone() for name, value in weights.memory.items()},
                    "steps": weights.steps,
                    "optimizer": weights.optimizer.state_dict(),
                }
                for weights in self._weights
            ],
            "buffers": [[buffer.clone() for buffer in model.buffers()] for model in self._models],
        }

    @torch.no_grad()
    def restore_own(self, states: Sequence[dict[str, Any]]) -> None:
        """Go on with this worker's own weights; with another number of workers, with those shown."""
        if not states or len(states[0].get("weights", ())) != len(self._weights):
            return
        for weights, saved in zip(self._weights, states[0]["weights"], strict=True):
            weights.steps = saved["steps"]
        if len(states) != self._group.size:
            return
        mine = states[self._group.rank]
        for weights, saved in zip(self._weights, mine["weights"], strict=True):
            weights.optimizer.load_state_dict(saved["optimizer"])
            weights.memory = dict(saved["memory"])
            weights.kept = saved["own"] if saved["shown"] else None
            if not saved["shown"]:
                weights.put(saved["own"])
        for model, buffers in zip(self._models, mine["buffers"], strict=True):
            for buffer, value in zip(model.buffers(), buffers, strict=True):
                buffer.copy_(value)

    def shared_state(self) -> dict[str, Any]:
        """What the policy keeps, right after an averaging of all."""
        return {
            "averages": [
                {"steps": weights.steps, "memory": dict(weights.memory)} for weights in self._weights
            ]
        }

    def adopt_shared(self, state: dict[str, Any]) -> None:
        """Take over what another worker's policy keeps."""
        for weights, saved in zip(self._weights, state["averages"], strict=True):
            weights.steps, weights.memory = int(saved["steps"]), dict(saved["memory"])

    def finish(self) -> None:
        """End with the same weights on all workers."""
        for weights in self._weights:
            if self._policy.shown != "own":
                self._show(weights)
            else:
                weights.put(self._mean(weights.flat(), range(self._group.size)))
                self._explain(
                    "average",
                    "the workers' weights were averaged once, at the end",
                    f"sync {self._name}: the weights of {self._group.size} workers were averaged only "
                    "at the end; evaluations before that are each worker's own",
                )
            weights.kept = None

    def close(self) -> None:
        """Remove all hooks from optimizers."""
        while self._handles:
            self._handles.pop()()


def _with_neighbours(group: Group, own: Tensor, averaging: Neighbours, slots: Sequence[int]) -> Tensor:
    """The weighted sum of a worker's and its neighbours' weights, by the slots of the group's ranks."""
    slot = slots[group.rank]
    peers = [one for one in sorted(averaging.weights) if one != slot]
    theirs = group.neighbor_all_gather(own, [slots.index(one) for one in peers])
    found = {slot: own, **dict(zip(peers, theirs, strict=True))}
    mixed = torch.zeros_like(own)
    for one in sorted(averaging.weights):
        mixed.add_(found[one], alpha=averaging.weights[one])
    return mixed
