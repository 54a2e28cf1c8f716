"""A group whose members may be lost: its operations are carried out again without them.

Operations run in the thread that waits for them, one after another, and are numbered; all members have the
same order. What an operation gave is kept until all members are known to have it, for one that was
interrupted before it had it (`membership/survival.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from echelon.comm.future import CallerFuture, Future
from echelon.comm.group import CallsDiffer, Group, Op
from echelon.comm.meet.links import Links
from echelon.comm.wire.watch import OnWaiting
from echelon.errors import Corrupt, JoinTimeout, MismatchedCalls, PeerLost, RoundTimeout, WorkerError

T = TypeVar("T")
LOST = (PeerLost, RoundTimeout, JoinTimeout, Corrupt)  # after which members agree on who goes on


class GroupChanges(Protocol):
    """What a worker does when others are lost. `number` counts the changes so far.

    members         the slots of the workers that are there: their ranks at first
    slot            this worker's
    is_catching_up  this worker comes back, and repeats what the others did
    settle          completes the rounds that are in flight: they come before the next operation
    is_out          this worker is left out for a while, and nothing that it computes counts
    """

    settle: Callable[[], None]
    number: int
    is_out: bool
    members: tuple[int, ...]
    slot: int

    def members_of(self, number: int) -> Sequence[int]:
        """The slots of the members after so many changes, by rank."""

    @property
    def is_catching_up(self) -> bool:
        """Whether this worker only repeats what others have done."""

    def described(self, mine: bytes) -> bytes | None:
        """What the first worker has prepared next, on one that is no member yet; else None."""

    def lost(self, since: int, slots: Sequence[int]) -> Sequence[int]:
        """Which of these slots were lost after so many changes; for another thread than the trainer's."""

    def begin(self) -> list[Tensor] | None:
        """The next operation begins; its result, if others have completed it in an earlier view."""

    def loss(self, error: Exception) -> WorkerError | None:
        """The loss that an error of an operation means; None if it means none, and is to be raised."""

    def recover(self, error: WorkerError) -> list[Tensor] | None:
        """Go on without the lost workers; the result of the operation, if others have completed it."""

    def complete(self, result: Sequence[Tensor], *, full: bool) -> None:
        """The operation has this result; `full`: no member can have it before all have begun it."""

    def sent(self) -> None:
        """A round is in flight: an operation once it is waited for. Further batches are not in it."""

    def outdated(self) -> bool:
        """Whether this worker's weight in the round was given when lost workers still counted."""

    def reduced(
        self, slots: Collection[int], alone: Collection[int] = (), refused: Collection[int] = ()
    ) -> None:
        """A round is complete with all that these workers have drawn: their gradients or their weights.

        refused  the slots whose gradients were not in the sum, because they were not finite

        alone  members whose weights nobody else has got in it
        """

    def opened(self, group: ChangingGroup) -> None:
        """A fork was made, which follows the changes too."""


