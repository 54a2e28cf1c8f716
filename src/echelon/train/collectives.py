"""What a script can ask of the other workers directly: reduce, gather, broadcast, wait.

All workers must make the same calls in the same order. This is checked first, since a backend that gets
different shapes ends the process, or hangs.
"""

from __future__ import annotations

import math
from typing import Literal, get_args, overload

import msgspec
import torch
from torch import Tensor

from echelon.comm.future import Future
from echelon.comm.group import Group
from echelon.config.choices import check_word
from echelon.errors import ConfigError

Op = Literal["sum", "mean", "max", "min"]

# What every backend supports. A sum of truth values is no truth value; complex numbers have no order.
_REAL = {
    torch.float16, torch.bfloat16, torch.float32, torch.float64,
    torch.uint8, torch.int8, torch.int32, torch.int64,
}  # fmt: skip
_COMPLEX = {torch.complex64, torch.complex128}
_REDUCIBLE = {
    "sum": _REAL | _COMPLEX,
    "mean": _REAL | _COMPLEX,
    "max": _REAL | {torch.bool},
    "min": _REAL | {torch.bool},
}


class ScriptCollectives:
    """The communicating half of a session. `nodes` is where each worker runs, by rank."""

    def __init__(self, group: Group, nodes: list[str]) -> None:
        self._group = group
        self._nodes = nodes

    @property
    def rank(self) -> int:
        """This worker's index, from 0."""
        return self._group.rank

    @property
    def world_size(self) -> int:
        """How many workers there are."""
        return self._group.size

    @overload
    def all_reduce(
        self, tensor: Tensor, op: Op = "sum", *, weight: float | None = None, wait: Literal[True] = True
    ) -> Tensor: ...
    @overload
    def all_reduce(
        self, tensor: Tensor, op: Op = "sum", *, weight: float | None = None, wait: Literal[False]
    ) -> Future[Tensor]: ...
    def all_reduce(
        self, tensor: Tensor, op: Op = "sum", *, weight: float | None = None, wait: bool = True
    ) -> Tensor | Future[Tensor]:
        """Combine a tensor over all workers, in place, and return it.

        op      sum, mean, max or min
        weight  for a mean: the weight of this worker's tensor, such as its number of samples
        wait    False: return a future at once; its `wait()` returns the tensor

        Example:

            mean = session.all_reduce(torch.tensor([loss]), "mean", weight=samples)
        """
        _check_reducible("all_reduce", tensor, op)
        self._check_same("all_reduce", op if weight is None else f"{op} weighted", tensor)
        part = self._part(op, weight)
        if self.world_size == 1 or not tensor.numel():
            future = Future.completed(tensor)
        else:
            # A copy: if the reduction fails half-way, the script's tensor is unchanged.
            flat = tensor.detach().clone(memory_format=torch.contiguous_format)
            if part is not None:
                flat.mul_(part)
            future = self._group.all_reduce(flat, "sum" if op == "mean" else op).then(
                lambda _: _put(tensor, flat)
            )
        return future.wait() if wait else future

    def _part(self, op: Op, weight: float | None) -> float | None:
        """The factor of this worker's tensor in a mean; None for other operations."""
        if weight is None:
            return 1.0 / self.world_size if op == "mean" else None
        told = torch.tensor([float(weight) if op == "mean" and 0 <= weight < math.inf else math.nan])
        weights = torch.cat(self._group.all_gather(told.double()))
        if not float(weights.sum()) > 0:  # all workers have all weights, so all raise
            raise ConfigError(
                f"weights {[round(w, 6) for w in weights.tolist()]} of op={op!r} make no weighted mean",
                where="session.all_reduce",
                fix="give op='mean' and weights of 0 or more, not all 0",
            )
        return float(weights[self.rank] / weights.sum())

    def reduce_scatter(self, tensor: Tensor, op: Op = "sum") -> Tensor:
        """Combine a tensor over all workers; each worker gets its part of the first dimension, by rank.

        op  sum, mean, max or min

        The parts are those of `torch.tensor_split`. The tensor that is given does not change. Example:

            part = session.reduce_scatter(torch.ones(10, 3))
        """
        _check_reducible("reduce_scatter", tensor, op)
        if not tensor.dim():
            raise ConfigError(
                "a tensor without dimensions has no parts",
                where="session.reduce_scatter",
                fix="use all_reduce",
            )
        self._check_same("reduce_scatter", op, tensor)
        flat = tensor.detach().clone(memory_format=torch.contiguous_format)
        parts = torch.tensor_split(flat, self.world_size)
        lengths = [part.numel() for part in parts]
        if flat.numel():
            self._group.reduce_scatter(flat, lengths, "sum" if op == "mean" else op).wait()
        own = parts[self.rank].clone()
        return own.div_(self.world_size) if op == "mean" else own

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Every worker's tensor, by rank. Shapes may differ, types may not.

        Example:

            everything = torch.cat(session.all_gather(outputs))
        """
        mine = {"call": f"all_gather {tensor.dtype}", "shape": list(tensor.shape)}
        told = [
            msgspec.json.decode(data) for data in self._group.all_gather_bytes(msgspec.json.encode(mine))
        ]
        self._compare([one["call"] for one in told])
        shapes = [torch.Size(one["shape"]) for one in told]
        lengths = [shape.numel() for shape in shapes]
        padded = tensor.new_zeros(max(1, *lengths))
        padded[: tensor.numel()] = tensor.detach().reshape(-1)
        parts = self._group.all_gather(padded)
        return [
            part[:length].clone().view(shape)
            for part, length, shape in zip(parts, lengths, shapes, strict=True)
        ]

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        """Give every worker the source's values, in place, and return the tensor.

        source  the rank whose values all workers get

        Example:

            session.broadcast(threshold)
        """
        if not 0 <= source < self.world_size:
            raise ConfigError(
                f"there is no rank {source} to broadcast from",
                where="session.broadcast",
                fix=f"ranks go from 0 to {self.world_size - 1}",
            )
        self._check_same("broadcast", str(source), tensor)
        flat = tensor.detach().contiguous()
        self._group.broadcast(flat, source)
        with torch.no_grad():
            if flat.data_ptr() != tensor.data_ptr():
                tensor.copy_(flat)
        return tensor

    def barrier(self) -> None:
        """Return when every worker has called it."""
        if self.world_size > 1:
            self._compare(self._told("barrier"))

    def _check_same(self, call: str, how: str, tensor: Tensor) -> None:
        """Refuse different calls or shapes, which would end a process inside the backend."""
        if self.world_size > 1:
            self._compare(self._told(f"{call} {how} {list(tensor.shape)} {tensor.dtype}"))

    def _told(self, mine: str) -> list[str]:
        """The text of every worker; one that makes another call may send bytes that are not text."""
        return [told.decode(errors="replace") for told in self._group.all_gather_bytes(mine.encode())]

    def _compare(self, told: list[str]) -> None:
        for rank, said in enumerate(told):
            if said != told[0]:
                raise ConfigError(
                    f"workers make different calls: rank 0 {told[0]}, rank {rank} {said}",
                    where=f"rank {rank} on {self._nodes[rank]}",
                    fix="all workers must make the same calls with tensors of the same shape and type",
                )


def _check_reducible(call: str, tensor: Tensor, op: Op) -> None:
    check_word("op", op, get_args(Op), where=f"session.{call}")
    if op == "mean" and not (tensor.is_floating_point() or tensor.is_complex()):
        raise ConfigError(
            f"a mean of {tensor.dtype} is not a whole number",
            where=f"session.{call}",
            fix="use op='sum', or convert the tensor to a floating-point type",
        )
    if tensor.dtype not in _REDUCIBLE[op]:
        raise ConfigError(
            f"{tensor.dtype} has no {op} over workers",
            where=f"session.{call}",
            fix="convert the tensor to one of the usual number types first",
        )


@torch.no_grad()
def _put(tensor: Tensor, result: Tensor) -> Tensor:
    return tensor.copy_(result)
