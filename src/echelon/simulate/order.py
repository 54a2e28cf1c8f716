"""The order of samples: one common stream, from which each worker takes its next batch as it begins a step.

The stream is one seeded permutation of the data after another, so every sample comes once per pass. A batch
may reach from one pass into the next, so all batches are of full size, and N batches in a row equal one
batch of N times the size.
"""

from __future__ import annotations

import torch
from torch import Tensor


class Order:
    """The stream for one seed."""

    def __init__(self, samples: int, seed: int) -> None:
        self._samples = samples
        self._generator = torch.Generator().manual_seed(seed)
        self._pass = torch.randperm(samples, generator=self._generator)
        self._at = 0
        self.passes = 0

    def take(self, count: int) -> Tensor:
        """The indices of the next samples."""
        taken = []
        while count:
            part = self._pass[self._at : self._at + count]
            taken.append(part)
            count -= len(part)
            self._at += len(part)
            if self._at == self._samples:
                self._pass = torch.randperm(self._samples, generator=self._generator)
                self._at = 0
                self.passes += 1
        return taken[0] if len(taken) == 1 else torch.cat(taken)
