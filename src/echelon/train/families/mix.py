"""Workers take steps of their own and average their weights among each other, as the policy's schedule is.

All weights of an optimizer are one flat buffer for a meeting. Between passes over the data every worker
shows what is to be evaluated and saved: the mean of all, a center, or its own; when the next pass begins it
goes on with its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from echelon.comm.group import Group
from echelon.errors import ConfigError
from echelon.sync.families.mix import MixPolicy, Neighbours
from echelon.sync.policy import ClusterInfo
from echelon.train.families.synchronizer import Explain, IndependentSynchronizer, Overlap


class Observer(Protocol):
    """Whoever wants to know how long meetings took."""

    def computing(self) -> None:
        """Backward goes on."""

    def waited(self, wait_s: float) -> None:
        """The trainer was blocked for others."""

    def met(self, sent_bytes: int) -> None:
        """A meeting is over."""


class _Weights:
    """One optimizer's weights, as one buffer of a type."""

    def __init__(self, optimizer: Optimizer, policy: MixPolicy) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        kinds = {p.dtype for p in parameters}
        if len(kinds) != 1:
            raise ConfigError(
                f"weights of one type can be averaged, and these are {sorted(map(str, kinds))}",
                where="--sync",
                fix="convert the model to one type, or use --sync full",
            )
        self.parameters: list[nn.Parameter] = parameters
        self.memory: dict[str, Tensor] = {}
        self.steps = 0
        self.kept: Tensor | None = None
        policy.start(self.flat(), self.memory)

    @torch.no_grad()
    def flat(self) -> Tensor:
        """All weights, copied."""
        return torch.cat([p.detach().reshape(-1) for p in self.parameters])

    @torch.no_grad()
    def put(self, flat: Tensor) -> None:
        """All weights, from a flat copy."""
        at = 0
        for p in self.parameters:
            p.copy_(flat[at : at + p.numel()].view_as(p))
            at += p.numel()


class MixSynchronizer(IndependentSynchronizer):
    """One worker's part in a policy of averages."""

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

    def adopt(
        self, optimizer: Optimizer, overlap: Overlap, before: Callable[[], None], after: Callable[[], None]
    ) -> None:
        """After every step of this optimizer, meet whom the policy says."""
        self.watch(optimizer)

        def stepped() -> None:
            after()
            self.meet(optimizer)

        self._handles.append(optimizer.register_step_pre_hook(lambda *_: before()).remove)
        self._handles.append(optimizer.register_step_post_hook(lambda *_: stepped()).remove)

    def watch(self, optimizer: Optimizer) -> None:
        """Look after its weights; somebody else says when it has taken a step (`meet`)."""
        self._new.append(optimizer)

    def begin(self) -> None:
        """Remember the weights that all begin with."""
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

    def meet(self, optimizer: Optimizer) -> None:
        """A step is done: meet whom the policy says."""
        weights = self._of(optimizer)
        weights.kept = None  # trained without a prepared loader: what was shown is what goes on
        meeting = self._policy.meeting(weights.steps, self._group.rank, self._cluster)
        weights.steps += 1
        if meeting is None:
            return
        begun = time.perf_counter()
        own = weights.flat()
        if isinstance(meeting, Neighbours):
            mixed = _with_neighbours(self._group, own, meeting)
        else:
            mixed = own.clone()
            mean = self._mean(own, meeting.members)
            self._policy.settle(mixed, mean, weights.memory, meeting, self._cluster)
        weights.put(mixed)
        self._observer.waited(time.perf_counter() - begun)
        self._observer.met(own.numel() * own.element_size())

    def _mean(self, own: Tensor, members: Sequence[int]) -> Tensor:
        equal = (1.0,) * self._group.size
        shares = self._cluster.shares or equal if self._policy.weighs else equal
        total = sum(shares[rank] for rank in members)
        group = self._among(tuple(members))
        flat = own * (shares[self._group.rank] / total)
        return group.all_reduce(flat).wait()

    def _among(self, members: tuple[int, ...]) -> Group:
        """The group of these members; all workers ask for theirs at the same time."""
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
        """After a pass show what is evaluated; before one that trains, go on with one's own weights."""
        for weights in self._weights:
            if ended:
                self._show(weights)
            elif trains and weights.kept is not None:
                weights.put(weights.kept)
                weights.kept = None
        if self._policy.shown != "own":
            self._share_buffers()

    def stay(self) -> None:
        """Go on with what is shown."""
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
        """What is shown is what is saved."""
        self._borrowed = [weights for weights in self._weights if weights.kept is None]
        for weights in self._weights:
            self._show(weights)

    def after_save(self) -> None:
        """Go on as before."""
        for weights in self._borrowed:
            if weights.kept is not None:
                weights.put(weights.kept)
                weights.kept = None
        self._borrowed = []

    def loaded(self) -> None:
        """All begin anew from what was loaded."""
        for weights in self._weights:
            weights.kept = None
            weights.memory.clear()
            self._policy.start(weights.flat(), weights.memory)

    def finish(self) -> None:
        """End with one model."""
        for weights in self._weights:
            if self._policy.shown != "own":
                self._show(weights)
            else:
                weights.put(self._mean(weights.flat(), range(self._group.size)))
                self._explain(
                    "average",
                    "the workers never met: their weights were averaged once, at the end",
                    f"sync {self._name}: the weights of {self._group.size} workers that never met "
                    "were averaged at the end; evaluations before that are each worker's own",
                )
            weights.kept = None

    def close(self) -> None:
        """Leave optimizers alone."""
        while self._handles:
            self._handles.pop()()


def _with_neighbours(group: Group, own: Tensor, meeting: Neighbours) -> Tensor:
    """The weighted sum of a worker's and its neighbours' weights, in the order of ranks."""
    peers = [rank for rank in sorted(meeting.weights) if rank != group.rank]
    theirs = dict(zip(peers, group.neighbor_all_gather(own, peers), strict=True))
    mixed = torch.zeros_like(own)
    for rank in sorted(meeting.weights):
        mixed.add_(own if rank == group.rank else theirs[rank], alpha=meeting.weights[rank])
    return mixed
