"""A joining peer proves that it knows the run's secret before anything it says is believed.

Both sides send a random challenge, and answer the other's with an HMAC over it, their role, their rank and
the view; comparison takes constant time. A recorded handshake is worthless, since challenges differ.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import socket
import struct

from echelon.errors import WorkerError

_HELLO = struct.Struct("<4s16sI32s")
_MAGIC = b"ECHH"
_PROOF_BYTES = 32


class Refused(WorkerError):
    """A peer could not prove that it belongs to this run."""


def greet(connection: socket.socket, *, view: bytes, rank: int, secret: bytes, dialled: bool) -> int:
    """Prove who we are and have the peer prove who it is; returns its rank. The socket has a timeout."""
    mine = os.urandom(32)
    connection.sendall(_HELLO.pack(_MAGIC, view, rank, mine))
    magic, their_view, their_rank, theirs = _HELLO.unpack(_exactly(connection, _HELLO.size))
    if magic != _MAGIC or their_view != view:
        raise Refused("a stranger knocked: it is of another run, or no worker at all")
    connection.sendall(_proof(secret, theirs, view, rank, dialled))
    proof = _exactly(connection, _PROOF_BYTES)
    if not hmac.compare_digest(proof, _proof(secret, mine, view, their_rank, not dialled)):
        raise Refused(f"a peer that says it is rank {their_rank} does not know the run's secret")
    return int(their_rank)


def _proof(secret: bytes, challenge: bytes, view: bytes, rank: int, dialled: bool) -> bytes:
    text = b"dialled" if dialled else b"answered"
    return hmac.digest(secret, challenge + view + struct.pack("<I", rank) + text, hashlib.sha256)


def _exactly(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        part = connection.recv(count - len(data))
        if not part:
            raise Refused("a peer hung up during the handshake")
        data += part
    return data
