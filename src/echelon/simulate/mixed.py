"""Runs policies of averages between workers: each has weights and an optimizer of its own.

A worker that comes to a meeting waits for all others of it. An average is over when its last member has
come and a ring's reduction has passed. Of neighbours each worker needs only those whose weights it mixes
in: it goes on when the last of them has come to the same step and has sent, one after the other, to all.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import Tensor

from echelon.simulate.learner import optimizer_for
from echelon.simulate.ring import ring_s
from echelon.simulate.scene import Scene, mean_of
from echelon.sync.mixed import Average, Mixed, Neighbours

_LOOKED_AT = 4  # workers whose own weights are evaluated, where each has its own


class _Worker:
    """Its weights, what it remembers, and how many steps it has taken."""

    def __init__(self, scene: Scene) -> None:
        self.weights = scene.learner.initial()
        self.optimizer = optimizer_for(scene.setting, self.weights) if scene.setting.gradients else None
        self.memory: dict[str, Tensor] = {}
        self.steps = 0


class _Step:
    """What neighbours need to know about each other in one step."""

    def __init__(self) -> None:
        self.here: dict[int, Tensor] = {}
        self.missing: dict[int, set[int]] = {}
        self.meetings: dict[int, Neighbours] = {}
        self.wanted_by: dict[int, list[int]] = {}


class Mixing:
    """A run of a policy of averages."""

    def __init__(self, policy: Mixed, scene: Scene) -> None:
        self._policy = policy
        self._scene = scene
        self._workers = [_Worker(scene) for _ in range(scene.setting.workers)]
        self._meetings: dict[tuple[int, tuple[int, ...]], set[int]] = {}
        self._neighbours: dict[int, _Step] = {}
        self._ring_s: dict[tuple[int, ...], float] = {}
        self._passed: dict[int, int] = {}
        for worker in self._workers:
            policy.start(worker.weights, worker.memory)

    def start(self) -> None:
        """All begin at once."""
        for rank in range(len(self._workers)):
            self._begin(rank)

    def shown(self) -> Sequence[Tensor]:
        """The mean of all, the center, or some workers' own, as the policy says."""
        if self._policy.shown == "center":
            return [self._workers[0].memory["center"]]
        if self._policy.shown == "mean":
            return [mean_of([worker.weights for worker in self._workers])]
        count = min(_LOOKED_AT, len(self._workers))
        return [self._workers[index * len(self._workers) // count].weights for index in range(count)]

    def _begin(self, rank: int) -> None:
        indices, compute_s = self._scene.begin(rank)
        self._scene.clock.after(compute_s, partial(self._computed, rank, indices))

    def _computed(self, rank: int, indices: Tensor) -> None:
        worker = self._workers[rank]
        worker.weights.grad = self._scene.gradient(worker.weights, indices)
        if worker.optimizer is not None:
            worker.optimizer.step()
        self._scene.counts.used(1, 0)
        meeting = self._policy.meeting(worker.steps, rank, self._scene.crew)
        if isinstance(meeting, Average):
            self._meet(rank, worker.steps, meeting)
        elif isinstance(meeting, Neighbours):
            self._mix(rank, worker.steps, meeting)
        else:
            self._go_on(rank)

    def _go_on(self, rank: int) -> None:
        worker = self._workers[rank]
        passed = self._passed.pop(worker.steps, 0) + 1
        if passed == len(self._workers):
            self._neighbours.pop(worker.steps, None)
        else:
            self._passed[worker.steps] = passed
        worker.steps += 1
        self._begin(rank)

    def _meet(self, rank: int, step: int, meeting: Average) -> None:
        """The last who comes sets the average off."""
        members = meeting.members
        here = self._meetings.setdefault((step, members), set())
        here.add(rank)
        if len(here) < len(members):
            return
        del self._meetings[step, members]
        if members not in self._ring_s:
            self._ring_s[members] = ring_s(self._scene, members)
        self._scene.clock.after(self._ring_s[members], partial(self._settle, meeting))

    def _settle(self, meeting: Average) -> None:
        mean = mean_of([self._workers[rank].weights for rank in meeting.members])
        for rank in meeting.members:
            worker = self._workers[rank]
            self._policy.settle(worker.weights, mean, worker.memory, meeting, self._scene.crew)
        self._scene.counts.updates += 1
        for rank in meeting.members:
            self._go_on(rank)

    def _mix(self, rank: int, number: int, meeting: Neighbours) -> None:
        """Show the others these weights, and wait for theirs."""
        step = self._neighbours.setdefault(number, _Step())
        step.here[rank] = self._workers[rank].weights.clone()
        missing = {other for other in meeting.weights if other not in step.here}
        for other in missing:
            step.wanted_by.setdefault(other, []).append(rank)
        step.missing[rank], step.meetings[rank] = missing, meeting
        ready = [] if missing else [rank]
        for waiting in step.wanted_by.pop(rank, []):
            step.missing[waiting].discard(rank)
            if not step.missing[waiting]:
                ready.append(waiting)
        for one in ready:
            sending_s = self._sending_s(one, step.meetings[one])
            self._scene.clock.after(sending_s, partial(self._mixed, one, step))

    def _sending_s(self, rank: int, meeting: Neighbours) -> float:
        others = [other for other in meeting.weights if other != rank]
        if not others:
            return 0.0
        slowest = min(self._scene.bytes_per_s(one) for one in (rank, *others))
        return self._scene.latency_s + len(others) * self._scene.learner.size_bytes / slowest

    def _mixed(self, rank: int, step: _Step) -> None:
        own = self._workers[rank].weights
        own.zero_()
        for other, weight in step.meetings[rank].weights.items():
            own.add_(step.here[other], alpha=weight)
        self._scene.counts.updates += 1
        self._go_on(rank)
