"""The messages between workers and servers, and among servers.

A step of a worker: PUSH for every piece, DONE to every server; when the policy releases it, RELEASE from
the coordinator and, if it gets weights, WEIGHTS for every piece from every server.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any, TypeVar

import msgspec

from echelon.comm.wire.mailbox import MessageHead


class Kind(IntEnum):
    """What a message is."""

    OPEN = 1  # leader to servers: what is kept; payload Opening
    SEED = 2  # leader to servers: a shard's weights
    OPENED = 3  # server to leader: ready, or why not
    PUSH = 4  # worker to server: a piece, at `start` of the shard
    DONE = 5  # worker to server: all pieces of a step were sent; payload Done
    ASK = 6  # worker to coordinator: may I push? payload Done
    INVITE = 7  # coordinator to worker: you may
    RELEASE = 8  # coordinator to worker: go on; flags say how; payload Released
    WEIGHTS = 9  # server to worker: a piece, at `start` of the shard
    JOIN = 10  # worker to coordinator: takes part
    LEAVE = 11  # worker to coordinator: takes no part for now
    NOTED = 12  # coordinator to worker: joined, or left
    PULL = 13  # worker to server: the weights as they are, please; answered by WEIGHTS
    WHO = 14  # worker to coordinator: whom do I wait for?
    AWAITED = 15  # coordinator to worker: those; payload list of ranks
    STATE = 16  # worker to server: the optimizer's state, please
    STATES = 17  # server to worker: that; payload packed
    BYE = 18  # worker to server: no more messages
    HAVE = 19  # server to coordinator: a push is here; `start` is the worker; payload square and dot
    ORDERS = 20  # coordinator to servers: what to do; payload list of orders
    FORWARD = 21  # server to replica: a push, `start` is the worker; payload the shard's elements
    SEEDED = 23  # server to leader: a shard's weights, or states, are here
    FORWARDED = 22  # server to replica: all about it; payload Done


FRESH, ASKING = 1, 2  # flags of a RELEASE
CODED = 1  # flag of a PUSH or of WEIGHTS: written by the codec; the latter are a change then
LOOK = 1  # flag of a PULL: the worker goes on with what it had
RESTING = 1  # flag of a LEAVE: it will join again soon


class Opening(msgspec.Struct, frozen=True, kw_only=True):
    """All that a server needs to know to keep a table of parameters."""

    policy: str
    cluster: dict[str, Any]
    workers: list[int]
    shapes: list[list[int]]
    dtype: str
    spec: dict[str, Any]
    groups: list[int]
    replicas: int = 0
    whole: bool = False
    state: bool = False
    codec: str = "none"


class Done(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker says about a push, or about what it would push."""

    kind: str
    read: int
    samples: float
    compute_s: float
    transfer_s: float
    pull: bool = True
    used: bytes = b""
    settings: list[dict[str, Any]] | None = None


class Released(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker is told when it may go on; `held_s` is how long the policy kept it."""

    version: int
    held_s: float


T = TypeVar("T")
encode = msgspec.msgpack.encode


def decode(payload: memoryview, kind: type[T]) -> T:
    """A payload as what it must be."""
    return msgspec.msgpack.decode(bytes(payload), type=kind)


def head(kind: Kind, table: int = 0, **fields: int) -> MessageHead:
    """A message's head."""
    return MessageHead(kind, table, **fields)
