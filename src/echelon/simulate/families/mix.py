"""Runs policies by which workers average weights; each worker has weights and an optimizer of its own.

An average of members ends when the last member has arrived and a ring reduction is done. With neighbours, a
worker waits only for the neighbours whose weights it uses: it continues when the last of them has arrived
at the same step and has sent its weights to all its neighbours, one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor

from echelon.simulate.averaging import ring_late_s, ring_s
from echelon.simulate.learner import optimizer_for
from echelon.simulate.virtual import VirtualWorkers, mean_of
from echelon.sync.families.mix import Average, MixPolicy, Neighbours
from echelon.sync.policy import ClusterInfo

_EVALUATED = 4  # workers that are evaluated if each shows its own weights


class Worker:
    """One worker's weights, optimizer and number of steps."""

    def __init__(self, virtual: VirtualWorkers) -> None:
        self.weights = virtual.learner.initial()
        self.optimizer = optimizer_for(virtual.setting, self.weights) if virtual.setting.gradients else None
        self.steps = 0

    def step(self, gradient: Tensor) -> None:
        """Take one step with the worker's own optimizer."""
        self.weights.grad = gradient
        if self.optimizer is not None:
            self.optimizer.step()


class _MixStep:
    """The state of averages with neighbours after one step."""

    def __init__(self) -> None:
        self.here: dict[int, Tensor] = {}
        self.missing: dict[int, set[int]] = {}
        self.neighbours: dict[int, Neighbours] = {}
        self.wanted_by: dict[int, list[int]] = {}


