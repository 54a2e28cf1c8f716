"""Runs `levels`: one policy inside groups of workers, another one between the groups.

With `full` inside, a group acts as one worker. Its gradient is the mean of its members', ready when the
slowest has computed and a ring reduction inside the group is done. Its first member communicates with the
others and sends the weights it gets to the group, which takes time too (`averaging.py`).

With averages inside, members take steps of their own and average by the inner policy. Before groups average
with each other, each waits for all its members and takes their mean; all members get the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from echelon.simulate.averaging import ring_late_s, ring_s, spread_late_s, spread_s
from echelon.simulate.families.mix import Averager, Worker
from echelon.simulate.virtual import VirtualCluster, mean_of
from echelon.sync.families.mix import MixPolicy
from echelon.sync.policies.levels import members_of, units_of


class VirtualGroups:
    """Groups that act as workers; the batch of a group is those of all its members."""

    def __init__(self, virtual: VirtualCluster) -> None:
        self._virtual = virtual
        self._groups = virtual.cluster.groups
        self._reduce_s = [ring_s(virtual, group) for group in self._groups]
        self._spread_s = [spread_s(virtual, group) for group in self._groups]
        self.setting = virtual.setting
        self.profile = virtual.profile
        self.learner = virtual.learner
        self.clock = virtual.clock
        self.counts = virtual.counts
        self.listener = virtual.listener
        self.cluster = units_of(virtual.cluster)

    def begin(self, rank: int) -> tuple[Tensor, float]:
        """All members begin a step: their samples, and the seconds until the group has its gradient."""
        begun = [self._virtual.begin(member) for member in self._groups[rank]]
        slowest_s = max(compute_s for _, compute_s in begun)
        reduce_s = self._reduce_s[rank] + ring_late_s(self._virtual, self._groups[rank])
        return torch.cat([indices for indices, _ in begun]), slowest_s + reduce_s

    def gradient(self, weights: Tensor, indices: Tensor) -> Tensor:
        """The mean of the members' gradients; each is counted."""
        batches = indices.split(self.setting.batch)
        self.counts.gradients += len(batches)
        return self.learner.mean_gradient_at(weights, batches)

    def size_of(self, rank: int) -> int:
        """The number of members of the group."""
        return len(self._groups[rank])

    def spread_s(self, rank: int) -> float:
        """Seconds until all members have the first member's weights."""
        return self._spread_s[rank] + spread_late_s(self._virtual, self._groups[rank])

    def transfer_s(self, rank: int) -> float:
        """Seconds for one model between the first member and the server."""
        return self._virtual.transfer_s(self._groups[rank][0])

    def message_s(self, rank: int) -> float:
        """Seconds for the smallest message between the first member and the server."""
        return self._virtual.message_s(self._groups[rank][0])

    def late_s(self, rank: int) -> float:
        """How much later the first member's next transfer arrives."""
        return self._virtual.late_s(self._groups[rank][0])

    def bytes_per_s(self, rank: int) -> float:
        """The rate of the first member's link."""
        return self._virtual.bytes_per_s(self._groups[rank][0])

    @property
    def latency_s(self) -> float:
        """Seconds for the smallest message that is not late."""
        return self._virtual.latency_s

    @property
    def has_late_links(self) -> bool:
        """Whether there is jitter or loss."""
        return self._virtual.has_late_links


class _Group:
    """A group's workers, its common weights, and how many members wait for an average of groups."""

    def __init__(self, virtual: VirtualCluster, number: int, ranks: Sequence[int]) -> None:
        self.number = number
        self.ranks = ranks
        self.workers = [Worker(virtual) for _ in ranks]
        self.weights = virtual.learner.initial()
        self.here = 0
        self.reduce_s = ring_s(virtual, ranks)
        self.spread_s = spread_s(virtual, ranks)

    @property
    def members(self) -> list[Tensor]:
        """The members' weights."""
        return [worker.weights for worker in self.workers]


class LevelsRunner:
    """A run with averages inside groups and averages between them."""

    def __init__(self, inside: MixPolicy, between: MixPolicy, virtual: VirtualCluster) -> None:
        self._between = between
        self._virtual = virtual
        self._units = units_of(virtual.cluster)
        self._groups = [
            _Group(virtual, number, ranks) for number, ranks in enumerate(virtual.cluster.groups)
        ]
        self._inner = [
            Averager(
                inside,
                virtual,
                members_of(virtual.cluster, tuple(group.ranks)),
                group.ranks,
                group.members,
                partial(self._averaged_inside, group),
            )
            for group in self._groups
        ]
        first = [group.ranks[0] for group in self._groups]
        weights = [group.weights for group in self._groups]
        self._outer = Averager(between, virtual, self._units, first, weights, self._averaged_outside)

    def start(self) -> None:
        """Let all workers begin, in the order of their ranks."""
        places = [(rank, group, place) for group in self._groups for place, rank in enumerate(group.ranks)]
        for _, group, place in sorted(places, key=lambda one: one[0]):
            self._begin(group, place, 0.0)

    def shown(self) -> Sequence[Tensor]:
        """The inner policy's shown weights of each group, combined as the outer policy shows them."""
        shown = [
            inner.shown(group.members)[0] for inner, group in zip(self._inner, self._groups, strict=True)
        ]
        return self._outer.shown(shown)

    def _begin(self, group: _Group, place: int, late_s: float) -> None:
        indices, compute_s = self._virtual.begin(group.ranks[place])
        self._virtual.clock.after(late_s + compute_s, partial(self._computed, group, place, indices))

    def _computed(self, group: _Group, place: int, indices: Tensor) -> None:
        worker = group.workers[place]
        worker.step(self._virtual.gradient(worker.weights, indices))
        self._virtual.counts.used(1, 0)
        self._inner[group.number].arrive(place, worker.steps)

    def _averaged_inside(self, group: _Group, place: int, averaged: bool) -> None:
        """Continue, or wait for the other members if groups average now."""
        step = group.workers[place].steps
        if self._between.averaging(step, group.number, self._units) is None:
            if place == 0:
                self._outer.skip(group.number, step)
            self._resume(group, place, 0.0)
            return
        group.here += 1
        if group.here == len(group.workers):
            group.here = 0
            reduce_s = group.reduce_s + ring_late_s(self._virtual, group.ranks)
            self._virtual.clock.after(reduce_s, partial(self._join_outer, group, step))

    def _join_outer(self, group: _Group, step: int) -> None:
        """Take part in the average of groups with the mean of the members."""
        group.weights.copy_(mean_of(group.members))
        self._outer.arrive(group.number, step)

    def _averaged_outside(self, number: int, averaged: bool) -> None:
        group = self._groups[number]
        late_s = group.spread_s + spread_late_s(self._virtual, group.ranks)
        for place, worker in enumerate(group.workers):
            worker.weights.copy_(group.weights)
            self._resume(group, place, late_s)

    def _resume(self, group: _Group, place: int, late_s: float) -> None:
        group.workers[place].steps += 1
        self._begin(group, place, late_s)
