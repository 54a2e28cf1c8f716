"""Runs policies of a parameter server: virtual workers push, one virtual server decides.

The server handles one message at a time. Receiving a push, making an update and sending weights each cost
it time (`profile.Costs`); other messages wait in a queue. An arrival's time is when the server has received
it. Updates are made on a real `ShardState` with a real optimizer.

A worker takes steps with its own optimizer when it is released alone, and in every step if the policy
pushes weights, or does not push and pull in every step. Its delta is how its weights have changed since it
received some, without its pushes in between that were not dropped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from echelon.errors import ConfigError
from echelon.observe.events import Arrived
from echelon.simulate.learner import optimizer_for
from echelon.simulate.record import arrived, decided
from echelon.simulate.virtual import VirtualWorkers
from echelon.sync.families.serve import (
    Apply,
    Arrival,
    Decision,
    Drop,
    Invite,
    Kind,
    Release,
    ServePolicy,
    Wake,
)
from echelon.sync.families.shard import Push, ShardState

_AT_LEAST_S = 1e-6  # until a rule is woken: otherwise a run might never end


class _VirtualWorker:
    """A worker's state. `carried` counts gradients in its weights or its sum that are not pushed yet."""

    __slots__ = (
        "alone", "arrivals", "ask", "base", "carried", "compute_s", "dropped", "gradient", "optimizer",
        "own", "pull_s", "push_s", "pushed", "rank", "read", "steps", "sum", "waits", "weights",
    )  # fmt: skip

    def __init__(self, rank: int, weights: Tensor) -> None:
        self.rank = rank
        self.weights = self.base = weights  # shared with the server: never changed in place
        self.own: Tensor | None = None
        self.optimizer: torch.optim.Optimizer | None = None
        self.gradient: Tensor | None = None
        self.sum: Tensor | None = None
        self.steps = self.arrivals = self.read = self.carried = self.pushed = 0
        self.compute_s = self.push_s = self.pull_s = 0.0
        self.alone = self.ask = self.waits = self.dropped = False


