"""Runs `hogwild`: all workers read and write the same weights, and nobody waits.

A worker computes its gradient on the weights at the start of its step; its own optimizer applies it to the
weights at the end. Memory access takes no time here, and writes never overlap.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import Tensor

from echelon.simulate.learner import optimizer_for
from echelon.simulate.virtual import VirtualCluster


class ShareRunner:
    """A run of `hogwild`."""

    def __init__(self, virtual: VirtualCluster) -> None:
        self._virtual = virtual
        self._flat = virtual.learner.initial()
        setting = virtual.setting
        # Each worker has its own optimizer, and so its own momentum, for the same weights.
        self._optimizers = [
            optimizer_for(setting, self._flat) for _ in range(setting.workers * setting.gradients)
        ]
        self._version = 0

    def start(self) -> None:
        """Let all workers begin."""
        for rank in range(self._virtual.setting.workers):
            self._begin(rank)

    def shown(self) -> Sequence[Tensor]:
        """The common weights."""
        return [self._flat]

    def _begin(self, rank: int) -> None:
        indices, compute_s = self._virtual.begin(rank)
        # A gradient is counted only when it is finished, but these weights exist only now.
        gradient, _ = self._virtual.learner.gradient_at(self._flat, indices)
        self._virtual.clock.after(compute_s, partial(self._write, rank, gradient, self._version))

    def _write(self, rank: int, gradient: Tensor, read: int) -> None:
        counts = self._virtual.counts
        counts.gradients += 1
        if self._optimizers:
            self._flat.grad = gradient
            self._optimizers[rank].step()
        counts.used(1, self._version - read)
        self._version += 1
        counts.updates = self._version
        self._begin(rank)
