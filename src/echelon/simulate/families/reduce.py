"""Runs `full`: in every step the gradients of all workers are averaged, and all continue together.

All workers have the same weights and optimizer state, so one copy of each is kept. A round lasts as long as
its slowest worker computes, plus a ring reduction of one gradient.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from echelon.simulate.averaging import ring_late_s, ring_s
from echelon.simulate.learner import optimizer_for
from echelon.simulate.virtual import VirtualCluster


class ReduceRunner:
    """A run of `full`."""

    def __init__(self, virtual: VirtualCluster) -> None:
        self._virtual = virtual
        self._flat = virtual.learner.initial()
        self._optimizer = optimizer_for(virtual.setting, self._flat) if virtual.setting.gradients else None
        self._ranks = range(virtual.setting.workers)
        self._reduce_s = ring_s(virtual, self._ranks)

    def start(self) -> None:
        """Begin the first round."""
        self._begin()

    def shown(self) -> Sequence[Tensor]:
        """The common weights."""
        return [self._flat]

    def _begin(self) -> None:
        begun = [self._virtual.begin(rank) for rank in self._ranks]
        taken = [indices for indices, _ in begun]
        slowest_s = max(compute_s for _, compute_s in begun)
        reduce_s = self._reduce_s + ring_late_s(self._virtual, self._ranks)
        self._virtual.clock.after(slowest_s + reduce_s, lambda: self._end(taken))

    def _end(self, taken: Sequence[Tensor]) -> None:
        self._virtual.counts.gradients += len(taken)
        if self._optimizer is not None:
            self._flat.grad = self._virtual.learner.mean_gradient_at(self._flat, taken)
            self._optimizer.step()
        for _ in taken:
            self._virtual.counts.used(1, 0)
        self._virtual.counts.updates += 1
        self._begin()
