"""torch's ways to combine tensors, and how each is computed. Pure.

The group itself sums and takes minima and maxima, of the types that it adds in one thread. Everything else
is folded: each member gets its block of all tensors and combines them in the order of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from echelon.comm.group import Op

_ReduceOp = dist.ReduceOp
_ENGINE: dict[object, Op] = {
    _ReduceOp.SUM: "sum",
    _ReduceOp.AVG: "sum",
    _ReduceOp.PREMUL_SUM: "sum",
    _ReduceOp.MAX: "max",
    _ReduceOp.MIN: "min",
}
_FOLDS: dict[object, Callable[[Tensor, Tensor], Tensor]] = {
    _ReduceOp.SUM: torch.add,
    _ReduceOp.AVG: torch.add,
    _ReduceOp.PREMUL_SUM: torch.add,
    _ReduceOp.PRODUCT: torch.mul,
    _ReduceOp.MAX: torch.maximum,
    _ReduceOp.MIN: torch.minimum,
    _ReduceOp.BAND: torch.bitwise_and,
    _ReduceOp.BOR: torch.bitwise_or,
    _ReduceOp.BXOR: torch.bitwise_xor,
}
_BITWISE = (_ReduceOp.BAND, _ReduceOp.BOR, _ReduceOp.BXOR)
_ADDED = frozenset(
    {
        torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128,
        torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8,
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduction:
    """One way to combine the tensors of `size` members."""

    kind: object
    size: int
    factor: float | Tensor = 1.0

    @classmethod
    def of(cls, asked: dist.ReduceOp, size: int) -> Reduction:
        """The one that a call asks for."""
        kind = asked.op if hasattr(asked, "op") else asked
        factor = asked.factor if kind == _ReduceOp.PREMUL_SUM else 1.0
        return cls(kind=kind, size=size, factor=factor)

    def engine_op(self, dtype: torch.dtype) -> Op | None:
        """What the group does for it; None: it must be folded."""
        return _ENGINE.get(self.kind) if dtype in _ADDED else None

    def check(self, tensor: Tensor) -> None:
        """Raise for a type that cannot be combined in this way, as torch's own backends do."""
        inexact = tensor.is_floating_point() or tensor.is_complex()
        if self.kind in _BITWISE and inexact:
            raise TypeError(f"{_name(self.kind)} combines integers, not {tensor.dtype}")
        if self.kind == _ReduceOp.AVG and tensor.dtype == torch.bool:
            raise TypeError("there is no average of bool")

    def prepared(self, flat: Tensor) -> Tensor:
        """A member's own part: what it contributes. Changes nothing but for a factor."""
        return flat.mul_(self.factor) if self.kind == _ReduceOp.PREMUL_SUM else flat

    def finished(self, flat: Tensor) -> Tensor:
        """The result, from what was combined; in place."""
        if self.kind != _ReduceOp.AVG:
            return flat
        if flat.is_floating_point() or flat.is_complex():
            return flat.div_(self.size)
        return flat.div_(self.size, rounding_mode="trunc")

    def folded(self, parts: Sequence[Tensor]) -> Tensor:
        """The result of all members' parts, in the order of ranks.

        Types without arithmetic of their own are combined in a wider one.
        """
        combine = _FOLDS[self.kind]
        dtype = parts[0].dtype
        wide = _WIDER.get(dtype, torch.float32 if dtype.is_floating_point else dtype)
        wide = dtype if dtype in _ADDED else wide
        total = self.prepared(parts[0].to(wide, copy=True))
        for part in parts[1:]:
            total = combine(total, self.prepared(part.to(wide, copy=True)))
        return self.finished(total).to(dtype)


_WIDER = {torch.uint16: torch.int64, torch.uint32: torch.int64, torch.uint64: torch.int64}


def _name(kind: object) -> str:
    return str(kind).rpartition(".")[2]
