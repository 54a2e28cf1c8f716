"""What torch.distributed calls: one method for each of its operations.

The names and arguments of methods are torch's. Python's torch.distributed, DDP's reducer and functional
collectives (DTensor) all call them, the last two from C++, with `opts` as the last argument.
"""

# mypy: disable-error-code="override, assignment"
# torch declares several forms of each method; one here takes them all.

from __future__ import annotations

import atexit
import sys
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceCoalescedOptions,
    AllreduceOptions,
    AllToAllOptions,
    BarrierOptions,
    BroadcastOptions,
    GatherOptions,
    ReduceOptions,
    ReduceScatterOptions,
    ScatterOptions,
    Store,
)

from echelon.backend import collectives, monitored
from echelon.backend.connecting import connect
from echelon.backend.failures import translating
from echelon.backend.letters import Letters, Receive
from echelon.backend.order import Apart, CallOrder, Job, Steps
from echelon.backend.reduction import Reduction
from echelon.backend.register import NAME
from echelon.backend.staging import Staging
from echelon.backend.work import BackendWork
from echelon.comm.future import Future
from echelon.comm.group import Group
from echelon.comm.meet.rendezvous import Rendezvous
from echelon.comm.open import open_solo
from echelon.errors import PeerLost

Tensors = list[Tensor]
_THREAD = "echelon-backend"
_UNSET = timedelta(0)
_CPU = torch.device("cpu")


