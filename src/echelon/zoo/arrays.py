"""Samples in memory. A batch is fetched with one tensor index, not sample by sample.

Values stay as small as in their file (images and characters as bytes) and become float32 or int64 when they
are fetched: this takes a quarter of the memory in every worker, for little time per batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, default_collate


class ArrayDataset(Dataset[tuple[Tensor, Tensor]]):
    """Inputs and targets of equal length. `scale` and `shift` are applied to float inputs when fetched.

    A loader that calls `__getitems__` receives whole batches; it needs `collate` from this file.
    """

    def __init__(
        self,
        inputs: Tensor,
        targets: Tensor,
        *,
        dtype: torch.dtype = torch.float32,
        scale: Tensor | None = None,
        shift: Tensor | None = None,
    ) -> None:
        if len(inputs) != len(targets):
            raise ValueError(f"{len(inputs)} inputs, but {len(targets)} targets")
        self.inputs = inputs
        self.targets = targets
        self.dtype = dtype
        self.scale = scale
        self.shift = shift

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self._finish(self.inputs[index]), self.targets[index].long()

    def __getitems__(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """The samples with those indices, as one batch."""
        index = torch.as_tensor(indices, dtype=torch.int64)
        return self._finish(self.inputs[index]), self.targets[index].long()

    def _finish(self, inputs: Tensor) -> Tensor:
        out = inputs.to(self.dtype)
        if self.scale is not None:
            out = out * self.scale
        if self.shift is not None:
            out = out + self.shift
        return out


def collate(fetched: Any) -> Any:
    """Return a whole batch unchanged; stack a list of samples as torch does."""
    return fetched if isinstance(fetched, tuple) else default_collate(fetched)


def normaliser(
    mean: Sequence[float], deviation: Sequence[float], *, full: float = 255.0
) -> tuple[Tensor, Tensor]:
    """Scale and shift, per channel, that normalise values of 0..full with that mean and deviation."""
    over = torch.tensor(deviation).view(-1, 1, 1)
    return 1.0 / (full * over), -torch.tensor(mean).view(-1, 1, 1) / over
