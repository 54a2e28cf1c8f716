"""Plays workers against the rule of a served policy, in virtual time, and refuses rules that break the
contract at the top of `sync/families/serve.py`.

Each worker has a programme: how long it computes for each of its pushes, and when it is away. Having done
it, it leaves. `play` returns the inputs and decisions in order.

    story = play(policy, cluster, [[1.0, 1.0], [3.0, Away(2.0), 1.0]])
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from echelon.sync.families.serve import (
    Apply,
    Arrival,
    Decision,
    Drop,
    Invite,
    Release,
    Rule,
    ServePolicy,
    Wake,
    WeightedPush,
)
from echelon.sync.policy import ClusterInfo


class Broken(Exception):
    """A rule that breaks its contract, or never lets a worker go on."""


@dataclass(frozen=True, slots=True)
class Away:
    """A worker leaves, and joins again after so many seconds."""

    seconds: float


Programme = Sequence[float | Away]


@dataclass(frozen=True, slots=True)
class Told:
    """One input of a rule, and what it decided. `version` is that of the weights before it."""

    what: Literal["arrive", "leave", "join", "tick"]
    t: float
    decisions: tuple[Decision, ...]
    worker: int = -1
    arrival: Arrival | None = None
    version: int = 0
    state: dict[str, float] = field(default_factory=dict)


def play(
    policy: ServePolicy,
    cluster: ClusterInfo,
    programmes: Sequence[Programme],
    *,
    samples: Sequence[float] = (),
    transfer_s: Sequence[float] = (),
    seed: int = 0,
    most: int = 100_000,
) -> list[Told]:
    """Play all programmes to their ends. `seed`: of the norms and products of gradients, if asked for."""
    stage = _Stage(policy, policy.rule(cluster), programmes, samples, transfer_s, seed)
    for _ in range(most):
        if not stage.go_on():
            return stage.story
    raise Broken(f"{most} inputs have not led to an end")


def decided(story: Sequence[Told], kind: type) -> list:
    """All decisions of one kind, in order."""
    return [decision for told in story for decision in told.decisions if isinstance(decision, kind)]


class _Worker:
    """`alone`: it has taken steps of its own since it last got weights."""

    def __init__(self, number: int, programme: Programme, samples: float, transfer_s: float) -> None:
        self.number = number
        self.programme = list(programme)
        self.samples = samples
        self.transfer_s = transfer_s
        self.doing: Literal["compute", "push", "wait", "ask", "away", "gone"] = "compute"
        self.step = 0
        self.read = 0
        self.alone = False
        self.asks = False
        self.compute_s = 0.0


class _Stage:
    def __init__(
        self,
        policy: ServePolicy,
        rule: Rule,
        programmes: Sequence[Programme],
        samples: Sequence[float],
        transfer_s: Sequence[float],
        seed: int,
    ) -> None:
        self.story: list[Told] = []
        self._policy = policy
        self._rule = rule
        self._random = random.Random(seed)
        self._version = 0
        self._unsettled: set[tuple[int, int]] = set()
        self._due: list[tuple[float, int, int]] = []  # when, which came first, whose (-1: a tick)
        self._order = 0
        self._workers = [
            _Worker(n, programme, samples[n] if samples else 1.0, transfer_s[n] if transfer_s else 0.0)
            for n, programme in enumerate(programmes)
        ]
        for worker in self._workers:
            self._next(worker, 0.0)

    def go_on(self) -> bool:
        """Play the next event; returns False if none is left and the contract holds."""
        self._check_that_waits_end()
        if not self._due:
            self._end()
            return False
        t, _, number = heapq.heappop(self._due)
        if number < 0:
            while self._due and self._due[0][0] <= t and self._due[0][2] < 0:
                heapq.heappop(self._due)
            self._tell("tick", t, self._rule.tick(t))
            return True
        worker = self._workers[number]
        if worker.doing == "compute" and worker.programme:
            self._arrive(worker, t, ask=worker.asks)
        elif worker.doing == "push":
            self._arrive(worker, t, ask=False)
        elif worker.doing == "away":
            worker.doing = "compute"
            self._tell("join", t, self._rule.join(number, t), worker)
            self._next(worker, t)
        else:
            self._leave(worker, t)
        return True

    def _next(self, worker: _Worker, t: float) -> None:
        """Continue its programme; its next action is scheduled like every other event."""
        item = worker.programme[0] if worker.programme else Away(0.0)
        worker.doing = "gone" if isinstance(item, Away) else "compute"
        self._schedule(t if isinstance(item, Away) else t + item + worker.transfer_s, worker.number)

    def _leave(self, worker: _Worker, t: float) -> None:
        self._tell("leave", t, self._rule.leave(worker.number, t), worker)
        if worker.programme:
            away = worker.programme.pop(0)
            assert isinstance(away, Away)
            worker.doing = "away"
            self._schedule(t + away.seconds, worker.number)

    def _arrive(self, worker: _Worker, t: float, *, ask: bool) -> None:
        if worker.doing == "compute":
            compute_s = worker.programme.pop(0)
            assert not isinstance(compute_s, Away)
            worker.compute_s = compute_s
        kind = "ask" if ask else "delta" if worker.alone else self._policy.pushes
        square = dot = 0.0
        if self._policy.listens and not ask:
            square = self._random.uniform(0.5, 1.5)
            dot = self._random.uniform(-0.1, 0.5)
        arrival = Arrival(
            worker=worker.number,
            step=worker.step,
            t=t,
            kind=kind,
            read=worker.read,
            samples=worker.samples,
            compute_s=worker.compute_s,
            transfer_s=worker.transfer_s,
            square=square,
            dot=dot,
        )
        worker.doing = "ask" if ask else "wait"
        if not ask:
            self._unsettled.add((worker.number, worker.step))
        self._tell("arrive", t, self._rule.arrive(arrival), worker, arrival)

    def _tell(self, what, t, decisions, worker=None, arrival=None) -> None:
        number = worker.number if worker is not None else -1
        self.story.append(
            Told(what, t, tuple(decisions), number, arrival, self._version, self._rule.state())
        )
        for decision in decisions:
            self._carry_out(decision, t)

    def _carry_out(self, decision: Decision, t: float) -> None:
        match decision:
            case Apply(parts):
                if not parts:
                    raise Broken("an update is made of nothing")
                for part in parts:
                    self._settle(part.worker, part.step, part)
                self._version += 1
            case Drop(worker, step, reason):
                if not reason:
                    raise Broken(f"step {step} of worker {worker} is dropped without a reason")
                self._settle(worker, step, decision)
            case Release(number, fresh, ask):
                self._release(self._workers[number], t, fresh=fresh, ask=ask)
            case Invite(number):
                worker = self._workers[number]
                if worker.doing != "ask":
                    raise Broken(f"worker {number} is invited and has not asked: {worker.doing}")
                worker.doing = "push"
                self._schedule(t + worker.transfer_s, number)
            case Wake(at):
                if not math.isfinite(at):
                    raise Broken(f"asked to be woken at {at}")
                self._schedule(max(t, at), -1)

    def _release(self, worker: _Worker, t: float, *, fresh: bool, ask: bool) -> None:
        if worker.doing not in ("wait", "ask"):
            raise Broken(f"worker {worker.number} is released and has not arrived: {worker.doing}")
        if fresh:
            worker.read = self._version
        worker.alone = not fresh
        worker.asks = ask
        worker.step += 1
        self._next(worker, t)

    def _settle(self, worker: int, step: int, by: WeightedPush | Drop) -> None:
        if (worker, step) not in self._unsettled:
            raise Broken(f"step {step} of worker {worker} has not arrived or is settled already: {by}")
        self._unsettled.remove((worker, step))

    def _schedule(self, t: float, number: int) -> None:
        self._order += 1
        heapq.heappush(self._due, (t, self._order, number))

    def _check_that_waits_end(self) -> None:
        """While workers wait, an event other than a rejoin must be scheduled: a rejoin may never come."""
        waiting = [worker.number for worker in self._workers if worker.doing in ("wait", "ask")]
        if waiting and all(n >= 0 and self._workers[n].doing == "away" for _, _, n in self._due):
            raise Broken(f"workers {waiting} wait for ever")

    def _end(self) -> None:
        if self._unsettled:
            raise Broken(f"all have left, and nothing became of {sorted(self._unsettled)} (worker, step)")
