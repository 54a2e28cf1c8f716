"""The messages between workers and parameter servers, and among servers: one class per message.

A worker's step: PushPiece for every piece, PushDone to every server. When the policy releases the worker,
the coordinator (the first server) sends Released; if the worker gets weights, every server sends it a
WeightsPiece per piece. A worker and a server that share memory send no pieces: a step is PushDone and
Released, and with other servers than the first PushDone and WeightsWritten.

A message is a header, which is one of these classes in MessagePack, and for some classes a payload of raw
bytes (see comm/wire/mailbox.py). Headers are decoded strictly: a tag, a field or a type that is not listed
here is an error that names the sender. `table` numbers the optimizer that a message is about, `shard` the
part of its parameters, `step` the arrivals of a worker at the servers; `start` counts elements of a shard.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from echelon.errors import Corrupt
from echelon.sync.families.serve import Apply, Drop, Invite, Kind
from echelon.sync.policy import ClusterInfo

Index = Annotated[int, msgspec.Meta(ge=0)]
Rank = Annotated[int, msgspec.Meta(ge=0)]
Options = dict[str, bool | int | float | str | list[Any] | None]


class PushInfo(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a worker says about a push, or about the push that it asks for.

    `read` is the version of the weights that it was computed on; `samples` weighs it; `wants_weights` asks
    for weights in return. `used` says which of the shard's parameters have a gradient; `settings` are the
    options of the worker's optimizer, by parameter group.
    """

    kind: Kind
    read: Index
    samples: float
    compute_s: float
    transfer_s: float
    wants_weights: bool = True
    used: list[bool] = []
    settings: list[Options] | None = None


class Freed(msgspec.Struct, frozen=True, tag="release"):
    """Order: let a worker go on, with weights if `pull`; with `ask` it must ask before its next push."""

    worker: Rank
    pull: bool
    ask: bool
    version: Index
    held_s: float


class HandOut(msgspec.Struct, frozen=True, tag="hand-out"):
    """Order: send a worker the current weights; with `look` it returns to its own weights afterwards."""

    worker: Rank
    look: bool = False