class BackendProcessGroup(dist.ProcessGroup):
    """A process group on Echelon's engine. `global_ranks`: of a group of some workers."""

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        timeout: timedelta,
        *,
        group_id: str = "",
        global_ranks: tuple[int, ...] = (),
    ) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # the form for subclasses
        self._store = store
        self._timeout_s = timeout.total_seconds()
        self._own_name, self._own_desc = group_id, ""
        self._ranks = () if global_ranks == tuple(range(size)) else global_ranks
        self._count = 0
        self._group: Group = open_solo()
        self._rendezvous: Rendezvous | None = None
        if size > 1:
            with translating(self._ranks):
                self._group, self._rendezvous = connect(store, rank, size, self._timeout_s)
        self._staging = Staging(self._group)
        self._order = CallOrder(_THREAD)
        self._apart = Apart(_THREAD)
        self._letters: Letters | None = Letters(self._group) if size > 1 else None
        self._close = _Closing(self._group, self._rendezvous, self._order)
        atexit.register(_close_at_exit, weakref.ref(self))

    # How torch knows it --------------------------------------------------------------------------

    def getBackendName(self) -> str:  # noqa: N802 - torch's name, as below
        """The name it is registered under."""
        return NAME

    def name(self) -> str:
        """The same."""
        return NAME

    def getGroupName(self) -> str:  # noqa: N802
        """The group's unique name."""
        return self._own_name

    def setGroupName(self, name: str) -> None:  # noqa: N802
        """Torch gives it after the group is made."""
        self._own_name = name

    def getGroupDesc(self) -> str:  # noqa: N802
        """What the script calls the group."""
        return self._own_desc

    def setGroupDesc(self, text: str) -> None:  # noqa: N802
        """As above."""
        self._own_desc = text

    @property
    def _device_types(self) -> list[torch.device]:
        return [_CPU]

    def _get_backend(self, device: torch.device) -> BackendProcessGroup:
        return self

    @property
    def supports_splitting(self) -> bool:
        """New groups meet at the store."""
        return False

    @property
    def supports_coalescing(self) -> bool:
        """Several operations are given together, as lists."""
        return False

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        """Tensors come from torch."""
        return False

    def get_group_store(self) -> Store:
        """The store that torch gave it."""
        return self._store

    def set_timeout(self, timeout: timedelta) -> None:
        """The deadline of operations that begin from now on."""
        self._timeout_s = timeout.total_seconds()

    _set_default_timeout = set_timeout

    def _get_sequence_number_for_group(self) -> int:
        return self._count

    def _set_sequence_number_for_group(self) -> None:
        self._count = 0

    # Collectives ---------------------------------------------------------------------------------

    def allreduce(self, tensors: Tensors | Tensor, opts: Any = None, **more: Any) -> dist.Work:
        """Combine in place."""
        found, opts = _listed(tensors), _options(AllreduceOptions, opts, more)
        reduction = self._reduction(opts)
        if found[0].is_sparse:
            steps = collectives.all_reduce_sparse(self._group, found[0], reduction)
            return self._start("all_reduce", steps, opts, found)
        dtype, known = found[0].dtype, reduction.engine_op(found[0].dtype) is not None
        staged = known and self._staging.takes(sum(tensor.numel() for tensor in found), dtype)
        staging = self._staging if staged else None
        steps = collectives.all_reduce(self._group, found, reduction, staging)
        return self._start("all_reduce", steps, opts, found, brief=known and not staged)

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> dist.Work:
        """Several tensors together."""
        opts = opts or AllreduceCoalescedOptions()
        kinds = {tensor.dtype for tensor in tensors}
        steps = self._in_turn(
            [
                collectives.all_reduce(
                    self._group, [t for t in tensors if t.dtype == kind], self._reduction(opts)
                )
                for kind in sorted(kinds, key=str)
            ],
            tensors,
        )
        return self._start("all_reduce", steps, opts, tensors)

    def reduce(self, tensors: Tensors | Tensor, opts: Any = None, **more: Any) -> dist.Work:
        """Combine for the root."""
        found, opts = _listed(tensors), _options(ReduceOptions, opts, more)
        steps = collectives.reduce(self._group, found, opts.rootRank, self._reduction(opts))
        return self._start("reduce", steps, opts, found)

    def broadcast(self, tensors: Tensors | Tensor, opts: Any = None, **more: Any) -> dist.Work:
        """The root's values."""
        found, opts = _listed(tensors), _options(BroadcastOptions, opts, more)
        return self._start(
            "broadcast", collectives.broadcast(self._group, found, opts.rootRank), opts, found
        )

    def allgather(self, outputs: Any, inputs: Tensors | Tensor, opts: Any = None, **more: Any) -> dist.Work:
        """Lists of tensors of all members."""
        found, opts = _listed(inputs), _options(AllgatherOptions, opts, more)
        lists = [outputs] if isinstance(outputs[0], Tensor) else outputs
        for out in lists:
            if len(out) != self._group.size:
                raise ValueError(f"{len(out)} output tensors for {self._group.size} members")
        steps = collectives.all_gather(self._group, lists, found)
        return self._start("all_gather", steps, opts, found, brief=True)

    def allgather_coalesced(self, outputs: list[Tensors], inputs: Tensors, opts: Any = None) -> dist.Work:
        """The same for several tensors: `outputs[r]` are those of member r."""
        opts = opts or AllgatherOptions()
        if len(outputs) != self._group.size:
            raise ValueError(f"{len(outputs)} output lists for {self._group.size} members")
        by_tensor = [[of[at] for of in outputs] for at in range(len(inputs))]
        return self._start(
            "all_gather", collectives.all_gather(self._group, by_tensor, inputs), opts, inputs
        )

    def all_gather_single(self, output: Tensor, own: Tensor, opts: Any = None) -> dist.Work:
        """Into one tensor."""
        return self.all_gather_single_coalesced([output], [own], opts)

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> dist.Work:
        """Into one tensor each."""
        opts = opts or AllgatherOptions()
        steps = collectives.all_gather_single(self._group, outputs, inputs)
        return self._start("all_gather", steps, opts, inputs, brief=True)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def gather(self, outputs: list[Tensors], inputs: Tensors, opts: Any = None) -> dist.Work:
        """For the root."""
        opts = opts or GatherOptions()
        out = outputs[0] if outputs else []
        if self._group.rank == opts.rootRank and len(out) != self._group.size:
            raise ValueError(f"{len(out)} output tensors for {self._group.size} members")
        steps = collectives.gather(self._group, out, inputs[0], opts.rootRank)
        return self._start("gather", steps, opts, inputs)

    def scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any = None) -> dist.Work:
        """From the root."""
        opts = opts or ScatterOptions()
        steps = collectives.scatter(self._group, outputs[0], inputs[0] if inputs else [], opts.rootRank)
        return self._start("scatter", steps, opts, outputs)

    def reduce_scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any = None) -> dist.Work:
        """Member r gets the r-th sum."""
        opts = opts or ReduceScatterOptions()
        for parts in inputs:
            if len(parts) != self._group.size:
                raise ValueError(f"{len(parts)} input tensors for {self._group.size} members")
        steps = collectives.reduce_scatter(self._group, outputs, inputs, self._reduction(opts))
        return self._start("reduce_scatter", steps, opts, outputs)

    def reduce_scatter_single(self, output: Tensor, own: Tensor, opts: Any = None) -> dist.Work:
        """From one tensor."""
        return self.reduce_scatter_single_coalesced([output], [own], opts)

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> dist.Work:
        """From one tensor each."""
        opts = opts or ReduceScatterOptions()
        steps = collectives.reduce_scatter_single(self._group, outputs, inputs, self._reduction(opts))
        return self._start("reduce_scatter", steps, opts, outputs)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> dist.Work:
        """One tensor for each member."""
        steps = collectives.all_to_all(self._group, outputs, inputs)
        return self._start("all_to_all", steps, opts or AllToAllOptions(), outputs)

    def all_to_all_single(
        self,
        output: Tensor,
        own: Tensor,
        output_splits: Sequence[int] = (),
        input_splits: Sequence[int] = (),
        opts: Any = None,
    ) -> dist.Work:
        """Rows of one tensor for each member."""
        steps = collectives.all_to_all_single(self._group, output, own, output_splits, input_splits)
        return self._start("all_to_all", steps, opts or AllToAllOptions(), [output])

    alltoall_base = all_to_all_single

    def barrier(self, opts: Any = None, **more: Any) -> dist.Work:
        """Done when all have called it."""
        opts = _options(BarrierOptions, opts, more)
        return self._start("barrier", collectives.barrier(self._group), opts, [], brief=True)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """A barrier after which the first member knows who did not come in time."""
        if self._letters is not None:
            limit_s = self._timeout_s if timeout is None else timeout.total_seconds()
            with translating(self._ranks):
                monitored.barrier(self._letters, self._group, limit_s, all_ranks=wait_all_ranks)

    # Messages ------------------------------------------------------------------------------------

    def send(self, tensors: Tensors, peer: int, tag: int) -> dist.Work:
        """To one member."""
        letters = self._pair(peer, "send to")
        return self._message("send", lambda: letters.send(tensors[0], peer, tag), tensors)

    def recv(self, tensors: Tensors, peer: int, tag: int) -> dist.Work:
        """From one member."""
        return self._receive(tensors, self._pair(peer, "receive from"), peer, tag)

    def recv_anysource(self, tensors: Tensors, tag: int) -> dist.Work:
        """From any member."""
        return self._receive(tensors, self._pair(-1, "receive from"), None, tag)

    def _receive(self, tensors: Tensors, letters: Letters, peer: int | None, tag: int) -> dist.Work:
        posted: list[Receive] = []

        def begin() -> Future[Any]:
            receive, future = letters.receive(tensors[0], peer, tag)
            posted.append(receive)
            return future

        work = self._message("recv", begin, tensors)
        work.source = lambda: posted[0].source
        return work

    def _pair(self, peer: int, what: str) -> Letters:
        """The messages of this group, unless the peer is this worker."""
        if peer == self._group.rank or self._letters is None:
            raise ValueError(f"a worker cannot {what} itself")
        return self._letters

    # Carrying out --------------------------------------------------------------------------------

    def _start(
        self, name: str, steps: Steps, opts: Any, tensors: Sequence[Tensor], *, brief: bool = False
    ) -> BackendWork:
        for tensor in tensors:
            if tensor.device.type != "cpu":
                raise ValueError(f"{name}: the backend moves tensors on the CPU, not on {tensor.device}")
        self._count += 1
        job = Job(steps, self._deadline_s(opts), brief=brief)
        with _recorded(name):
            self._order.submit(job, background=opts.asyncOp)
        return BackendWork(job, self._order, self._ranks)

    def _message(self, name: str, begin: Callable[[], Future[Any]], tensors: Tensors) -> BackendWork:
        def steps() -> Steps:
            yield begin()
            return tensors

        job = Job(steps(), self._timeout_s)
        with _recorded(name):
            job.begin()
        return BackendWork(job, self._apart, self._ranks)

    def _in_turn(self, parts: list[Steps], tensors: Tensors) -> Steps:
        for steps in parts:
            yield from steps
        return tensors

    def _deadline_s(self, opts: Any) -> float:
        given: timedelta = opts.timeout
        return given.total_seconds() if given > _UNSET else self._timeout_s

    def _reduction(self, opts: Any) -> Reduction:
        return Reduction.of(opts.reduceOp, self._group.size)

    # The end -------------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """Disconnect; safe to call twice."""
        self._close("")

    def abort(self) -> None:
        """The same: operations in flight end with an error."""
        self._close("")

    def __del__(self) -> None:
        close = getattr(self, "_close", None)
        if close is not None:
            close("")


