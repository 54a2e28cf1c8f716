"""A group on torch.distributed: Gloo for CPU tensors, NCCL for CUDA tensors where both are found.

This file translates torch.distributed's exceptions to PeerLost or RoundTimeout, which name the missing
worker. If the script has initialised torch.distributed itself, its default group is used and not closed.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from echelon.comm.c10d_store import TorchStore
from echelon.comm.future import CallerFuture, Future
from echelon.comm.group import Group, Op
from echelon.comm.meet.board import PrefixedStore
from echelon.comm.meet.place import Place
from echelon.comm.meet.rendezvous import Rendezvous, interface_of
from echelon.comm.memory.rails import machines

_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


class C10dGroup(Group):
    """Members of a torch.distributed process group."""

    def __init__(
        self,
        rendezvous: Rendezvous,
        process_group: dist.ProcessGroup | None,
        *,
        deadline_s: float,
        owns: bool,
    ) -> None:
        self.rank = rendezvous.me.rank
        self.size = len(rendezvous.members)
        self._rendezvous = rendezvous
        self._group = process_group
        self.deadline_s = deadline_s
        self.names = {member.rank: str(member) for member in rendezvous.members}
        self.machines = len(machines(rendezvous.members))
        self._owns = owns
        self._forks: list[C10dGroup] = []
        self._in_flight: list[dist.Work] = []
        self._store: TorchStore | None = None

    @classmethod
    def connect(cls, rendezvous: Rendezvous, place: Place, *, deadline_s: float) -> C10dGroup:
        """Connect the workers of a rendezvous."""
        owns = not dist.is_initialized()
        group = cls(rendezvous, None, deadline_s=deadline_s, owns=owns)
        if owns:
            backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
            group._store = TorchStore(PrefixedStore("c10d", rendezvous.store), timeout_s=deadline_s)
            with group._explained(), _interface(interface_of(rendezvous, place)):
                dist.init_process_group(
                    backend,
                    store=group._store,
                    rank=place.rank,
                    world_size=place.world_size,
                    timeout=timedelta(seconds=deadline_s),
                )
        return group

    def all_reduce(self, tensor: Tensor, op: Op = "sum", *, priority: int = 0) -> Future[Tensor]:
        """Combine in place, in the background."""
        with self._explained():
            work = dist.all_reduce(tensor, _OPS[op], group=self._group, async_op=True)
        assert work is not None
        self._in_flight = [one for one in self._in_flight if not one.is_completed()]
        self._in_flight.append(work)

        def wait(_: float | None) -> Tensor:
            with self._explained():
                work.wait()
            return tensor

        return CallerFuture(wait, work.is_completed)

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """The tensors of all members, by rank."""
        tensor = tensor.contiguous()
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        if tensor.numel():
            with self._explained():
                dist.all_gather([_bytes(part) for part in parts], _bytes(tensor), group=self._group)
        return parts

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        """Copy the source's values to all members."""
        if tensor.numel():
            with self._explained():
                dist.broadcast(_bytes(tensor), source, group=self._group)

    def send(self, tensor: Tensor, to: int, tag: int = 0) -> Future[None]:
        """In the background."""
        own = tensor.detach().contiguous()
        with self._explained():
            work = dist.isend(_bytes(own), to, group=self._group, tag=tag) if own.numel() else None
        return self._message(work, own).then(lambda _: None)

    def receive(self, tensor: Tensor, source: int, tag: int = 0) -> Future[Tensor]:
        """In the background."""
        flat = tensor.detach()
        into = flat if flat.is_contiguous() else flat.clone(memory_format=torch.contiguous_format)
        with self._explained():
            work = dist.irecv(_bytes(into), source, group=self._group, tag=tag) if into.numel() else None
        found = self._message(work, tensor)
        return found if into is flat else found.then(lambda _: flat.copy_(into)).then(lambda _: tensor)

    def _message(self, work: dist.Work | None, result: Tensor) -> Future[Tensor]:
        if work is None:
            return Future.completed(result)

        def wait(_: float | None) -> Tensor:
            with self._explained():
                work.wait()
            return result

        return CallerFuture(wait, work.is_completed)

    def fork(self) -> Group:
        """Another process group; all members call this together."""
        with self._explained():
            group = dist.new_group(timeout=timedelta(seconds=self.deadline_s))
            # A member that had connected to all and left at once would fail those that still connect.
            dist.all_reduce(torch.zeros(1), group=group)
        assert isinstance(group, dist.ProcessGroup)
        self._forks.append(C10dGroup(self._rendezvous, group, deadline_s=self.deadline_s, owns=True))
        return self._forks[-1]

    def close(self) -> None:
        """Destroy what `connect` and `fork` created.

        A process group lives as long as something refers to it, and peers notice this worker's departure
        only when its connections close. So this object keeps no reference. If something else does (a
        traceback, say), Gloo's threads outlive the interpreter, and a thread that then frees a tensor ends
        the process with SIGABRT. So operations in flight get a reference that is never released.
        """
        while self._forks:
            self._forks.pop().close()
        for work in self._in_flight:
            if not work.is_completed():
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(work))
        self._in_flight.clear()
        if self._owns and dist.is_initialized():
            dist.destroy_process_group(self._group)
        self._owns = False
        self._group = None
        self._store = None

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except (dist.DistError, RuntimeError) as error:
            raise self._rendezvous.explain(error, deadline_s=self.deadline_s) from error


def _bytes(tensor: Tensor) -> Tensor:
    """The same memory as plain bytes: Gloo does not know all of torch's types."""
    return tensor.view(-1).view(torch.uint8)


@contextmanager
def _interface(name: str) -> Iterator[None]:
    """Tell Gloo which network interface to use, unless the user has chosen one."""
    if "GLOO_SOCKET_IFNAME" in os.environ:
        yield
        return
    os.environ["GLOO_SOCKET_IFNAME"] = name
    try:
        yield
    finally:
        del os.environ["GLOO_SOCKET_IFNAME"]
