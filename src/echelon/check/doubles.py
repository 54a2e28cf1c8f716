"""Lets a script that computes in 32 bits compute in 64: rounding is then mistaken for no difference.

Two right ways to sum differ in the last digit, and some training makes much of that: a unit of a ReLU that
is almost zero is on here and off there. In 64 bits such differences stay far below any that is real.

New tensors are of 64 bits, prepared models are converted, and so are the batches of loaders. Operations
convert what is left: data that the script reads by itself, and types that it names. A script that insists
on 32 bits may fail; then there is no such comparison.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map


class ComputeInDoubles(TorchDispatchMode):
    """Converts the operands of all operations that return new tensors."""

    supports_higher_order_operators = True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if kwargs.get("dtype") is torch.float32:
            kwargs = {**kwargs, "dtype": torch.float64}
        schema = getattr(func, "_schema", None)
        if schema is not None and not schema.is_mutable and not func.is_view:
            args, kwargs = to_doubles((args, kwargs))
        return func(*args, **kwargs)


@contextmanager
def doubles(active: bool) -> Iterator[None]:
    """Compute in 64 bits in this block, in this thread."""
    if not active:
        yield
        return
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with ComputeInDoubles():  # type: ignore[no-untyped-call]
            yield
    finally:
        torch.set_default_dtype(before)


def to_doubles(things: Any) -> Any:
    """The same, with tensors of 32 bits converted."""
    return tree_map(_to_double, things)


def _to_double(thing: Any) -> Any:
    if isinstance(thing, Tensor) and thing.dtype == torch.float32:
        return thing.to(torch.float64)
    return thing