class Averager:
    """Averages weights after steps: lets workers wait for each other and changes their weights in place.

    `ranks` are the ranks of the workers, or of the groups' first members, in the virtual cluster. `resume`
    is called with a worker's place in `ranks` and whether it has averaged.
    """

    def __init__(
        self,
        policy: MixPolicy,
        virtual: VirtualWorkers,
        cluster: ClusterInfo,
        ranks: Sequence[int],
        weights: Sequence[Tensor],
        resume: Callable[[int, bool], None],
    ) -> None:
        self._policy = policy
        self._virtual = virtual
        self._cluster = cluster
        self._ranks = ranks
        self._weights = weights
        self._resume = resume
        self._memories: list[dict[str, Tensor]] = [{} for _ in weights]
        self._waiting: dict[tuple[int, tuple[int, ...]], set[int]] = {}
        self._neighbours: dict[int, _MixStep] = {}
        self._ring_s: dict[tuple[int, ...], float] = {}
        self._passed: dict[int, int] = {}
        for own, memory in zip(weights, self._memories, strict=True):
            policy.start(own, memory)

    def arrive(self, place: int, number: int) -> None:
        """A worker has taken the step of that number: average as the policy says."""
        averaging = self._policy.averaging(number, place, self._cluster)
        if isinstance(averaging, Average):
            self._average(place, number, averaging)
        elif isinstance(averaging, Neighbours):
            self._mix(place, number, averaging)
        else:
            self.skip(place, number)
            self._resume(place, False)

    def skip(self, place: int, number: int) -> None:
        """Record that a worker is done with the averages after this step."""
        passed = self._passed.pop(number, 0) + 1
        if passed == len(self._weights):
            self._neighbours.pop(number, None)
        else:
            self._passed[number] = passed

    def shown(self, weights: Sequence[Tensor]) -> Sequence[Tensor]:
        """The mean of all, the center, or some workers' own weights, as the policy shows."""
        if self._policy.shown == "center":
            return [self._memories[0]["center"]]
        if self._policy.shown == "mean":
            return [mean_of(weights, self._cluster.shares)]
        count = min(_EVALUATED, len(weights))
        return [weights[index * len(weights) // count] for index in range(count)]

    def _over(self, place: int, number: int) -> None:
        self.skip(place, number)
        self._resume(place, True)

    def _average(self, place: int, number: int, averaging: Average) -> None:
        """The last member to arrive starts the average."""
        members = averaging.members
        here = self._waiting.setdefault((number, members), set())
        here.add(place)
        if len(here) < len(members):
            return
        del self._waiting[number, members]
        ranks = [self._ranks[member] for member in members]
        if members not in self._ring_s:
            self._ring_s[members] = ring_s(self._virtual, ranks)
        average_s = self._ring_s[members] + ring_late_s(self._virtual, ranks)
        self._virtual.clock.after(average_s, partial(self._settle, number, averaging))

    def _settle(self, number: int, averaging: Average) -> None:
        shares = (
            [self._cluster.shares[member] for member in averaging.members] if self._cluster.shares else ()
        )
        mean = mean_of([self._weights[member] for member in averaging.members], shares)
        for member in averaging.members:
            self._policy.settle(
                self._weights[member], mean, self._memories[member], averaging, self._cluster
            )
        self._virtual.counts.updates += 1
        for member in averaging.members:
            self._over(member, number)

    def _mix(self, place: int, number: int, averaging: Neighbours) -> None:
        """Offer this worker's weights to its neighbours, and wait for theirs."""
        step = self._neighbours.setdefault(number, _MixStep())
        step.here[place] = self._weights[place].clone()
        missing = {other for other in averaging.weights if other not in step.here}
        for other in missing:
            step.wanted_by.setdefault(other, []).append(place)
        step.missing[place], step.neighbours[place] = missing, averaging
        ready = [] if missing else [place]
        for waiting in step.wanted_by.pop(place, []):
            step.missing[waiting].discard(place)
            if not step.missing[waiting]:
                ready.append(waiting)
        for one in ready:
            sending_s = self._sending_s(one, step.neighbours[one])
            self._virtual.clock.after(sending_s, partial(self._mixed, one, number, step))

    def _sending_s(self, place: int, averaging: Neighbours) -> float:
        others = [other for other in averaging.weights if other != place]
        if not others:
            return 0.0
        slowest = min(self._virtual.bytes_per_s(self._ranks[one]) for one in (place, *others))
        sending_s = self._virtual.latency_s + len(others) * self._virtual.learner.size_bytes / slowest
        return sending_s + max(self._virtual.late_s(self._ranks[other]) for other in others)

    def _mixed(self, place: int, number: int, step: _MixStep) -> None:
        own = self._weights[place]
        own.zero_()
        for other, weight in step.neighbours[place].weights.items():
            own.add_(step.here[other], alpha=weight)
        self._virtual.counts.updates += 1
        self._over(place, number)


class MixRunner:
    """A run of a policy by which workers average weights."""

    def __init__(self, policy: MixPolicy, virtual: VirtualWorkers) -> None:
        self._virtual = virtual
        ranks = range(virtual.cluster.workers)
        self._workers = [Worker(virtual) for _ in ranks]
        self._weights = [worker.weights for worker in self._workers]
        self._averager = Averager(policy, virtual, virtual.cluster, ranks, self._weights, self._resume)

    def start(self) -> None:
        """Let all workers begin."""
        for rank in range(len(self._workers)):
            self._begin(rank, 0.0)

    def shown(self) -> Sequence[Tensor]:
        """The mean of all, the center, or some workers' own weights, as the policy shows."""
        return self._averager.shown(self._weights)

    def _begin(self, rank: int, late_s: float) -> None:
        indices, compute_s = self._virtual.begin(rank)
        self._virtual.clock.after(late_s + compute_s, partial(self._computed, rank, indices))

    def _computed(self, rank: int, indices: Tensor) -> None:
        worker = self._workers[rank]
        worker.step(self._virtual.gradient(worker.weights, indices))
        self._virtual.counts.used(self._virtual.size_of(rank), 0)
        self._averager.arrive(rank, worker.steps)

    def _resume(self, rank: int, averaged: bool) -> None:
        self._workers[rank].steps += 1
        self._begin(rank, self._virtual.spread_s(rank) if averaged else 0.0)
