"""A group's operations in shared memory, if all its members are on one machine.

Made by the group, which exchanges handles of memory by other means. Each operation here is one exchange,
also where lengths differ or a script's call is to be compared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from ctypes import memmove

import torch
from torch import Tensor

from echelon.comm.future import CallerFuture, Future
from echelon.comm.group import Op
from echelon.comm.memory.collectives import (
    Barrier,
    Broadcasting,
    Gather,
    GatherAny,
    LargeReduce,
    Scatter,
    SmallReduce,
    is_small,
)
from echelon.comm.memory.segment import Gather as GatherHandles
from echelon.comm.memory.segment import share
from echelon.comm.memory.slots import SlotTeam, SlotWork
from echelon.comm.wire.loop import Loop
from echelon.errors import RoundTimeout, WorkerError


class MemoryOperations:
    """Operations of the members with these ranks in the view; `rank` is a position among them.

    gather      exchanges handles between the members, not through this memory
    deadline_s  how long members wait for each other, asked at each wait
    """

    def __init__(
        self,
        rank: int,
        ranks: Sequence[int],
        pids: Sequence[int],
        loop: Loop,
        *,
        channel: int,
        gather: GatherHandles,
        meanwhile: Callable[[], None],
        deadline_s: Callable[[], float],
    ) -> None:
        self.rank = rank
        self.size = len(ranks)
        self._loop = loop
        self._deadline_s = deadline_s
        self._call = 0
        names = [loop.names[one] for one in ranks]
        (memory,) = share(SlotTeam.size_bytes(self.size), rank, pids, [0], gather)
        self.team = SlotTeam(rank, ranks, names, memory, check=loop.check, mismatch=self._mismatch)
        self.team.report_to(loop.watch, channel, meanwhile)

    def announce(self, call: int) -> None:
        """The next operation compares this number."""
        self._call = call

    def agree(self, call: int) -> None:
        """Compare this number now."""
        self._run(Barrier(call))

    def barrier(self) -> None:
        """Wait for all members."""
        self._run(Barrier(self._taken()))

    def all_reduce(self, flat: Tensor, op: Op, result: Tensor) -> Future[Tensor]:
        """Combine in place; done by the thread that waits."""
        small = is_small(flat.numel() * flat.element_size())
        kind = SmallReduce if small else LargeReduce
        return self._begun(kind(self.team, flat, op, self._taken()), result)

    def reduce_scatter(
        self, flat: Tensor, lengths: Sequence[int], op: Op, result: Tensor
    ) -> Future[Tensor]:
        """Combine in place; each member's block only."""
        return self._begun(Scatter(self.team, flat, lengths, op, self._taken()), result)

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """The tensors of all members."""
        parts = tensor.new_empty((self.size, *tensor.shape))
        length = tensor.numel() * tensor.element_size()
        memmove(parts.data_ptr() + self.rank * length, tensor.data_ptr(), length)
        self._run(Gather(self.team, parts, [length] * self.size, self._taken()))
        return list(parts.unbind())

    def gather_blocks(self, buffer: Tensor, lengths: Sequence[int]) -> Future[Tensor]:
        """All blocks of a buffer to all members, in place."""
        item = buffer.element_size()
        work = Gather(self.team, buffer, [length * item for length in lengths], self._taken())
        return self._begun(work, buffer)

    def all_gather_any(self, tensor: Tensor) -> list[Tensor]:
        """Tensors of any shapes, but of as many dimensions; one exchange if all are small."""
        own = tensor.detach().contiguous()
        work = GatherAny(self.team, own, self._taken())
        self._run(work)
        shapes = work.shapes
        if work.inline:
            return [torch.frombuffer(data, dtype=own.dtype).view(shape) if data else own.new_empty(shape)
                    for data, shape in zip(work.found, shapes, strict=True)]  # fmt: skip
        lengths = [math.prod(shape) for shape in shapes]
        buffer = own.new_empty(sum(lengths))
        blocks = list(torch.split(buffer, lengths))
        if own.numel():
            memmove(blocks[self.rank].data_ptr(), own.data_ptr(), own.numel() * own.element_size())
        self.gather_blocks(buffer, lengths).wait()
        return [block.clone().view(shape) for block, shape in zip(blocks, shapes, strict=True)]

    def broadcast(self, flat: Tensor, source: int) -> None:
        """The source's bytes for all members."""
        self._run(Broadcasting(self.team, flat, source, self._taken()))

    def _taken(self) -> int:
        call, self._call = self._call, 0
        return call

    def _begun(self, work: SlotWork, result: Tensor) -> Future[Tensor]:
        team = self.team
        team.begin(work)

        def finish(timeout_s: float | None) -> Tensor:
            self._finish(work, timeout_s)
            return result

        return CallerFuture(finish, lambda: team.has_finished(work), lambda: work.timing, alarm=team.bells)

    def _run(self, work: SlotWork) -> None:
        self.team.begin(work)
        self._finish(work)

    def _finish(self, work: SlotWork, timeout_s: float | None = None) -> None:
        try:
            self.team.finish(work, self._deadline_s(), timeout_s)
        except RoundTimeout as error:
            if timeout_s is None:
                self._loop.note(error)
            raise

    def _mismatch(self, found: str) -> Exception:
        self._loop.differ(found)
        try:
            self._loop.check()
        except WorkerError as error:
            return error
        return WorkerError(
            f"workers make different calls: {found}", fix="make the same calls on all workers"
        )
