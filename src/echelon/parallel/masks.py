"""How does a model draw the same dropout masks in micro-batches as it does in one pass over the batch?

The first micro-batch draws each mask for the whole batch; every micro-batch takes its rows. So a stage
draws the numbers that one process draws in these layers, and the state of the random numbers goes from
stage to stage with the first micro-batch. Known are dropout in all forms and attention with dropout; any
other random number within a forward pass is refused, because it would differ. The batch is the first
dimension of what is dropped, or divides it, as in (batch x time, features).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from echelon.errors import ModelError

_DROPS: dict[Any, bool] = {  # whether the call changes its input
    functional.dropout: False,
    functional.dropout1d: False,
    functional.dropout2d: False,
    functional.dropout3d: False,
    torch.dropout: False,
    torch.feature_dropout: False,
    torch.dropout_: True,
    torch.feature_dropout_: True,
}


class BatchMasks:
    """The masks of one stage for one batch of `rows` samples."""

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._drawn: list[Tensor] = []

    def of(self, begin: int, end: int) -> _DropoutMode:
        """A context in which samples `begin` to `end` get their rows of the masks."""
        return _DropoutMode(self, begin, end)

    def mask(self, index: int, begin: int, end: int, shape: Sequence[int], draw: _Draw) -> Tensor:
        """The rows of the mask with this number; the first micro-batch draws it."""
        count = end - begin
        if not shape or shape[0] % count:
            raise ModelError(
                f"dropout of a value of shape {list(shape)} in a micro-batch of {count} samples",
                where="forward pass of a pipeline's stage",
                fix="let the batch be the first dimension of what is dropped",
            )
        times = shape[0] // count
        if begin == 0:
            self._drawn.append(draw((self._rows * times, *shape[1:])))
        if index >= len(self._drawn):
            raise ModelError(
                "a micro-batch has more dropout layers than the first one",
                where="forward pass of a pipeline's stage",
                fix="let all samples take the same way through the model",
            )
        return self._drawn[index][begin * times : end * times]

    def check(self, before: Tensor) -> None:
        """Refuse random numbers that a later micro-batch has drawn; `before` is the state before it."""
        if not torch.equal(torch.get_rng_state(), before):
            raise ModelError(
                "the model draws random numbers in its forward pass that are not dropout masks, so "
                "micro-batches would not train as the whole batch does",
                where="forward pass of a pipeline's stage",
                fix="use pipeline(micro=1), or draw them outside the model",
            )


_Draw = Callable[[Sequence[int]], Tensor]


class _DropoutMode(TorchFunctionMode):
    """Takes the place of dropout while one micro-batch goes through a stage."""

    def __init__(self, masks: BatchMasks, begin: int, end: int) -> None:
        super().__init__()
        self._masks = masks
        self._begin = begin
        self._end = end
        self._index = 0

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        given = kwargs or {}
        if func in _DROPS:
            return self._dropped(func, tuple(args), given)
        if func is functional.scaled_dot_product_attention and _attention_drop(args, given):
            return self._attention(*args, **given)
        return func(*args, **given)

    def _dropped(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        value: Tensor = args[0] if args else kwargs["input"]
        rest, named = args[1:], {key: one for key, one in kwargs.items() if key not in ("input", "inplace")}
        in_place = _DROPS[func] or kwargs.get("inplace") is True or (len(rest) > 2 and rest[2] is True)
        rate = rest[0] if rest else named.get("p", 0.5)
        trains = rest[1] if len(rest) > 1 else named.get("training", named.get("train", True))
        if not trains or not rate:
            return value
        drawn = self._mask(value, lambda ones: func(ones, *rest[:2], **named))
        return value.mul_(drawn) if in_place else value * drawn

    def _mask(self, value: Tensor, drop: Callable[[Tensor], Tensor]) -> Tensor:
        def draw(shape: Sequence[int]) -> Tensor:
            with torch.no_grad():
                return drop(torch.ones(tuple(shape), dtype=value.dtype, device=value.device))

        index, self._index = self._index, self._index + 1
        return self._masks.mask(index, self._begin, self._end, value.shape, draw)

    def _attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if enable_gqa:
            key = key.repeat_interleave(query.size(-3) // key.size(-3), -3)
            value = value.repeat_interleave(query.size(-3) // value.size(-3), -3)
        factor = 1 / math.sqrt(query.size(-1)) if scale is None else scale
        scores = query @ key.transpose(-2, -1) * factor
        if is_causal:
            seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
            scores = scores.masked_fill(~seen, -math.inf)
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            scores = scores.masked_fill(~attn_mask, -math.inf)
        elif attn_mask is not None:
            scores = scores + attn_mask
        weights = scores.softmax(-1)
        return weights * self._mask(weights, lambda ones: torch.dropout(ones, dropout_p, True)) @ value


def _attention_drop(args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    return bool(args[4] if len(args) > 4 else kwargs.get("dropout_p", 0.0))
