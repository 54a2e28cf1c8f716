"""A group on torch.distributed: Gloo for CPU tensors, NCCL for CUDA tensors where both are found.

torch.distributed's exceptions end here: what leaves this file is PeerLost or RoundTimeout with the
name of the worker that is to blame. If the script has initialised torch.distributed itself, its
default group is used and left alone at the end.
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
from torch._C._distributed_c10d import PrefixStore

from echelon.comm.future import CallerFuture, Future
from echelon.comm.group import Group, Op
from echelon.comm.meet.place import Place
from echelon.comm.meet.rendezvous import Meeting, interface_of
from echelon.comm.memory.rails import machines

_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


class C10dGroup(Group):
    """Members of a torch.distributed process group."""

    def __init__(
        self, meeting: Meeting, process_group: dist.ProcessGroup | None, *, deadline_s: float, owns: bool
    ) -> None:
        self.rank = meeting.me.rank
        self.size = len(meeting.members)
        self._meeting = meeting
        self._group = process_group
        self.deadline_s = deadline_s
        self.names = {member.rank: str(member) for member in meeting.members}
        self.machines = len(machines(meeting.members))
        self._owns = owns
        self._forks: list[C10dGroup] = []
        self._under_way: list[dist.Work] = []

    @classmethod
    def connect(cls, meeting: Meeting, place: Place, *, deadline_s: float) -> C10dGroup:
        """Connect workers that have met."""
        owns = not dist.is_initialized()
        group = cls(meeting, None, deadline_s=deadline_s, owns=owns)
        if owns:
            backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
            with group._explained(), _interface(interface_of(meeting, place)):
                dist.init_process_group(
                    backend,
                    store=PrefixStore("c10d", meeting.store),
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
        self._under_way = [one for one in self._under_way if not one.is_completed()]
        self._under_way.append(work)

        def wait(_: float | None) -> Tensor:
            with self._explained():
                work.wait()
            return tensor

        return CallerFuture(wait, work.is_completed)

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Everybody's tensor, by rank."""
        tensor = tensor.contiguous()
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        if tensor.numel():
            with self._explained():
                dist.all_gather([_bytes(part) for part in parts], _bytes(tensor), group=self._group)
        return parts

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        """Everybody gets the source's values."""
        if tensor.numel():
            with self._explained():
                dist.broadcast(_bytes(tensor), source, group=self._group)

    def fork(self) -> Group:
        """A process group of its own; all members call this together."""
        with self._explained():
            group = dist.new_group(timeout=timedelta(seconds=self.deadline_s))
        assert isinstance(group, dist.ProcessGroup)
        self._forks.append(C10dGroup(self._meeting, group, deadline_s=self.deadline_s, owns=True))
        return self._forks[-1]

    def close(self) -> None:
        """Take down what `connect` and `fork` set up.

        A process group lives as long as anybody refers to it, and the others notice that this worker has
        left when its connections close: so nothing may be kept here. But if somebody does (a traceback,
        say), Gloo's threads outlive the interpreter, and one that lets go of a tensor then ends the
        process with SIGABRT: so they must never be the last to hold what is still under way.
        """
        while self._forks:
            self._forks.pop().close()
        for work in self._under_way:
            if not work.is_completed():
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(work))
        self._under_way.clear()
        if self._owns and dist.is_initialized():
            dist.destroy_process_group(self._group)
        self._owns = False
        self._group = None

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except (dist.DistError, RuntimeError) as error:
            raise self._meeting.explain(error, deadline_s=self.deadline_s) from error


def _bytes(tensor: Tensor) -> Tensor:
    """The same memory as plain bytes: Gloo does not know all of torch's types."""
    return tensor.view(-1).view(torch.uint8)


@contextmanager
def _interface(name: str) -> Iterator[None]:
    """Tell Gloo which interface to use, unless the user has."""
    if "GLOO_SOCKET_IFNAME" in os.environ:
        yield
        return
    os.environ["GLOO_SOCKET_IFNAME"] = name
    try:
        yield
    finally:
        del os.environ["GLOO_SOCKET_IFNAME"]
