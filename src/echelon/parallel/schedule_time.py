"""What does a batch take with a schedule, from the times of passes and links? Pure.

Workers compute their lists as `stage.py` does: in order, and weights that are put off where they would
wait. A worker sends one message after another over its link, whether activations or gradients. Nothing else
takes time: so this is what a schedule takes without overhead. Not for `stale`, whose batches overlap.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from echelon.parallel.schedule import StageAction, schedule
from echelon.parallel.strategies.pipeline import Pipeline


@dataclass(frozen=True, slots=True, kw_only=True)
class PassCosts:
    """What a micro-batch costs, by part of the chain; parts go over the workers in turn.

    forward_s, input_s, weights_s  its passes: forward, backward for what it received, and for its weights
    handed_s  for each cut: how long what is handed over there, or its gradient, occupies a worker's link
    """

    forward_s: Sequence[float]
    input_s: Sequence[float]
    weights_s: Sequence[float]
    handed_s: Sequence[float]
    latency_s: float = 0.0


def batch_s(options: Pipeline, costs: PassCosts, workers: int, micro: int) -> float:
    """How long a batch of so many micro-batches takes, forward and backward."""
    lists = [
        schedule(options.schedule, worker, workers, micro, options.ahead, options.parts)
        for worker in range(workers)
    ]
    return _Batch(lists, costs, splits=options.schedule == "filled").run()


class _Batch:
    """A batch on its way."""

    def __init__(self, lists: list[list[StageAction]], costs: PassCosts, *, splits: bool) -> None:
        self._left = lists
        self._costs = costs
        self._splits = splits
        self._workers, self._parts = len(lists), len(costs.forward_s)
        self._clock = [0.0] * self._workers
        self._owed = [0] * self._workers
        self._sends_at = [0.0] * self._workers  # when a worker's link has sent all it has
        micros = {action.micro for action in lists[0]}
        self._there = {("forward", 0, micro): 0.0 for micro in micros}
        self._there.update({("backward", self._parts - 1, micro): 0.0 for micro in micros})

    def run(self) -> float:
        """When the last worker is done."""
        while any(self._left):
            known = [
                (*found, worker)
                for worker in range(self._workers)
                if self._left[worker] and (found := self._next_of(worker)) is not None
            ]
            begun_s, action, worker = min(known, key=lambda one: one[0])
            self._do(begun_s, action, worker)
        return max(self._clock)

    def _next_of(self, worker: int) -> tuple[float, StageAction] | None:
        """When a worker goes on, and with what; None while it waits for what has not been sent."""
        now_s, action = self._clock[worker], self._left[worker][0]
        part = action.chunk * self._workers + worker
        weights = action.kind == "weights"
        arrival_s = now_s if weights else self._there.get((action.kind, part, action.micro))
        if self._owed[worker] and (arrival_s is None or arrival_s > now_s):
            return now_s, next(one for one in self._left[worker] if one.kind == "weights")
        return None if arrival_s is None else (max(now_s, arrival_s), action)

    def _do(self, begun_s: float, action: StageAction, worker: int) -> None:
        costs, part = self._costs, action.chunk * self._workers + worker
        backward_s = costs.input_s[part] + (0.0 if self._splits else costs.weights_s[part])
        took_s = {
            "forward": costs.forward_s[part],
            "backward": backward_s,
            "weights": costs.weights_s[part],
        }
        self._left[worker].remove(action)
        self._clock[worker] = begun_s + took_s[action.kind]
        if self._splits:
            self._owed[worker] += (action.kind == "backward") - (action.kind == "weights")
        to = part + {"forward": 1, "backward": -1, "weights": self._parts}[action.kind]
        if 0 <= to < self._parts:
            self._send(action, worker, to, costs.handed_s[min(part, to)])

    def _send(self, action: StageAction, worker: int, to: int, takes_s: float) -> None:
        sent_s = max(self._clock[worker], self._sends_at[worker]) + takes_s
        self._sends_at[worker] = sent_s
        self._there[action.kind, to, action.micro] = sent_s + self._costs.latency_s
