"""torch's ways to combine tensors."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from echelon.backend.reduction import Reduction

OPS = {
    dist.ReduceOp.SUM: lambda parts: sum(parts[1:], parts[0]),
    dist.ReduceOp.PRODUCT: lambda parts: torch.stack(parts).prod(0),
    dist.ReduceOp.MAX: lambda parts: torch.stack(parts).amax(0),
    dist.ReduceOp.MIN: lambda parts: torch.stack(parts).amin(0),
    dist.ReduceOp.BXOR: lambda parts: parts[0] ^ parts[1] ^ parts[2],
}


@pytest.mark.parametrize("op", list(OPS), ids=str)
def test_folded_parts_are_what_torch_computes(op: dist.ReduceOp) -> None:
    parts: list[Tensor] = [torch.tensor([1, 6, 3]), torch.tensor([4, 2, 2]), torch.tensor([7, 7, 1])]
    assert Reduction.of(op, 3).folded(parts).equal(OPS[op](parts).to(torch.int64))


def test_average_of_integers_is_cut_towards_zero() -> None:
    reduction = Reduction.of(dist.ReduceOp.AVG, 3)
    assert reduction.finished(torch.tensor([7, -7])).tolist() == [2, -2]


def test_numbers_of_eight_bits_are_added_in_float32() -> None:
    parts = [torch.full((2,), 1.5).to(torch.float8_e4m3fn)] * 2
    found = Reduction.of(dist.ReduceOp.SUM, 2).folded(parts)
    assert found.dtype == torch.float8_e4m3fn
    assert found.float().tolist() == [3.0, 3.0]


def test_bitwise_reduction_of_floats_is_refused() -> None:
    with pytest.raises(TypeError, match="BOR combines integers"):
        Reduction.of(dist.ReduceOp.BOR, 2).check(torch.zeros(1))


def test_bool_is_folded_and_float_is_not() -> None:
    reduction = Reduction.of(dist.ReduceOp.SUM, 2)
    assert reduction.engine_op(torch.bool) is None
    assert reduction.engine_op(torch.float32) == "sum"
    assert reduction.folded([torch.tensor([True, False])] * 2).tolist() == [True, False]
