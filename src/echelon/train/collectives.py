"""What a script can ask of the other workers directly: reduce, gather, broadcast, wait.

All workers must make the same calls in the same order. They compare a checksum of each call's description:
a backend that gets different shapes ends the process, or hangs. In shared memory the checksum travels with
the call's own data, elsewhere before it. A worker that makes no call at all is found by what it does
instead (comm/wire/doing.py).
"""

from __future__ import annotations

import builtins
import math
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, ParamSpec, TypeVar, get_args, overload

import msgspec
import torch
import xxhash
from torch import Tensor

from echelon.comm.future import Future
from echelon.comm.group import CallsDiffer, Group
from echelon.comm.group import Op as GroupOp
from echelon.comm.wire import doing, mismatch
from echelon.config.choices import check_word
from echelon.errors import ConfigError, MismatchedCalls, WorkerError

P = ParamSpec("P")
T = TypeVar("T")
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
        self._view = group  # one worker for each replica of the model, who have different data
        self._nodes = nodes

    @property
    def _shards(self) -> int:
        """How many workers have different samples; the others are replicas of these."""
        return self.world_size

    def _samples(self) -> float:
        """How many samples this worker's figures are of: of the last batch, or of a pass that has ended."""
        return 1.0

    def _exchange(self) -> AbstractContextManager[None]:
        """Around a wait for the other workers, which is not computing."""
        return nullcontext()

    def _combined(self) -> None:
        """The script has combined figures of several workers."""
        return

    @property
    def rank(self) -> int:
        """This worker's index, from 0."""
        return self._group.rank

    @property
    def world_size(self) -> int:
        """How many workers there are."""
        return self._group.size

    @property
    def is_leader(self) -> bool:
        """Whether this worker has rank 0, which prints and writes for all."""
        return self.rank == 0

    @property
    def node(self) -> str:
        """The name of the machine that this worker runs on."""
        return self._nodes[self.rank]

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
        self._combined()
        call = _described("all_reduce", op if weight is None else f"{op} weighted", tensor)
        one_exchange = wait and weight is None and tensor.numel()
        if not one_exchange:
            self._agree(call)
        part = self._part(op, weight)
        if self._view.size == 1 or not tensor.numel():
            future = Future.completed(tensor)
            return future.wait() if wait else future
        # A copy: if the reduction fails half-way, the script's tensor is unchanged.
        flat = tensor.detach().clone(memory_format=torch.contiguous_format)
        if part is not None:
            flat.mul_(part)
        how: GroupOp = "sum" if op == "mean" else op
        if one_exchange:
            self._together(call, lambda: self._view.all_reduce(flat, how).wait())
            return _put(tensor, flat)
        future = self._view.all_reduce(flat, how).then(lambda _: _put(tensor, flat))
        return future.wait() if wait else future

    def _part(self, op: Op, weight: float | None) -> float | None:
        """The factor of this worker's tensor in a mean; None for other operations."""
        if weight is None:
            return 1.0 / self._view.size if op == "mean" else None
        told = torch.tensor([float(weight) if op == "mean" and 0 <= weight < math.inf else math.nan])
        weights = torch.cat(self._view.all_gather(told.double()))
        if not float(weights.sum()) > 0:  # all workers have all weights, so all raise
            raise ConfigError(
                f"weights {[round(w, 6) for w in weights.tolist()]} of op={op!r} make no weighted mean",
                where="session.all_reduce",
                fix="give op='mean' and weights of 0 or more, not all 0",
            )
        return float(weights[self._view.rank] / weights.sum())

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
        self._combined()
        call = _described("reduce_scatter", op, tensor)
        flat = tensor.detach().clone(memory_format=torch.contiguous_format)
        parts = torch.tensor_split(flat, self._view.size)
        lengths = [part.numel() for part in parts]
        how: GroupOp = "sum" if op == "mean" else op
        if flat.numel():
            self._together(call, lambda: self._view.reduce_scatter(flat, lengths, how).wait())
        else:
            self._agree(call)
        own = parts[self._view.rank].clone()
        return own.div_(self._view.size) if op == "mean" else own

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Every worker's tensor, by rank. Shapes may differ, types may not.

        Example:

            everything = torch.cat(session.all_gather(outputs))
        """
        self._combined()
        call = f"all_gather {tensor.dtype} of {tensor.dim()} dimensions"
        return self._together(call, lambda: self._view.all_gather_any(tensor))

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
        call = _described("broadcast", str(source), tensor)
        flat = tensor.detach().contiguous()
        if flat.numel():
            self._together(call, lambda: self._group.broadcast(flat, source))
        else:
            self._agree(call)
        with torch.no_grad():
            if flat.data_ptr() != tensor.data_ptr():
                tensor.copy_(flat)
        return tensor

    def barrier(self) -> None:
        """Return when every worker has called it."""
        self._agree("barrier")

    # For evaluation and output ---------------------------------------------------------------------

    @overload
    def mean(self, value: Tensor, weight: float | None = None) -> Tensor: ...
    @overload
    def mean(self, value: float, weight: float | None = None) -> float: ...
    def mean(self, value: Tensor | float, weight: float | None = None) -> Tensor | float:
        """The mean of a number or tensor over all workers, weighted by their samples.

        weight  what this worker's value counts. Default: in a loop over a prepared loader, the samples of
                the current batch; after such a loop, the samples of the whole pass; else 1

        Every worker gets the same result; the value itself does not change. Example:

            loss = loss_fn(model(x), y)          # of this worker's share of the batch
            session.print(session.mean(loss))    # of the whole batch
        """
        self._combined()
        own = value.detach() if isinstance(value, Tensor) else torch.tensor(float(value))
        counts = self._samples() if weight is None else float(weight)
        total = torch.cat([own.double().cpu().reshape(-1) * counts, torch.tensor([counts]).double()])
        if self.world_size > 1:
            self._together(f"mean {list(own.shape)}", lambda: self._view.all_reduce(total).wait())
        if not 0 < float(total[-1]) < math.inf or not 0 <= counts < math.inf:
            raise ConfigError(
                f"weights that sum to {float(total[-1]):g} make no mean",
                where=f"session.mean, rank {self.rank}, weight {counts:g}",
                fix="give weights of 0 or more, not all 0",
            )
        result = (total[:-1] / total[-1]).view(own.shape)
        if not isinstance(value, Tensor):
            return float(result)
        return result.to(value.dtype if value.is_floating_point() else torch.float64).to(value.device)

    def gather_for_metrics(self, *data: Any) -> Any:
        """All workers' tensors, joined along the first dimension, in the order of the data.

        data  tensors, also in tuples, lists and dicts; a number counts as a tensor with one element

        Called with what each worker computed from its share of a batch, every worker gets what one process
        would have computed from the whole batch: nothing is repeated or padded. Returns the same structure;
        of several arguments a tuple. Example:

            for x, y in test_loader:
                scores, targets = session.gather_for_metrics(model(x), y)
                metric.update(scores, targets)
        """
        gathered = tuple(self._gathered(one) for one in data)
        return gathered[0] if len(gathered) == 1 else gathered

    def _gathered(self, data: Any) -> Any:
        if isinstance(data, Tensor):
            return torch.cat(self.all_gather(data if data.dim() else data.reshape(1))[: self._shards])
        if isinstance(data, (bool, int, float)):
            return torch.cat(self.all_gather(torch.tensor([data]))[: self._shards])
        if isinstance(data, tuple) and hasattr(data, "_fields"):
            return type(data)(*(self._gathered(one) for one in data))
        if isinstance(data, (list, tuple)):
            return type(data)(self._gathered(one) for one in data)
        if isinstance(data, dict):
            return {key: self._gathered(data[key]) for key in data}
        raise ConfigError(
            f"a {type(data).__name__} cannot be gathered",
            where="session.gather_for_metrics",
            fix="give it tensors or numbers, also in tuples, lists and dicts",
        )

    def print(self, *values: object, **options: Any) -> None:
        """Print on the leader only; takes what Python's `print` takes.

        Example:

            session.print(f"epoch {epoch}: {accuracy:.1%}")
        """
        if self.rank == 0:
            builtins.print(*values, **options)  # noqa: T201

    def on_leader(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
        """Call a function on the leader only, while the others wait.

        All workers call it. The leader gets what the function returns, the others None. If the function
        fails, the leader raises its error, and the others raise WorkerError, which names it. Example:

            session.on_leader(download, "data")      # then all workers read it
        """
        name = getattr(function, "__name__", type(function).__name__)
        self._agree(f"on_leader {name}")
        result, failed = None, None
        if self.rank == 0:
            try:
                result = function(*args, **kwargs)
            except BaseException as error:  # noqa: BLE001 - it is raised again below
                failed = error
        said = "" if failed is None else f"{type(failed).__name__}: {failed}"
        told = self._group.broadcast_bytes(said.encode()).decode() if self.world_size > 1 else said
        if failed is not None:
            raise failed
        if told:
            raise WorkerError(
                f"{name} failed on the leader: {told}",
                ranks=(0,),
                where=f"session.on_leader, rank 0 on {self._nodes[0]}",
                fix="see the log of rank 0",
            )
        return result

    # Agreement ------------------------------------------------------------------------------------

    def _agree(self, call: str) -> None:
        """All workers describe their call alike, or all raise."""
        if self.world_size > 1:
            self._compared(call, lambda: self._group.agree(_checksum(call)))

    def _together(self, call: str, act: Callable[[], T]) -> T:
        """The result of an operation of the group that is this call; all workers describe it alike."""
        if self.world_size == 1:
            return act()

        def announced() -> T:
            if self._view is self._group:
                self._group.announce(_checksum(call))
            else:  # the operation is not the group's own, so it cannot tell that calls differ
                self._group.agree(_checksum(call))
            return act()

        return self._compared(call, announced)

    def _compared(self, call: str, act: Callable[[], T]) -> T:
        with self._exchange():
            try:
                return act()
            except CallsDiffer:
                pass  # the exchange is over; the session goes on
        raise self._different_calls(call)

    def _different_calls(self, call: str) -> MismatchedCalls:
        """The error of all workers: who makes which call, and where."""
        mine = doing.describe(doing.stack_of(threading.get_ident()))
        said = self._group.all_gather_bytes(msgspec.json.encode((call, mine)))
        told = [msgspec.json.decode(one, type=tuple[str, doing.Doing]) for one in said]
        doings = {rank: what for rank, (_, what) in enumerate(told)}
        alike = len({what.call for what in doings.values()}) == 1
        found = ", ".join(f"rank {rank} {text}" for rank, (text, _) in enumerate(told)) if alike else ""
        names = {rank: f"rank {rank} on {node}" for rank, node in enumerate(self._nodes)}
        return mismatch.different_calls(names, doings, found)


def _described(call: str, how: str, tensor: Tensor) -> str:
    return f"{call} {how} {list(tensor.shape)} {tensor.dtype}"


def _checksum(call: str) -> int:
    """A number that is not 0."""
    return xxhash.xxh3_64_intdigest(call.encode()) >> 1 | 1


def _check_reducible(call: str, tensor: Tensor, op: Op) -> None:
    check_word("op", op, get_args(Op), where=f"session.{call}")
    if not isinstance(tensor, Tensor):
        raise ConfigError(
            f"{tensor!r} is not a tensor",
            where=f"session.{call}",
            fix="torch.tensor(x), or session.mean(x) for the mean of a number",
        )
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