class ServeRunner:
    """A run of a parameter-server policy."""

    def __init__(self, policy: ServePolicy, virtual: VirtualWorkers) -> None:
        self._policy = policy
        self._virtual = virtual
        self._costs = virtual.profile.costs
        self._rank = virtual.setting.workers  # the server's, in events
        self._rule = policy.rule(virtual.cluster)
        flat = virtual.learner.initial()
        learns = virtual.setting.gradients
        optimizer = optimizer_for(virtual.setting, flat) if learns else None
        self._shard = ShardState(policy, flat, [flat], optimizer.step if optimizer else _nothing)
        self._push_every, self._pull_every = policy.push_every, policy.pull_every
        self._sums = policy.pushes == "gradient"
        self._explores = not self._sums or self._push_every > 1 or self._pull_every > 1
        self._workers = [
            _VirtualWorker(rank, self._shard.snapshot(rank)) for rank in range(virtual.cluster.workers)
        ]
        # The samples of one step; a sum of several gradients has the same weight.
        self._samples = [virtual.setting.batch * virtual.size_of(worker.rank) for worker in self._workers]
        self._queue: deque[tuple[float, Callable[[], float]]] = deque()
        self._busy = False
        self._unsettled: dict[tuple[int, int], tuple[int, int]] = {}  # version read, gradients in it

    def start(self) -> None:
        """Let all workers begin."""
        for worker in self._workers:
            self._begin(worker)

    def shown(self) -> Sequence[Tensor]:
        """The server's weights."""
        return [self._shard.flat]

    # The worker

    def _begin(self, worker: _VirtualWorker) -> None:
        indices, compute_s = self._virtual.begin(worker.rank)
        if worker.steps:  # before the first step all members have the same weights
            compute_s += self._virtual.spread_s(worker.rank)
        worker.compute_s += compute_s
        self._virtual.clock.after(compute_s, partial(self._computed, worker, indices))

    def _computed(self, worker: _VirtualWorker, indices: Tensor) -> None:
        worker.gradient = self._virtual.gradient(worker.weights, indices)
        worker.steps += 1
        worker.carried += self._virtual.size_of(worker.rank)
        if self._sums:
            worker.sum = worker.gradient if worker.sum is None else worker.sum + worker.gradient
        if self._explores:
            self._step(worker)
        if worker.ask:
            self._reach(self._virtual.message_s(worker.rank), 0.0, partial(self._arrive, worker, None))
        elif worker.steps % self._push_every == 0:
            self._push(worker)
        elif worker.steps % self._pull_every == 0:
            self._reach(self._virtual.message_s(worker.rank), 0.0, partial(self._hand, worker, 0.0))
        else:
            self._begin(worker)

    def _push(self, worker: _VirtualWorker) -> None:
        kind: Kind = "delta" if worker.alone else self._policy.pushes
        if kind == "gradient":
            assert worker.sum is not None
            flat = worker.sum
        else:
            self._step(worker)
            flat = worker.weights - worker.base if kind == "delta" else worker.weights.clone()
        worker.sum = None
        worker.pushed, worker.carried = worker.carried, 0
        worker.push_s = self._virtual.transfer_s(worker.rank)
        push = Push(kind=kind, flat=flat, used=(True,))
        self._reach(worker.push_s, self._costs.queue_s, partial(self._arrive, worker, push))

    def _step(self, worker: _VirtualWorker) -> None:
        """Apply the last gradient with the worker's own optimizer, once."""
        if worker.gradient is None:
            return
        if worker.own is None:
            worker.own = worker.weights.clone()
            if self._virtual.setting.gradients:
                worker.optimizer = optimizer_for(self._virtual.setting, worker.own)
        elif worker.weights is not worker.own:
            worker.own.copy_(worker.weights)
        worker.weights = worker.own
        worker.own.grad = worker.gradient
        if worker.optimizer is not None:
            worker.optimizer.step()
        worker.own.grad = worker.gradient = None

    def _take(self, worker: _VirtualWorker, weights: Tensor, released: bool) -> None:
        """Take new weights. A released worker drops what it carries; a pull between pushes keeps it."""
        worker.gradient = None
        if released and worker.carried:
            self._virtual.counts.dropped += worker.carried
            worker.carried, worker.sum = 0, None
        worker.weights = worker.base = weights
        worker.alone = False
        self._begin(worker)

    def _continue_alone(self, worker: _VirtualWorker, fresh: bool) -> None:
        """Continue with the worker's own weights; dropped gradients remain in them for a later delta."""
        self._step(worker)
        if not fresh:
            if worker.dropped:
                self._virtual.counts.dropped -= worker.pushed
                worker.carried += worker.pushed
            elif worker.pushed:
                worker.base = worker.weights.clone()
            worker.alone, worker.sum = True, None
        self._begin(worker)

    # The server

    def _reach(self, transfer_s: float, entry_s: float, action: Callable[[], float]) -> None:
        """Send a message to the server; `action` runs when it is received and returns its seconds."""
        self._virtual.clock.after(transfer_s, partial(self._enqueue, entry_s, action))

    def _enqueue(self, entry_s: float, action: Callable[[], float]) -> None:
        self._queue.append((entry_s, action))
        if not self._busy:
            self._next()

    def _next(self) -> None:
        self._busy = False
        while self._queue and not self._busy:
            entry_s, action = self._queue.popleft()
            self._busy = True
            if entry_s > 0:
                self._virtual.clock.after(entry_s, partial(self._handle, action))
            else:
                self._done_after(action())

    def _handle(self, action: Callable[[], float]) -> None:
        self._done_after(action())
        if not self._busy:
            self._next()

    def _done_after(self, spent_s: float) -> None:
        if spent_s > 0:
            self._virtual.clock.after(spent_s, self._next)
        else:
            self._busy = False

    def _arrive(self, worker: _VirtualWorker, push: Push | None) -> float:
        version = self._shard.version
        square = dot = 0.0
        if push is not None:
            square, dot = self._shard.push(worker.rank, worker.arrivals, push)
            self._unsettled[worker.rank, worker.arrivals] = (worker.read, worker.pushed)
        else:
            worker.pushed = 0
        worker.waits, worker.dropped = True, False
        arrival = Arrival(
            worker=worker.rank,
            step=worker.arrivals,
            t=self._virtual.clock.now,
            kind=push.kind if push is not None else "ask",
            read=worker.read,
            samples=float(self._samples[worker.rank]),
            compute_s=worker.compute_s,
            transfer_s=worker.push_s + worker.pull_s,
            square=square,
            dot=dot,
        )
        if self._virtual.listener is not None:
            self._virtual.listener(arrived(arrival, rank=self._rank, version=version))
        return self._execute(self._rule.arrive(arrival))

    def _tick(self) -> float:
        now, version = self._virtual.clock.now, self._shard.version
        if self._virtual.listener is not None:
            self._virtual.listener(Arrived(t=now, rank=self._rank, worker=-1, kind="tick", version=version))
        return self._execute(self._rule.tick(now))

    def _execute(self, decisions: Sequence[Decision]) -> float:
        """Execute the decisions in order; returns the server's seconds."""
        spent_s = 0.0
        for decision in decisions:
            if isinstance(decision, Apply):
                self._apply(decision)
                spent_s += self._costs.apply_s
            elif isinstance(decision, Release):
                spent_s += self._release(self._answered(decision.worker), decision, spent_s)
            elif isinstance(decision, Drop):
                self._drop(decision)
            elif isinstance(decision, Invite):
                invited = self._answered(decision.worker)
                message_s = self._virtual.message_s(invited.rank)
                self._virtual.clock.after(spent_s + message_s, partial(self._push, invited))
            elif isinstance(decision, Wake):
                at = max(decision.t, self._virtual.clock.now + _AT_LEAST_S)
                self._virtual.clock.at(at, partial(self._enqueue, 0.0, self._tick))
            if self._virtual.listener is not None:
                now, version = self._virtual.clock.now, self._shard.version
                self._virtual.listener(decided(decision, t=now, rank=self._rank, version=version))
        return spent_s

    def _apply(self, decision: Apply) -> None:
        version = self._shard.version
        self._shard.apply(decision.parts)
        for part in decision.parts:
            read, gradients = self._unsettled.pop((part.worker, part.step))
            self._virtual.counts.used(gradients, version - read)
        self._virtual.counts.updates += 1

    def _drop(self, decision: Drop) -> None:
        self._shard.drop(decision.worker, decision.step)
        _, gradients = self._unsettled.pop((decision.worker, decision.step), (0, 0))
        self._virtual.counts.dropped += gradients
        worker = self._workers[decision.worker]
        if decision.step == worker.arrivals:
            worker.dropped = True

    def _answered(self, rank: int) -> _VirtualWorker:
        worker = self._workers[rank]
        if not worker.waits:
            raise ConfigError(
                f"sync policy {self._policy.name} answers worker {rank}, which is not waiting",
                fix="make the policy answer every arrival exactly once: see echelon/sync/families/serve.py",
            )
        worker.waits = False
        return worker

    def _release(self, worker: _VirtualWorker, decision: Release, spent_s: float) -> float:
        """Release a worker after `spent_s`; returns the server's seconds for sending weights."""
        worker.arrivals += 1
        worker.compute_s = 0.0
        worker.ask = decision.ask
        if decision.fresh and worker.steps % self._pull_every == 0:
            return self._hand(worker, spent_s, released=True)
        resume = partial(self._continue_alone, worker, decision.fresh)
        self._virtual.clock.after(spent_s + self._virtual.message_s(worker.rank), resume)
        return 0.0

    def _hand(self, worker: _VirtualWorker, spent_s: float, released: bool = False) -> float:
        worker.read = self._shard.version
        worker.pull_s = self._virtual.transfer_s(worker.rank)
        take = partial(self._take, worker, self._shard.snapshot(worker.rank), released)
        self._virtual.clock.after(spent_s + self._costs.hand_s + worker.pull_s, take)
        return self._costs.hand_s


def _nothing() -> None:
    return
