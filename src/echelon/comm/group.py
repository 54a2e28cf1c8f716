"""The contract of a group of workers.

Training sees a Group and nothing else of comm/. All members call the same operations in the same order;
`fork` gives a second order that is independent of the first. Every member ends with identical bits.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from echelon.comm.future import Future
from echelon.comm.wire import frames
from echelon.errors import ConfigError, Corrupt

if TYPE_CHECKING:
    from echelon.comm.changing import GroupChanges
    from echelon.comm.meet.links import Links
    from echelon.comm.wire.mailbox import M, Mailbox, PlacePayload
    from echelon.comm.wire.watch import OnWaiting

Op = Literal["sum", "max", "min"]
_CHECKSUM = (1 << 63) - 1  # the bits of a checksum that an int64 holds


class CallsDiffer(Exception):
    """Members gave different numbers to `agree` or `announce`; all of them raise it. `calls`: by rank."""

    def __init__(self, calls: Sequence[int]) -> None:
        super().__init__("members make different calls")
        self.calls = tuple(calls)


@dataclass(frozen=True, slots=True)
class Messages:
    """An all-to-all in flight: `received` gives the messages of all members, by rank.

    Do not change an outgoing message before `delivered` is done: it may have to be sent again. `sent_bytes`
    is what this member sends to others, each message counted once.
    """

    received: Future[list[Tensor]]
    delivered: Future[Any]
    sent_bytes: int = 0


class Group(ABC):
    """Workers that reduce together. Copying a module that holds a group does not copy the group."""

    rank: int
    size: int
    names: Mapping[int, str]  # how errors call workers and servers, by rank in the view
    deadline_s = math.inf  # how long members wait for each other
    own_transport = False  # whether it offers subgroups, mailboxes and shared memory
    servers: tuple[int, ...] = ()  # the ranks of the servers in the view
    near_servers: tuple[int, ...] = ()  # those that this member can share memory with
    machines = 1  # how many machines the members are on

    @property
    def ranks(self) -> tuple[int, ...]:
        """The members' ranks in the view, which numbers all workers and then the servers."""
        return tuple(range(self.size))

    changes: GroupChanges | None = None  # what is done when members are lost; None: operations fail

    @property
    def current(self) -> Group:
        """The group as it is now: itself, unless members may be lost."""
        return self

    @abstractmethod
    def all_reduce(self, tensor: Tensor, op: Op = "sum", *, priority: int = 0) -> Future[Tensor]:
        """Combine a contiguous tensor over all members, in place. Lower priorities go first."""

    def all_reduce_through(self, buffer: Tensor, flat: Tensor, op: Op = "sum") -> Future[Tensor]:
        """Combine a flat tensor in place by way of one of this group's buffers, of its length and type."""
        buffer.copy_(flat)
        return self.all_reduce(buffer, op).then(flat.copy_)

    @abstractmethod
    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """The tensors of all members, by rank; all have the same shape and type."""

    @abstractmethod
    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        """Copy the source's values into the contiguous tensors of all members."""

    def all_gather_unequal(
        self, buffer: Tensor, lengths: Sequence[int], *, priority: int = 0
    ) -> Future[Tensor]:
        """Give all members all blocks of a contiguous buffer, in place.

        Member r has filled block r, which is `lengths[r]` elements long.
        """
        for source, block in enumerate(blocks(buffer, lengths)):
            if block.numel():
                self.broadcast(block, source)
        return Future.completed(buffer)

    def reduce_scatter(self, buffer: Tensor, lengths: Sequence[int], op: Op = "sum") -> Future[Tensor]:
        """Combine a contiguous buffer over all members; member r gets block r, `lengths[r]` elements long.

        The result is that block, in place; the rest of the buffer is undefined afterwards.
        """
        return self.all_reduce(buffer, op).then(lambda all_of: blocks(all_of, lengths)[self.rank])

    def all_to_all(self, outgoing: Sequence[Tensor], *, priority: int = 0) -> Messages:
        """Send member r the message `outgoing[r]`, and receive one from each: flat uint8 tensors.

        Messages may be the same tensor; a member's message to itself is passed through. A damaged message
        is sent again where the group can do so, and never returned: Corrupt names its sender.
        """
        check_messages(outgoing, self.size)
        block, table = _packed(outgoing, self.rank)
        tables = self.all_gather(table)
        lengths = [int((rows[:, 0] + rows[:, 1]).max()) for rows in tables]
        buffer = torch.empty(sum(lengths), dtype=torch.uint8)
        blocks(buffer, lengths)[self.rank].copy_(block)
        self.all_gather_unequal(buffer, lengths, priority=priority).wait()
        parts = []
        for source, theirs in enumerate(blocks(buffer, lengths)):
            start, length, checksum = tables[source][self.rank].tolist()
            parts.append(theirs[start : start + length])
            if source != self.rank and _checksum(parts[-1]) != checksum:
                raise Corrupt(f"rank {source} sent a damaged message", ranks=(source,), where="all_to_all")
        parts[self.rank] = outgoing[self.rank]
        sent_bytes = (self.size - 1) * (block.numel() + table.numel() * table.element_size())
        return Messages(Future.completed(parts), Future.completed(None), sent_bytes)

    def send(self, tensor: Tensor, to: int, tag: int = 0) -> Future[None]:
        """Send a tensor to a member, which receives it; the tensor may change once the future is done.

        Messages between two members with the same tag arrive in the order in which they were sent. They
        have no order with other operations. A tag is 0 or more, and less than 2**31.
        """
        raise self._unsupported("a message to one worker")

    def receive(self, tensor: Tensor, source: int, tag: int = 0) -> Future[Tensor]:
        """Receive a member's next message with this tag into a tensor of the same shape and type."""
        raise self._unsupported("a message from one worker")

    def neighbor_all_gather(self, tensor: Tensor, peers: Sequence[int]) -> list[Tensor]:
        """The tensors of some members, who ask for this member's; all have the same shape and type."""
        gathered = self.all_gather(tensor)
        return [gathered[peer] for peer in peers]

    @abstractmethod
    def fork(self) -> Group:
        """The same members with an independent order of operations."""

    @abstractmethod
    def close(self) -> None:
        """Close connections. Safe to call twice, also after a failure."""

    def buffer(self, length: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Zeros in the memory that this group reduces fastest. All members call this in the same order."""
        return torch.zeros(length, dtype=dtype, device=device)

    def release(self, buffer: Tensor) -> None:
        """Forget a buffer of this group."""
        return

    def sent_bytes(self, tensor: Tensor) -> int:
        """The bytes that this member sends to all-reduce the tensor: 2 (P-1)/P of it."""
        return 2 * (self.size - 1) * tensor.numel() * tensor.element_size() // self.size

    def progress(self) -> None:
        """Do this member's part in reductions that other members may wait for."""
        return

    def measure_links(self) -> Links | None:
        """How fast the links between machines are; None if the group has none or cannot measure them.

        All members call this together. From then on the group reduces in the way that fits its links.
        """
        return None

    def arrange(self, collective: str, groups: Sequence[Sequence[int]] = ()) -> None:
        """Reduce by this collective from now on, this group and its forks.

        `groups` are ranks, neighbours next to each other; a hierarchical collective without sizes takes
        theirs, and weights of `direct` are by rank. All members call this between the same operations.
        """
        return

    def reason(self, length_bytes: int) -> str:
        """Why the group reduces buffers of this length in the way it does."""
        return ""

    # What only groups on Echelon's own transports offer.

    def subgroup(self, members: Sequence[int]) -> Group | None:
        """Some members as a group of their own; None for a member outside it. All members call this."""
        raise self._unsupported("a group of some workers")

    def mailbox(self, accepts: Any, place: PlacePayload[M]) -> Mailbox[M]:
        """Messages to and from the servers; see `Mailbox` for the arguments."""
        raise self._unsupported("a parameter server")

    def shared_memory(self, size_bytes: int) -> Tensor:
        """Bytes that all members map, on one machine. All members call this together."""
        raise self._unsupported("memory that workers share")

    def _unsupported(self, what: str) -> ConfigError:
        return ConfigError(
            f"{what} needs Echelon's own transports, not torch.distributed",
            where="--transport",
            fix="use auto, shm or tcp",
        )

    def on_waiting(self, told: OnWaiting) -> None:
        """Call `told` while this worker waits long for others, every few seconds, in another thread.

        It gets their ranks, the Unix time since when, and what they are doing.
        """
        return

    def left_loop(self, error: BaseException | None) -> None:
        """The script's loop was left by this error, which something else may catch; None: it goes on."""
        return

    # Agreement: all members make the same call.

    def agree(self, call: int) -> None:
        """Wait until all members have called this; all raise CallsDiffer if their numbers differ."""
        told = [int(one) for one in self.all_gather(torch.tensor([call]))]
        if len(set(told)) > 1:
            raise CallsDiffer(told)

    def announce(self, call: int) -> None:
        """The same for an operation that follows at once and is waited for.

        CallsDiffer is raised here or by that operation, which then has changed nothing. `call` is not 0.
        """
        self.agree(call)

    # Made of the above.

    def barrier(self) -> None:
        """Return when every member has called this."""
        self.all_reduce(torch.zeros(1)).wait()

    def all_gather_any(self, tensor: Tensor) -> list[Tensor]:
        """The tensors of all members, by rank: of one type and number of dimensions, but of any shapes."""
        told = self.all_gather(torch.tensor([0, *tensor.shape]))
        shapes = [torch.Size(one[1:].tolist()) for one in told]
        lengths = [shape.numel() for shape in shapes]
        padded = tensor.new_zeros(max(1, *lengths))
        padded[: tensor.numel()] = tensor.detach().reshape(-1)
        parts = self.all_gather(padded)
        return [
            part[:length].clone().view(shape)
            for part, length, shape in zip(parts, lengths, shapes, strict=True)
        ]

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        """The bytes of all members, by rank; lengths may differ."""
        return [bytes(part.numpy()) for part in self.all_gather_any(_as_tensor(data))]

    def broadcast_bytes(self, data: bytes, source: int = 0) -> bytes:
        """The source's bytes, on every member."""
        length = torch.tensor([len(data)])
        self.broadcast(length, source)
        payload = _as_tensor(data) if self.rank == source else torch.empty(int(length), dtype=torch.uint8)
        if int(length):
            self.broadcast(payload, source)
        return bytes(payload.numpy())

    def __deepcopy__(self, memo: dict[int, Any]) -> Group:
        return self


def blocks(buffer: Tensor, lengths: Sequence[int]) -> list[Tensor]:
    """A flat buffer in parts of the given lengths."""
    flat = buffer.view(-1)
    return [flat[start:stop] for start, stop in pairwise(accumulate(lengths, initial=0))]


def check_messages(outgoing: Sequence[Tensor], size: int) -> None:
    """Raise ConfigError for messages that `all_to_all` cannot send."""
    if len(outgoing) != size:
        raise ConfigError(
            f"{len(outgoing)} messages for {size} members",
            where="all_to_all",
            fix="give one for each member",
        )
    for rank, message in enumerate(outgoing):
        if message.dtype != torch.uint8 or message.dim() != 1 or message.device.type != "cpu":
            kind = str(message.dtype).removeprefix("torch.")
            raise ConfigError(
                f"the message for rank {rank} is of shape {list(message.shape)} and type {kind} "
                f"on {message.device}",
                where="all_to_all",
                fix="give flat uint8 tensors on the CPU",
            )


def _packed(outgoing: Sequence[Tensor], own: int) -> tuple[Tensor, Tensor]:
    """The messages concatenated, equal tensors once; and start, length and checksum of each."""
    rows: dict[tuple[int, int, int], list[int]] = {}
    found: list[Tensor] = []
    table = torch.zeros(len(outgoing), 3, dtype=torch.int64)
    at = 0
    for rank, message in enumerate(outgoing):
        if rank == own:
            continue
        memory = message.data_ptr(), message.numel(), message.stride(0)
        if memory not in rows:
            rows[memory] = [at, message.numel(), _checksum(message)]
            found.append(message)
            at += message.numel()
        table[rank] = torch.tensor(rows[memory])
    return torch.cat(found) if found else torch.empty(0, dtype=torch.uint8), table


def _checksum(message: Tensor) -> int:
    raw: npt.NDArray[np.uint8] = message.contiguous().numpy()
    return frames.checksum(raw.data) & _CHECKSUM


def _as_tensor(data: bytes) -> Tensor:
    return (
        torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    )
