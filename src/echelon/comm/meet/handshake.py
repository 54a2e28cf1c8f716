"""The handshake: a connecting peer proves that it knows the run's secret before any other data is accepted.

Both sides send a hello with their rank, the view and a random challenge. Then each side sends an HMAC over
both hellos and its role. The dialling side sends its proof first, and the answering side replies only if
that proof is right, so an outsider learns nothing. Comparison takes constant time. A recorded handshake
cannot be replayed, because challenges differ; a reflected one fails, because roles differ.

`conversation` is the protocol without a socket; `greet` runs it over a socket.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import socket
import struct
import time
from collections.abc import Generator
from dataclasses import dataclass

from echelon.errors import WorkerError

_HELLO = struct.Struct("<4s16sI32s")
_MAGIC = b"ECHH"
_PROOF_BYTES = 32
_NO_PROOF = bytes(_PROOF_BYTES)


class Refused(WorkerError):
    """A peer could not prove that it belongs to this run."""


class HungUp(Refused):
    """A peer closed the connection, or timed out, during the handshake."""


@dataclass(frozen=True, slots=True)
class HandshakeStep:
    """Bytes to send, and the number of bytes to receive before the next step."""

    say: bytes
    awaits: int


def conversation(
    *, view: bytes, rank: int, secret: bytes, dialled: bool
) -> Generator[HandshakeStep, bytes, int]:
    """Prove this worker's membership and check the peer's; returns the peer's rank."""
    mine = _HELLO.pack(_MAGIC, view, rank, os.urandom(32))
    if dialled:
        theirs = yield HandshakeStep(mine, _HELLO.size)
        their_rank = _rank_of(theirs, view)
        proof = yield HandshakeStep(_proof(secret, b"dialled", mine + theirs), _PROOF_BYTES)
        if not hmac.compare_digest(proof, _proof(secret, b"answered", mine + theirs)):
            raise _no_secret(their_rank)
        return their_rank
    theirs = yield HandshakeStep(b"", _HELLO.size)
    their_rank = _rank_of(theirs, view)
    proof = yield HandshakeStep(mine, _PROOF_BYTES)
    if not hmac.compare_digest(proof, _proof(secret, b"dialled", theirs + mine)):
        yield HandshakeStep(_NO_PROOF, 0)  # so that the peer learns the reason too
        raise _no_secret(their_rank)
    yield HandshakeStep(_proof(secret, b"answered", theirs + mine), 0)
    return their_rank


def greet(
    connection: socket.socket, *, view: bytes, rank: int, secret: bytes, dialled: bool, timeout_s: float
) -> int:
    """Run the handshake over a socket within `timeout_s` in total; returns the peer's rank."""
    deadline = time.monotonic() + timeout_s
    talk = conversation(view=view, rank=rank, secret=secret, dialled=dialled)
    try:
        step = next(talk)
        while True:
            connection.settimeout(max(0.001, deadline - time.monotonic()))
            connection.sendall(step.say)
            step = talk.send(_exactly(connection, step.awaits, deadline))
    except StopIteration as end:
        return int(end.value)
    except OSError as error:
        raise HungUp(f"a peer closed the connection during the handshake: {error}") from error


def _rank_of(hello: bytes, view: bytes) -> int:
    magic, their_view, rank, _ = _HELLO.unpack(hello)
    if magic != _MAGIC or their_view != view:
        raise Refused("rejected a connection: wrong run id, or not an Echelon worker")
    return int(rank)


def _no_secret(rank: int) -> Refused:
    return Refused(
        f"a peer that says it is rank {rank} does not know the run's secret",
        ranks=(rank,),
        fix="set ECHELON_SECRET to the same text on all workers, or on none",
    )


def _proof(secret: bytes, role: bytes, hellos: bytes) -> bytes:
    return hmac.digest(secret, role + hellos, hashlib.sha256)


def _exactly(connection: socket.socket, count: int, deadline: float) -> bytes:
    data = b""
    while len(data) < count:
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        part = connection.recv(count - len(data))
        if not part:
            raise HungUp("a peer closed the connection during the handshake")
        data += part
    return data
