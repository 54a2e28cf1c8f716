"""How is a forward pass computed a second time, exactly as the first time?

A stage that keeps only its inputs computes activations again in its backward pass. The second pass sees the
same inputs, dropout masks, other random numbers and precision, and leaves random state and buffers as they
are. An input that was changed in place since then is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from echelon.errors import ModelError
from echelon.parallel.masks import BatchMasks
from echelon.parallel.micro import Precision


class FirstPass:
    """How a forward pass began; made before it. `inputs` are all its tensors, in any structure."""

    def __init__(self, inputs: Any) -> None:
        self._inputs = [one for one in pytree.tree_leaves(inputs) if isinstance(one, Tensor)]
        self._versions = [_version(one) for one in self._inputs]
        self._random = torch.get_rng_state()
        self._precision = Precision.now()

    @contextmanager
    def again(
        self, masks: BatchMasks, rows: int, begin: int, end: int, buffers: Sequence[Tensor]
    ) -> Iterator[None]:
        """In the block, samples `begin` to `end` of `rows` go through the same pass."""
        for one, version in zip(self._inputs, self._versions, strict=True):
            if _version(one) != version:
                raise ModelError(
                    f"an input of shape {list(one.shape)} of a stage was changed in place since its "
                    "forward pass began, so activations cannot be computed again",
                    where="backward pass of a pipeline with recompute",
                    fix="compute it out of place, or leave recompute out",
                )
        before = [one.detach().clone() for one in buffers]
        drawing = BatchMasks(rows) if begin == 0 else masks  # the first one draws the masks once more
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            torch.set_rng_state(self._random)
            with self._precision.again(), drawing.of(begin, end):
                yield
        for one, value in zip(buffers, before, strict=True):
            one.data.copy_(value)  # not one.copy_: autograd may have saved the buffer


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version