class SharedMemory(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a process of the same machine finds memory: of which process, and its file descriptor, inode and
    device. `secret` is in its first 8 bytes, or it is other memory.
    """

    pid: Index
    handle: tuple[int, int, int]
    size_bytes: Index
    secret: int


Order = Apply | Drop | Freed | HandOut | Invite


class ServerMessage(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="type", forbid_unknown_fields=True
):
    """Base of all messages."""


# From a worker to servers --------------------------------------------------------------------------


class OpenTable(ServerMessage, frozen=True, kw_only=True, tag="open-table"):
    """The leader tells every server what it keeps; answered by TableOpened.

    `workers` are ranks in the policy's order; `groups` is the parameter group of each parameter. With
    `whole` no parameter is split between servers.
    """

    table: Index
    policy: str
    cluster: ClusterInfo
    workers: list[Rank]
    shapes: list[list[Index]]
    dtype: str
    optimizer: dict[str, Any]
    groups: list[Index]
    replicas: Index = 0
    whole: bool = False
    codec: str = "none"


class OpenMemory(ServerMessage, frozen=True, kw_only=True, tag="open-memory"):
    """A worker offers a server of its machine memory for messages (mail.py); answered by MemoryOpened.

    Ring number `place` is for the server.
    """

    memory: SharedMemory
    place: Index


class ShareShard(ServerMessage, frozen=True, kw_only=True, tag="share-shard"):
    """A worker offers a server memory for pushes and weights (shared_table.py); answered by ShardShared."""

    table: Index
    shard: Index
    memory: SharedMemory


class SeedWeights(ServerMessage, frozen=True, kw_only=True, tag="seed-weights"):
    """The leader sends a shard's first weights (payload) to its servers; answered by Seeded."""

    table: Index
    shard: Index


class SeedState(ServerMessage, frozen=True, kw_only=True, tag="seed-state"):
    """The leader sends a shard's optimizer state (payload) to its servers; answered by Seeded."""

    table: Index
    shard: Index


class PushPiece(ServerMessage, frozen=True, kw_only=True, tag="push-piece"):
    """A worker sends a piece of a push (payload) to its shard's server; `coded` by the codec."""

    table: Index
    shard: Index
    step: Index
    start: Index
    coded: bool = False


class PushDone(ServerMessage, frozen=True, kw_only=True, tag="push-done"):
    """A worker tells a shard's server that it has sent all pieces of a push.

    With `shared` all of it is in the memory that they share, and no pieces were sent.
    """

    table: Index
    shard: Index
    step: Index
    info: PushInfo
    shared: bool = False


class AskToPush(ServerMessage, frozen=True, kw_only=True, tag="ask-to-push"):
    """A worker asks the coordinator whether to push; answered by Invited or Released."""

    table: Index
    step: Index
    info: PushInfo


class JoinTable(ServerMessage, frozen=True, kw_only=True, tag="join-table"):
    """A worker tells the coordinator that it takes part again; answered by MembershipNoted."""

    table: Index


class LeaveTable(ServerMessage, frozen=True, kw_only=True, tag="leave-table"):
    """A worker tells the coordinator that it takes no part for now; `resting`: it joins again soon."""

    table: Index
    resting: bool = False


class PullWeights(ServerMessage, frozen=True, kw_only=True, tag="pull-weights"):
    """A worker asks the coordinator for the current weights; all servers answer by WeightsPiece.

    With `look` the worker returns to its own weights afterwards.
    """

    table: Index
    look: bool = False


class AskAwaited(ServerMessage, frozen=True, kw_only=True, tag="ask-awaited"):
    """A worker asks the coordinator which workers it waits for; answered by AwaitedWorkers."""

    table: Index


class FetchState(ServerMessage, frozen=True, kw_only=True, tag="fetch-state"):
    """A worker asks a server for its optimizer's state; answered by FetchedState."""

    table: Index


class Bye(ServerMessage, frozen=True, kw_only=True, tag="bye"):
    """A worker tells every server, or a server every other server, that it sends no more messages."""


# From a server to a worker -------------------------------------------------------------------------


class TableOpened(ServerMessage, frozen=True, kw_only=True, tag="table-opened"):
    """A server tells the leader that a table is open, or why it cannot be (`problem`)."""

    table: Index
    problem: str = ""


class Seeded(ServerMessage, frozen=True, kw_only=True, tag="seeded"):
    """A server tells the leader that a shard's weights or state have arrived."""

    table: Index


class MemoryOpened(ServerMessage, frozen=True, kw_only=True, tag="memory-opened"):
    """A server's memory for messages, whose ring number `place` is for the worker; None if it has none."""

    memory: SharedMemory | None = None
    place: Index = 0


class ShardShared(ServerMessage, frozen=True, kw_only=True, tag="shard-shared"):
    """A server tells a worker whether it has mapped the memory for a shard."""

    table: Index
    mapped: bool


class Invited(ServerMessage, frozen=True, kw_only=True, tag="invited"):
    """The coordinator tells a worker that asked to push now."""

    table: Index


class Released(ServerMessage, frozen=True, kw_only=True, tag="released"):
    """The coordinator lets a worker go on.

    With `fresh` it gets weights of `version` from all servers, otherwise it goes on with its own. With
    `ask` it must ask before its next push. `held_s` is how long the policy held it. With `written` the
    weights of the coordinator's shard are in the memory that they share.
    """

    table: Index
    fresh: bool
    ask: bool
    version: Index
    held_s: float
    written: bool = False


class WeightsWritten(ServerMessage, frozen=True, kw_only=True, tag="weights-written"):
    """A server tells a worker that its shard's weights are in the memory that they share."""

    table: Index
    shard: Index
    version: Index


class WeightsPiece(ServerMessage, frozen=True, kw_only=True, tag="weights-piece"):
    """A server sends a worker a piece of the weights (payload); `coded`: a change written by the codec."""

    table: Index
    shard: Index
    start: Index
    version: Index
    coded: bool = False


class MembershipNoted(ServerMessage, frozen=True, kw_only=True, tag="membership-noted"):
    """The coordinator confirms to a worker that it has joined or left."""

    table: Index


class AwaitedWorkers(ServerMessage, frozen=True, kw_only=True, tag="awaited-workers"):
    """The coordinator tells a worker which ranks it waits for."""

    table: Index
    ranks: list[Rank]


class FetchedState(ServerMessage, frozen=True, kw_only=True, tag="fetched-state"):
    """A server sends a worker the optimizer's state of its own shard (payload)."""

    table: Index


# Between servers -----------------------------------------------------------------------------------


class PushHeld(ServerMessage, frozen=True, kw_only=True, tag="push-held"):
    """A server tells the coordinator that it holds its part of a worker's push; norms as in Arrival."""

    table: Index
    worker: Rank
    step: Index
    square: float
    dot: float


class CarryOut(ServerMessage, frozen=True, kw_only=True, tag="carry-out"):
    """The coordinator tells every other server what to do, in this order."""

    table: Index
    orders: list[Order]


class ForwardPiece(ServerMessage, frozen=True, kw_only=True, tag="forward-piece"):
    """A server sends its shard of a worker's push (payload) to a replica; ForwardDone follows."""

    table: Index
    shard: Index
    worker: Rank
    step: Index


class ForwardDone(ServerMessage, frozen=True, kw_only=True, tag="forward-done"):
    """A server tells a replica that it has sent all of a worker's push."""

    table: Index
    shard: Index
    worker: Rank
    step: Index
    info: PushInfo


ToServer = (
    OpenTable
    | OpenMemory
    | ShareShard
    | SeedWeights
    | SeedState
    | PushPiece
    | PushDone
    | AskToPush
    | JoinTable
    | LeaveTable
    | PullWeights
    | AskAwaited
    | FetchState
    | Bye
    | PushHeld
    | CarryOut
    | ForwardPiece
    | ForwardDone
)
ToWorker = (
    TableOpened
    | MemoryOpened
    | ShardShared
    | Seeded
    | Invited
    | Released
    | WeightsWritten
    | WeightsPiece
    | MembershipNoted
    | AwaitedWorkers
    | FetchedState
)


def refused(peer: int | str, message: ServerMessage, why: str) -> Corrupt:
    """The error for a message that is well formed, but makes no sense here."""
    sender = f"rank {peer}" if isinstance(peer, int) else peer
    return Corrupt(
        f"{sender} sent a message {type(message).__name__} that cannot be used: {why}",
        ranks=(peer,) if isinstance(peer, int) else (),
        where="parameter server",
        fix="all workers and servers must run the same version of Echelon",
    )
