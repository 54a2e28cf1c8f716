"""How is a call of a model cut into micro-batches by samples, and how are their outputs joined again?

The samples are the first dimension of the first tensor that the model is called with. Micro-batches
differ by at most one sample. What has a row for each sample is cut, everything else is given whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from echelon.errors import ModelError
from echelon.parallel.chain import Given


@dataclass(frozen=True, slots=True)
class Precision:
    """What `torch.autocast` was set to when a model was called; its passes may run elsewhere."""

    lowers: bool
    dtype: torch.dtype
    caches: bool

    @staticmethod
    def now() -> Precision:
        """As it is set here."""
        lowers, caches = torch.is_autocast_enabled("cpu"), torch.is_autocast_cache_enabled()
        return Precision(lowers, torch.get_autocast_dtype("cpu"), caches)

    def again(self) -> torch.autocast:
        """A block in which it is set so."""
        return torch.autocast("cpu", self.dtype, self.lowers, self.caches)


@dataclass(slots=True)
class KeptMicro:
    """What the backward pass of a micro-batch needs: tensors that carry gradients.

    `hooked`: there are hooks on activations. `again`: computes `handed`, which then has shapes only.
    """

    received: list[Tensor]
    handed: list[Tensor]
    hooked: bool = False
    again: Callable[[], list[Tensor]] | None = None


@dataclass(slots=True)
class ModelCall:
    """One call of the model with `rows` samples; `edges` are the micro-batches' first and last ones.

    `kept` is by chunk and micro-batch. `weights` are the copies of parameters that its passes compute with,
    if they do not compute with the model's own.
    """

    given: Given
    edges: list[tuple[int, int]]
    rows: int
    kept: dict[tuple[int, int], KeptMicro] = field(default_factory=dict)
    precision: Precision = field(default_factory=Precision.now)
    weights: Sequence[Tensor] = ()

    def part(self, micro: int) -> Given:
        """The inputs of one micro-batch."""
        return rows_of(self.given, self.rows, *self.edges[micro])


def cut_call(given: Given, count_of: Callable[[int], int]) -> ModelCall:
    """A call in parts: as many as `count_of` says for its number of samples."""
    tensors = [one for one in pytree.tree_leaves(given) if isinstance(one, Tensor)]
    if any(one.requires_grad for one in tensors):
        raise ModelError(
            "an input of the model needs a gradient, which a pipeline does not compute",
            where="forward pass of a pipeline",
            fix="detach the input, or put the layers before it into the model",
        )
    batch = next((one for one in tensors if one.dim()), None)
    if batch is None or not batch.shape[0]:
        raise ModelError(
            "the model was called without a tensor that has samples",
            where="forward pass of a pipeline",
            fix="give it a batch whose first dimension is the samples",
        )
    rows = batch.shape[0]
    count = count_of(rows)
    ends = [(at + 1) * rows // count for at in range(count)]
    return ModelCall(given, list(zip([0, *ends[:-1]], ends, strict=True)), rows)


def rows_of(given: Given, rows: int, begin: int, end: int) -> Given:
    """The inputs of some samples of a call that has `rows`."""

    def cut(value: Any) -> Any:
        is_batch = isinstance(value, Tensor) and value.dim() > 0 and value.shape[0] == rows
        return value[begin:end] if is_batch else value

    args, kwargs = pytree.tree_map(cut, (given[0], dict(given[1])))
    return args, kwargs


def part_of(tensor: Tensor, rows: int, edge: tuple[int, int]) -> Tensor:
    """The rows of some samples in a tensor with one or more rows for each sample."""
    times = tensor.shape[0] // rows
    return tensor[edge[0] * times : edge[1] * times]


def joined(outputs: Sequence[Any], edges: Sequence[tuple[int, int]]) -> Any:
    """The micro-batches' outputs as one, along the samples."""
    flats = [pytree.tree_flatten(output) for output in outputs]
    for (leaves, _), (begin, end) in zip(flats, edges, strict=True):
        for leaf in leaves:
            if not isinstance(leaf, Tensor) or not leaf.dim() or leaf.shape[0] % (end - begin):
                what = f"a tensor of shape {list(leaf.shape)}" if isinstance(leaf, Tensor) else repr(leaf)
                raise ModelError(
                    f"the model returns {what} for a micro-batch, so micro-batches cannot be joined",
                    where="forward pass of a pipeline",
                    fix="return tensors with a row for each sample, and compute means outside the model",
                )
    columns = zip(*(leaves for leaves, _ in flats), strict=True)
    return pytree.tree_unflatten([torch.cat(column) for column in columns], flats[0][1])
