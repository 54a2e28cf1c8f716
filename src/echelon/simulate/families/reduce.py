"""Runs `full`: in every step the gradients of all workers are averaged, and all go on together.

All have the same weights and the same optimizer, so there is one of each. A round lasts as long as its
slowest worker computes, and a ring's reduction of one gradient.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from echelon.simulate.averaging import ring_s
from echelon.simulate.learner import optimizer_for
from echelon.simulate.scene import Scene


class ReduceRunner:
    """A run in lockstep."""

    def __init__(self, scene: Scene) -> None:
        self._scene = scene
        self._flat = scene.learner.initial()
        self._optimizer = optimizer_for(scene.setting, self._flat) if scene.setting.gradients else None
        self._reduce_s = ring_s(scene, range(scene.setting.workers))

    def start(self) -> None:
        """The first round begins."""
        self._begin()

    def shown(self) -> Sequence[Tensor]:
        """The common weights."""
        return [self._flat]

    def _begin(self) -> None:
        begun = [self._scene.begin(rank) for rank in range(self._scene.setting.workers)]
        taken = [indices for indices, _ in begun]
        slowest_s = max(compute_s for _, compute_s in begun)
        self._scene.clock.after(slowest_s + self._reduce_s, lambda: self._end(taken))

    def _end(self, taken: Sequence[Tensor]) -> None:
        self._scene.counts.gradients += len(taken)
        if self._optimizer is not None:
            self._flat.grad = self._scene.learner.mean_gradient_at(self._flat, taken)
            self._optimizer.step()
        for _ in taken:
            self._scene.counts.used(1, 0)
        self._scene.counts.updates += 1
        self._begin()
