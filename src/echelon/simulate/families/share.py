"""Runs `hogwild`: all workers read and write the same weights, and nobody waits for anybody.

A worker's gradient is that of the weights as they were when it began to compute; its own optimizer writes
it to what they have become. Memory costs nothing here, and no write is ever torn.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import Tensor

from echelon.simulate.learner import optimizer_for
from echelon.simulate.scene import Scene


class ShareRunner:
    """A run on one memory."""

    def __init__(self, scene: Scene) -> None:
        self._scene = scene
        self._flat = scene.learner.initial()
        setting = scene.setting
        # Each has an optimizer of its own, hence a momentum of its own, for the same weights.
        self._optimizers = [
            optimizer_for(setting, self._flat) for _ in range(setting.workers * setting.gradients)
        ]
        self._version = 0

    def start(self) -> None:
        """All begin at once."""
        for rank in range(self._scene.setting.workers):
            self._begin(rank)

    def shown(self) -> Sequence[Tensor]:
        """The common weights."""
        return [self._flat]

    def _begin(self, rank: int) -> None:
        indices, compute_s = self._scene.begin(rank)
        # Only whoever is done in time counts as having computed; but the weights are there only now.
        gradient, _ = self._scene.learner.gradient_at(self._flat, indices)
        self._scene.clock.after(compute_s, partial(self._write, rank, gradient, self._version))

    def _write(self, rank: int, gradient: Tensor, read: int) -> None:
        counts = self._scene.counts
        counts.gradients += 1
        if self._optimizers:
            self._flat.grad = gradient
            self._optimizers[rank].step()
        counts.used(1, self._version - read)
        self._version += 1
        counts.updates = self._version
        self._begin(rank)
