"""Runs policies that a server carries out: virtual workers push, one virtual server decides.

The server handles one message after the other. Taking in a push, making an update and handing out weights
each cost it time (`profile.Costs`); whoever comes meanwhile waits in a queue. An arrival's time is when it
has been taken in. Updates are made on a real ledger with a real optimizer.

A worker takes steps by its own optimizer when it is released alone, and in every step under a policy that
pushes weights, or pushes or pulls seldom. Its delta is how its weights have changed
since it was handed some, without what it has pushed in between and was not dropped.
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
from echelon.simulate.scene import Stage
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

_AT_LEAST_S = 1e-6  # until a rule is woken: time has to pass, or a run would never end


class _VirtualWorker:
    """What a worker holds. `carried` gradients are in its weights or its sum, and not pushed yet."""

    __slots__ = (
        "alone", "arrivals", "ask", "base", "carried", "compute_s", "dropped", "gradient", "optimizer",
        "own", "pull_s", "push_s", "pushed", "rank", "read", "steps", "sum", "waits", "weights",
    )  # fmt: skip

    def __init__(self, rank: int, weights: Tensor) -> None:
        self.rank = rank
        self.weights = self.base = weights  # handed out: never changed in place
        self.own: Tensor | None = None
        self.optimizer: torch.optim.Optimizer | None = None
        self.gradient: Tensor | None = None
        self.sum: Tensor | None = None
        self.steps = self.arrivals = self.read = self.carried = self.pushed = 0
        self.compute_s = self.push_s = self.pull_s = 0.0
        self.alone = self.ask = self.waits = self.dropped = False


class ServeRunner:
    """A run of a served policy."""

    def __init__(self, policy: ServePolicy, scene: Stage) -> None:
        self._policy = policy
        self._scene = scene
        self._costs = scene.profile.costs
        self._rank = scene.setting.workers  # the server's, in events
        self._rule = policy.rule(scene.cluster)
        flat = scene.learner.initial()
        learns = scene.setting.gradients
        optimizer = optimizer_for(scene.setting, flat) if learns else None
        self._shard = ShardState(policy, flat, [flat], optimizer.step if optimizer else _nothing)
        self._push_every, self._pull_every = policy.push_every, policy.pull_every
        self._sums = policy.pushes == "gradient"
        self._explores = not self._sums or self._push_every > 1 or self._pull_every > 1
        self._workers = [
            _VirtualWorker(rank, self._shard.snapshot(rank)) for rank in range(scene.cluster.workers)
        ]
        # Of one step: a sum of several counts as it is.
        self._samples = [scene.setting.batch * scene.size_of(worker.rank) for worker in self._workers]
        self._queue: deque[tuple[float, Callable[[], float]]] = deque()
        self._busy = False
        self._unsettled: dict[tuple[int, int], tuple[int, int]] = {}  # version read, gradients in it

    def start(self) -> None:
        """All begin at once."""
        for worker in self._workers:
            self._begin(worker)

    def shown(self) -> Sequence[Tensor]:
        """The server's weights."""
        return [self._shard.flat]

    # The worker

    def _begin(self, worker: _VirtualWorker) -> None:
        indices, compute_s = self._scene.begin(worker.rank)
        if worker.steps:  # before the first, all members have the same weights anyway
            compute_s += self._scene.spread_s(worker.rank)
        worker.compute_s += compute_s
        self._scene.clock.after(compute_s, partial(self._computed, worker, indices))

    def _computed(self, worker: _VirtualWorker, indices: Tensor) -> None:
        worker.gradient = self._scene.gradient(worker.weights, indices)
        worker.steps += 1
        worker.carried += self._scene.size_of(worker.rank)
        if self._sums:
            worker.sum = worker.gradient if worker.sum is None else worker.sum + worker.gradient
        if self._explores:
            self._step(worker)
        if worker.ask:
            self._reach(self._scene.latency_s, 0.0, partial(self._arrive, worker, None))
        elif worker.steps % self._push_every == 0:
            self._push(worker)
        elif worker.steps % self._pull_every == 0:
            self._reach(self._scene.latency_s, 0.0, partial(self._hand, worker, 0.0))
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
        worker.push_s = self._scene.transfer_s(worker.rank)
        push = Push(kind=kind, flat=flat, used=(True,))
        self._reach(worker.push_s, self._costs.queue_s, partial(self._arrive, worker, push))

    def _step(self, worker: _VirtualWorker) -> None:
        """Its own optimizer takes the step of the last gradient, once."""
        if worker.gradient is None:
            return
        if worker.own is None:
            worker.own = worker.weights.clone()
            if self._scene.setting.gradients:
                worker.optimizer = optimizer_for(self._scene.setting, worker.own)
        elif worker.weights is not worker.own:
            worker.own.copy_(worker.weights)
        worker.weights = worker.own
        worker.own.grad = worker.gradient
        if worker.optimizer is not None:
            worker.optimizer.step()
        worker.own.grad = worker.gradient = None

    def _take(self, worker: _VirtualWorker, weights: Tensor, released: bool) -> None:
        """New weights are there. Who was released starts afresh; a pull in between keeps its sum."""
        worker.gradient = None
        if released and worker.carried:
            self._scene.counts.dropped += worker.carried
            worker.carried, worker.sum = 0, None
        worker.weights = worker.base = weights
        worker.alone = False
        self._begin(worker)

    def _go_on(self, worker: _VirtualWorker, fresh: bool) -> None:
        """With its own weights. What was dropped is still in them, and will be in a later delta."""
        self._step(worker)
        if not fresh:
            if worker.dropped:
                self._scene.counts.dropped -= worker.pushed
                worker.carried += worker.pushed
            elif worker.pushed:
                worker.base = worker.weights.clone()
            worker.alone, worker.sum = True, None
        self._begin(worker)

    # The server

    def _reach(self, transfer_s: float, entry_s: float, action: Callable[[], float]) -> None:
        """A message is sent; `action` is done when it has been taken in, and says how long it took."""
        self._scene.clock.after(transfer_s, partial(self._enqueue, entry_s, action))

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
                self._scene.clock.after(entry_s, partial(self._handle, action))
            else:
                self._done_after(action())

    def _handle(self, action: Callable[[], float]) -> None:
        self._done_after(action())
        if not self._busy:
            self._next()

    def _done_after(self, spent_s: float) -> None:
        if spent_s > 0:
            self._scene.clock.after(spent_s, self._next)
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
            t=self._scene.clock.now,
            kind=push.kind if push is not None else "ask",
            read=worker.read,
            samples=float(self._samples[worker.rank]),
            compute_s=worker.compute_s,
            transfer_s=worker.push_s + worker.pull_s,
            square=square,
            dot=dot,
        )
        if self._scene.tell is not None:
            self._scene.tell(arrived(arrival, rank=self._rank, version=version))
        return self._carry_out(self._rule.arrive(arrival))

    def _tick(self) -> float:
        now, version = self._scene.clock.now, self._shard.version
        if self._scene.tell is not None:
            self._scene.tell(Arrived(t=now, rank=self._rank, worker=-1, kind="tick", version=version))
        return self._carry_out(self._rule.tick(now))

    def _carry_out(self, decisions: Sequence[Decision]) -> float:
        """One after the other; returns what it cost."""
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
                self._scene.clock.after(spent_s + self._scene.latency_s, partial(self._push, invited))
            elif isinstance(decision, Wake):
                at = max(decision.t, self._scene.clock.now + _AT_LEAST_S)
                self._scene.clock.at(at, partial(self._enqueue, 0.0, self._tick))
            if self._scene.tell is not None:
                now, version = self._scene.clock.now, self._shard.version
                self._scene.tell(decided(decision, t=now, rank=self._rank, version=version))
        return spent_s

    def _apply(self, decision: Apply) -> None:
        version = self._shard.version
        self._shard.apply(decision.parts)
        for part in decision.parts:
            read, gradients = self._unsettled.pop((part.worker, part.step))
            self._scene.counts.used(gradients, version - read)
        self._scene.counts.updates += 1

    def _drop(self, decision: Drop) -> None:
        self._shard.drop(decision.worker, decision.step)
        _, gradients = self._unsettled.pop((decision.worker, decision.step), (0, 0))
        self._scene.counts.dropped += gradients
        worker = self._workers[decision.worker]
        if decision.step == worker.arrivals:
            worker.dropped = True

    def _answered(self, rank: int) -> _VirtualWorker:
        worker = self._workers[rank]
        if not worker.waits:
            raise ConfigError(
                f"sync policy {self._policy.name} answers worker {rank}, which did not ask",
                fix="a policy answers every arrival exactly once: see echelon/sync/served.py",
            )
        worker.waits = False
        return worker

    def _release(self, worker: _VirtualWorker, decision: Release, spent_s: float) -> float:
        """Let a worker go after so many seconds; returns what handing it weights costs."""
        worker.arrivals += 1
        worker.compute_s = 0.0
        worker.ask = decision.ask
        if decision.fresh and worker.steps % self._pull_every == 0:
            return self._hand(worker, spent_s, released=True)
        resume = partial(self._go_on, worker, decision.fresh)
        self._scene.clock.after(spent_s + self._scene.latency_s, resume)
        return 0.0

    def _hand(self, worker: _VirtualWorker, spent_s: float, released: bool = False) -> float:
        worker.read = self._shard.version
        worker.pull_s = self._scene.transfer_s(worker.rank)
        take = partial(self._take, worker, self._shard.snapshot(worker.rank), released)
        self._scene.clock.after(spent_s + self._costs.hand_s + worker.pull_s, take)
        return self._costs.hand_s


def _nothing() -> None:
    return
