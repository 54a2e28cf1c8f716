"""Runs `levels`: a policy inside groups of workers, and another one between the groups.

`full` inside: a group acts as one worker. Its gradient is the mean of its members', and there when the
slowest has computed and a ring's reduction inside the group has passed. Its first member talks to others,
and gives the group the weights that it gets; that takes time too (`ring.py`).

Averages inside: members take steps of their own and meet by the policy inside. Before groups meet, each
waits for all its members and takes their mean; what the groups make of it goes to all members.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from echelon.simulate.averaging import ring_s, spread_s
from echelon.simulate.families.mix import Meetings, Worker
from echelon.simulate.scene import Scene, mean_of
from echelon.sync.families.mix import MixPolicy
from echelon.sync.policies.levels import members_of, units_of


class Grouped:
    """A scene on which groups act, each as one worker with the batches of all its members."""

    def __init__(self, scene: Scene) -> None:
        self._scene = scene
        self._groups = scene.cluster.groups
        self._reduce_s = [ring_s(scene, group) for group in self._groups]
        self._spread_s = [spread_s(scene, group) for group in self._groups]
        self.setting = scene.setting
        self.profile = scene.profile
        self.learner = scene.learner
        self.clock = scene.clock
        self.counts = scene.counts
        self.tell = scene.tell
        self.cluster = units_of(scene.cluster)

    def begin(self, rank: int) -> tuple[Tensor, float]:
        """All members begin; how long until the group has its gradient."""
        begun = [self._scene.begin(member) for member in self._groups[rank]]
        slowest_s = max(compute_s for _, compute_s in begun)
        return torch.cat([indices for indices, _ in begun]), slowest_s + self._reduce_s[rank]

    def gradient(self, weights: Tensor, indices: Tensor) -> Tensor:
        """The mean of the members' gradients, each of which counts as computed."""
        batches = indices.split(self.setting.batch)
        self.counts.gradients += len(batches)
        return self.learner.mean_gradient_at(weights, batches)

    def size_of(self, rank: int) -> int:
        """How many members the group has."""
        return len(self._groups[rank])

    def spread_s(self, rank: int) -> float:
        """How long it takes until all members have the weights of the first."""
        return self._spread_s[rank]

    def transfer_s(self, rank: int) -> float:
        """The first member's way to the server."""
        return self._scene.transfer_s(self._groups[rank][0])

    def bytes_per_s(self, rank: int) -> float:
        """What the first member's link carries."""
        return self._scene.bytes_per_s(self._groups[rank][0])

    @property
    def latency_s(self) -> float:
        """How long the smallest message takes."""
        return self._scene.latency_s


class _Group:
    """Workers, and what they are as one: weights, and how many have come to a meeting of groups."""

    def __init__(self, scene: Scene, number: int, ranks: Sequence[int]) -> None:
        self.number = number
        self.ranks = ranks
        self.workers = [Worker(scene) for _ in ranks]
        self.weights = scene.learner.initial()
        self.here = 0
        self.reduce_s = ring_s(scene, ranks)
        self.spread_s = spread_s(scene, ranks)

    @property
    def members(self) -> list[Tensor]:
        """The members' weights."""
        return [worker.weights for worker in self.workers]


class LevelsRunner:
    """A run of averages inside groups, and of averages between them."""

    def __init__(self, inside: MixPolicy, between: MixPolicy, scene: Scene) -> None:
        self._between = between
        self._scene = scene
        self._units = units_of(scene.cluster)
        self._groups = [_Group(scene, number, ranks) for number, ranks in enumerate(scene.cluster.groups)]
        self._inner = [
            Meetings(
                inside,
                scene,
                members_of(scene.cluster, tuple(group.ranks)),
                group.ranks,
                group.members,
                partial(self._met_inside, group),
            )
            for group in self._groups
        ]
        first = [group.ranks[0] for group in self._groups]
        weights = [group.weights for group in self._groups]
        self._outer = Meetings(between, scene, self._units, first, weights, self._met_outside)

    def start(self) -> None:
        """All begin at once, in the order of their ranks."""
        places = [(rank, group, place) for group in self._groups for place, rank in enumerate(group.ranks)]
        for _, group, place in sorted(places, key=lambda one: one[0]):
            self._begin(group, place, 0.0)

    def shown(self) -> Sequence[Tensor]:
        """Of each group what the policy inside shows, and of these what the one between groups shows."""
        shown = [
            inner.shown(group.members)[0] for inner, group in zip(self._inner, self._groups, strict=True)
        ]
        return self._outer.shown(shown)

    def _begin(self, group: _Group, place: int, late_s: float) -> None:
        indices, compute_s = self._scene.begin(group.ranks[place])
        self._scene.clock.after(late_s + compute_s, partial(self._computed, group, place, indices))

    def _computed(self, group: _Group, place: int, indices: Tensor) -> None:
        worker = group.workers[place]
        worker.step(self._scene.gradient(worker.weights, indices))
        self._scene.counts.used(1, 0)
        self._inner[group.number].come(place, worker.steps)

    def _met_inside(self, group: _Group, place: int, met: bool) -> None:
        """Go on, or wait for the others of the group if groups meet now."""
        step = group.workers[place].steps
        if self._between.averaging(step, group.number, self._units) is None:
            if place == 0:
                self._outer.skip(group.number, step)
            self._go_on(group, place, 0.0)
            return
        group.here += 1
        if group.here == len(group.workers):
            group.here = 0
            self._scene.clock.after(group.reduce_s, partial(self._speak, group, step))

    def _speak(self, group: _Group, step: int) -> None:
        """As one: with the mean of the members."""
        group.weights.copy_(mean_of(group.members))
        self._outer.come(group.number, step)

    def _met_outside(self, number: int, met: bool) -> None:
        group = self._groups[number]
        for place, worker in enumerate(group.workers):
            worker.weights.copy_(group.weights)
            self._go_on(group, place, group.spread_s)

    def _go_on(self, group: _Group, place: int, late_s: float) -> None:
        group.workers[place].steps += 1
        self._begin(group, place, late_s)
