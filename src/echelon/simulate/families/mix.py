"""Runs policies of averages between workers: each has weights and an optimizer of its own.

A worker that comes to a meeting waits for all others of it. An average is over when its last member has
come and a ring's reduction has passed. Of neighbours each worker needs only those whose weights it mixes
in: it goes on when the last of them has come to the same step and has sent, one after the other, to all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor

from echelon.simulate.averaging import ring_s
from echelon.simulate.learner import optimizer_for
from echelon.simulate.scene import Stage, mean_of
from echelon.sync.families.mix import Average, MixPolicy, Neighbours
from echelon.sync.policy import ClusterInfo

_LOOKED_AT = 4  # workers whose own weights are evaluated, where each has its own


class Worker:
    """Its weights, and how many steps it has taken."""

    def __init__(self, scene: Stage) -> None:
        self.weights = scene.learner.initial()
        self.optimizer = optimizer_for(scene.setting, self.weights) if scene.setting.gradients else None
        self.steps = 0

    def step(self, gradient: Tensor) -> None:
        """One more, by its own optimizer."""
        self.weights.grad = gradient
        if self.optimizer is not None:
            self.optimizer.step()


class _MixStep:
    """What neighbours need to know about each other in one step."""

    def __init__(self) -> None:
        self.here: dict[int, Tensor] = {}
        self.missing: dict[int, set[int]] = {}
        self.meetings: dict[int, Neighbours] = {}
        self.wanted_by: dict[int, list[int]] = {}


class Meetings:
    """Who waits for whom after a step, and what comes of it.

    `ranks` says who of the scene has each place in the crew. The weights are changed in place; `go_on` is
    told who may go on after a step, and whether that one has met anybody.
    """

    def __init__(
        self,
        policy: MixPolicy,
        scene: Stage,
        cluster: ClusterInfo,
        ranks: Sequence[int],
        weights: Sequence[Tensor],
        go_on: Callable[[int, bool], None],
    ) -> None:
        self._policy = policy
        self._scene = scene
        self._cluster = cluster
        self._ranks = ranks
        self._weights = weights
        self._go_on = go_on
        self._memories: list[dict[str, Tensor]] = [{} for _ in weights]
        self._waiting: dict[tuple[int, tuple[int, ...]], set[int]] = {}
        self._neighbours: dict[int, _MixStep] = {}
        self._ring_s: dict[tuple[int, ...], float] = {}
        self._passed: dict[int, int] = {}
        for own, memory in zip(weights, self._memories, strict=True):
            policy.start(own, memory)

    def come(self, place: int, number: int) -> None:
        """A step has been taken, of that number: meet whom the policy says."""
        meeting = self._policy.averaging(number, place, self._cluster)
        if isinstance(meeting, Average):
            self._meet(place, number, meeting)
        elif isinstance(meeting, Neighbours):
            self._mix(place, number, meeting)
        else:
            self.skip(place, number)
            self._go_on(place, False)

    def skip(self, place: int, number: int) -> None:
        """There is nobody to meet after this step."""
        passed = self._passed.pop(number, 0) + 1
        if passed == len(self._weights):
            self._neighbours.pop(number, None)
        else:
            self._passed[number] = passed

    def shown(self, weights: Sequence[Tensor]) -> Sequence[Tensor]:
        """The mean of all, the center, or some of their own, as the policy says."""
        if self._policy.shown == "center":
            return [self._memories[0]["center"]]
        if self._policy.shown == "mean":
            return [mean_of(weights, self._cluster.shares)]
        count = min(_LOOKED_AT, len(weights))
        return [weights[index * len(weights) // count] for index in range(count)]

    def _over(self, place: int, number: int) -> None:
        self.skip(place, number)
        self._go_on(place, True)

    def _meet(self, place: int, number: int, meeting: Average) -> None:
        """The last who comes sets the average off."""
        members = meeting.members
        here = self._waiting.setdefault((number, members), set())
        here.add(place)
        if len(here) < len(members):
            return
        del self._waiting[number, members]
        if members not in self._ring_s:
            self._ring_s[members] = ring_s(self._scene, [self._ranks[member] for member in members])
        self._scene.clock.after(self._ring_s[members], partial(self._settle, number, meeting))

    def _settle(self, number: int, meeting: Average) -> None:
        shares = (
            [self._cluster.shares[member] for member in meeting.members] if self._cluster.shares else ()
        )
        mean = mean_of([self._weights[member] for member in meeting.members], shares)
        for member in meeting.members:
            self._policy.settle(self._weights[member], mean, self._memories[member], meeting, self._cluster)
        self._scene.counts.updates += 1
        for member in meeting.members:
            self._over(member, number)

    def _mix(self, place: int, number: int, meeting: Neighbours) -> None:
        """Show the others these weights, and wait for theirs."""
        step = self._neighbours.setdefault(number, _MixStep())
        step.here[place] = self._weights[place].clone()
        missing = {other for other in meeting.weights if other not in step.here}
        for other in missing:
            step.wanted_by.setdefault(other, []).append(place)
        step.missing[place], step.meetings[place] = missing, meeting
        ready = [] if missing else [place]
        for waiting in step.wanted_by.pop(place, []):
            step.missing[waiting].discard(place)
            if not step.missing[waiting]:
                ready.append(waiting)
        for one in ready:
            sending_s = self._sending_s(one, step.meetings[one])
            self._scene.clock.after(sending_s, partial(self._mixed, one, number, step))

    def _sending_s(self, place: int, meeting: Neighbours) -> float:
        others = [other for other in meeting.weights if other != place]
        if not others:
            return 0.0
        slowest = min(self._scene.bytes_per_s(self._ranks[one]) for one in (place, *others))
        return self._scene.latency_s + len(others) * self._scene.learner.size_bytes / slowest

    def _mixed(self, place: int, number: int, step: _MixStep) -> None:
        own = self._weights[place]
        own.zero_()
        for other, weight in step.meetings[place].weights.items():
            own.add_(step.here[other], alpha=weight)
        self._scene.counts.updates += 1
        self._over(place, number)


class MixRunner:
    """A run of a policy of averages."""

    def __init__(self, policy: MixPolicy, scene: Stage) -> None:
        self._scene = scene
        everybody = range(scene.cluster.workers)
        self._workers = [Worker(scene) for _ in everybody]
        self._weights = [worker.weights for worker in self._workers]
        self._meetings = Meetings(policy, scene, scene.cluster, everybody, self._weights, self._go_on)

    def start(self) -> None:
        """All begin at once."""
        for rank in range(len(self._workers)):
            self._begin(rank, 0.0)

    def shown(self) -> Sequence[Tensor]:
        """The mean of all, the center, or some workers' own, as the policy says."""
        return self._meetings.shown(self._weights)

    def _begin(self, rank: int, late_s: float) -> None:
        indices, compute_s = self._scene.begin(rank)
        self._scene.clock.after(late_s + compute_s, partial(self._computed, rank, indices))

    def _computed(self, rank: int, indices: Tensor) -> None:
        worker = self._workers[rank]
        worker.step(self._scene.gradient(worker.weights, indices))
        self._scene.counts.used(self._scene.size_of(rank), 0)
        self._meetings.come(rank, worker.steps)

    def _go_on(self, rank: int, met: bool) -> None:
        self._workers[rank].steps += 1
        self._begin(rank, self._scene.spread_s(rank) if met else 0.0)