class _Closing:
    """Closes what a process group has opened, once."""

    def __init__(self, group: Group, rendezvous: Rendezvous | None, order: CallOrder) -> None:
        self._group: Group | None = group
        self._rendezvous = rendezvous
        self._order = order

    def __call__(self, cause: str) -> None:
        group, self._group = self._group, None
        if group is None:
            return
        if self._rendezvous is not None and cause:
            self._rendezvous.announce_departure(cause)
        group.close()
        self._order.close(PeerLost("the process group is closed", where=f"rank {group.rank}"))


def _close_at_exit(group: weakref.ref[BackendProcessGroup]) -> None:
    """Many scripts never destroy their groups. If this one ended with an error, the others learn it."""
    found = group()
    error = getattr(sys, "last_value", None)
    if found is not None:
        found._close(f"{type(error).__name__}: {error}".partition("\n")[0] if error else "")


def _recorded(name: str) -> AbstractContextManager[Any]:
    """An event in torch's profiler; it costs nothing while nobody profiles."""
    if torch._C._autograd._profiler_enabled():
        return torch.profiler.record_function(f"{NAME}:{name}")
    return nullcontext()


def _listed(tensors: Tensors | Tensor) -> Tensors:
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def _options(kind: type, opts: Any, more: dict[str, Any]) -> Any:
    """The options of a call; torch's methods also take an operation, a root and a timeout by name."""
    if isinstance(opts, kind):
        return opts
    found = kind()
    if isinstance(opts, int) and not isinstance(opts, bool):
        more = {"root": opts, **more}
    elif isinstance(opts, timedelta):
        more = {"timeout": opts, **more}
    elif opts is not None:
        more = {"op": opts, **more}
    for name, field in (("op", "reduceOp"), ("root", "rootRank"), ("timeout", "timeout"), ("opts", "")):
        value = more.get(name)
        if name == "opts" and value is not None:
            return value
        if value is not None:
            setattr(found, field, value)
    return found