class ChangingGroup(Group):
    """The members that are left. Forks change with it."""

    own_transport = True
    changes: GroupChanges

    def __init__(self, inner: Group, changes: GroupChanges) -> None:
        self.changes = self._changes = changes
        self._told: OnWaiting | None = None
        self.adopt(inner)

    def adopt(self, inner: Group) -> None:
        """Go on as this group."""
        self.inner = inner
        self.rank, self.size, self.names = inner.rank, inner.size, inner.names
        self.deadline_s, self.machines = inner.deadline_s, inner.machines
        if self._told is not None:
            inner.on_waiting(self._told)

    @property
    def current(self) -> Group:
        """The group as it is now; its operations fail if a member is lost."""
        return self.inner

    def _run(
        self,
        attempt: Callable[[Group], T],
        packed: Callable[[T], Sequence[Tensor]],
        unpacked: Callable[[Sequence[Tensor]], T],
        *,
        full: bool = True,
    ) -> T:
        self._changes.settle()
        found = self._changes.begin()
        while found is None:
            try:
                result = attempt(self.inner)
            except (*LOST, CallsDiffer, MismatchedCalls) as error:
                loss = self._changes.loss(error)
                if loss is None:
                    raise
                found = self._changes.recover(loss)
            else:
                self._changes.complete(packed(result), full=full)
                return result
        self._changes.complete(found, full=full)
        return unpacked(found)

    def all_reduce(self, tensor: Tensor, op: Op = "sum", *, priority: int = 0) -> Future[Tensor]:
        """When it is waited for."""
        own = tensor.detach().clone()

        def attempt(inner: Group) -> Tensor:
            tensor.detach().copy_(own)
            return inner.all_reduce(tensor, op, priority=priority).wait()

        def put(found: Sequence[Tensor]) -> Tensor:
            tensor.detach().copy_(found[0])
            return tensor

        return CallerFuture(
            lambda _: self._run(attempt, lambda result: [result.detach().clone()], put), lambda: False
        )

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Of the members that are there now."""
        return self._run(lambda inner: inner.all_gather(tensor), _clones, list)

    def all_gather_any(self, tensor: Tensor) -> list[Tensor]:
        """As one operation: lengths and contents are of the same members."""
        return self._run(lambda inner: inner.all_gather_any(tensor), _clones, list)

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        """The source may be done before others have begun."""
        own = tensor.detach().clone()  # if the source is lost, another one is the source of what it has

        def attempt(inner: Group) -> Tensor:
            tensor.detach().copy_(own)
            inner.broadcast(tensor, min(source, inner.size - 1))
            return tensor

        def put(found: Sequence[Tensor]) -> Tensor:
            if found:  # else a worker that comes back repeats it, and gets the values of now later
                tensor.detach().copy_(found[0])
            return tensor

        self._run(attempt, lambda sent: [sent.detach().clone()], put, full=False)

    def broadcast_bytes(self, data: bytes, source: int = 0) -> bytes:
        """As one operation."""

        def attempt(inner: Group) -> bytes:
            return inner.broadcast_bytes(data, min(source, inner.size - 1))

        return self._run(
            attempt,
            lambda sent: [torch.frombuffer(bytearray(sent or b"\0"), dtype=torch.uint8), _length(sent)],
            lambda found: bytes(found[0].numpy())[: int(found[1])],
            full=False,
        )

    def confirmed(self, exchange: Callable[[Group, tuple[int, ...]], T]) -> tuple[T, tuple[int, ...]]:
        """The result of an exchange that differs between members, and the slots of those who took part.

        It counts once all members have confirmed it; else it is repeated by those who are left.
        """
        received: T | None = None

        def attempt(inner: Group) -> tuple[int, ...]:
            nonlocal received
            members = self._changes.members
            received = exchange(inner, members)
            inner.barrier()
            return members

        members = self._run(
            attempt, lambda told: [torch.tensor(told)], lambda found: tuple(map(int, found[0].tolist()))
        )
        assert received is not None  # others have seen that this worker has confirmed it
        return received, members

    def broadcast_held(self, tensor: Tensor, holders: Sequence[int]) -> None:
        """The values of the first of these slots that is a member, also after others were lost."""
        own = tensor.detach().clone()

        def attempt(inner: Group) -> Tensor:
            members = self._changes.members
            tensor.detach().copy_(own)
            inner.broadcast(tensor, next((members.index(slot) for slot in holders if slot in members), 0))
            return tensor

        def put(found: Sequence[Tensor]) -> Tensor:
            tensor.detach().copy_(found[0])
            return tensor

        self._run(attempt, lambda sent: [sent.detach().clone()], put, full=False)

    def agree(self, call: int) -> None:
        """Of the members that are there now."""
        self._run(lambda inner: inner.agree(call), lambda _: [], lambda _: None)

    def barrier(self) -> None:
        """Of the members that are there now."""
        self._run(lambda inner: inner.barrier(), lambda _: [], lambda _: None)

    def fork(self) -> Group:
        """Follows the same changes."""
        made = ChangingGroup(self.inner.fork(), self._changes)
        self._changes.opened(made)
        return made

    def buffer(self, length: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Of the group as it is now."""
        return self.inner.buffer(length, dtype, device)

    def release(self, buffer: Tensor) -> None:
        """Of the group as it is now."""
        self.inner.release(buffer)

    def sent_bytes(self, tensor: Tensor) -> int:
        """As the group counts."""
        return self.inner.sent_bytes(tensor)

    def progress(self) -> None:
        """Of the group as it is now."""
        self.inner.progress()

    def measure_links(self) -> Links | None:
        """All are on one machine."""
        return self.inner.measure_links()

    def reason(self, length_bytes: int) -> str:
        """As the group says."""
        return self.inner.reason(length_bytes)

    def on_waiting(self, told: OnWaiting) -> None:
        """Also after a change."""
        self._told = told
        self.inner.on_waiting(told)

    def left_loop(self, error: BaseException | None) -> None:
        """Blocked workers learn of it."""
        self.inner.left_loop(error)

    def close(self) -> None:
        """The group as it is now."""
        self.inner.close()


def _clones(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.detach().clone() for tensor in tensors]


def _length(data: bytes) -> Tensor:
    return torch.tensor(len(data))
