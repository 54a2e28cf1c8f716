"""The handshake: a connecting peer proves that it knows the run's secret before any other data is accepted.

Both sides send a hello with their rank, the view, whether frames are to be authenticated, and a random
challenge. Then each side sends an HMAC over both hellos and its role. The dialling side sends its proof
first, and the answering side replies only if that proof is right, so an outsider learns nothing. Comparison
takes constant time. A recorded handshake cannot be replayed, because challenges differ; a reflected one
fails, because roles differ; one with changed hellos fails, because proofs do. Inside TLS, proofs are about
both certificates, too: who has another certificate and passes on what two workers say gets no proof right.

From the secret and both hellos, both sides derive the keys of this connection (HKDF), one for each
direction, with which everything that follows is authenticated (`wire/seals.py`).

`conversation` is the protocol without a socket; `greet` runs it over a socket.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import socket
import struct
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass

from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from echelon.comm.wire.seals import KEY_BYTES, Keys
from echelon.errors import WorkerError

_HELLO = struct.Struct("<4s16sI?32s")
_MAGIC = b"ECHI"
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Proven:
    """A peer that has proved that it knows the secret, and the connection's keys."""

    rank: int
    keys: Keys


def conversation(
    *,
    view: bytes,
    rank: int,
    secret: bytes,
    dialled: bool,
    authenticated: bool = True,
    channel: Callable[[], bytes] = bytes,
) -> Generator[HandshakeStep, bytes, Proven]:
    """Prove this worker's membership and check the peer's.

    `channel` says what both ends of the encryption below know of it, once that is there: proofs hold for it
    only.
    """
    mine = _HELLO.pack(_MAGIC, view, rank, authenticated, os.urandom(32))
    if dialled:
        theirs = yield HandshakeStep(mine, _HELLO.size)
        their_rank = _rank_of(theirs, view)
        _check_integrity(theirs, authenticated)
        both = mine + theirs + channel()
        proof = yield HandshakeStep(_proof(secret, b"dialled", both), _PROOF_BYTES)
        if not hmac.compare_digest(proof, _proof(secret, b"answered", both)):
            raise _no_secret(their_rank)
        return Proven(rank=their_rank, keys=_keys(secret, both, dialled=True))
    theirs = yield HandshakeStep(b"", _HELLO.size)
    their_rank = _rank_of(theirs, view)
    if _HELLO.unpack(theirs)[3] != authenticated:
        yield HandshakeStep(mine, 0)  # so that the peer learns the reason too
        _check_integrity(theirs, authenticated)
    proof = yield HandshakeStep(mine, _PROOF_BYTES)
    both = theirs + mine + channel()
    if not hmac.compare_digest(proof, _proof(secret, b"dialled", both)):
        yield HandshakeStep(_NO_PROOF, 0)  # so that the peer learns the reason too
        raise _no_secret(their_rank)
    yield HandshakeStep(_proof(secret, b"answered", both), 0)
    return Proven(rank=their_rank, keys=_keys(secret, both, dialled=False))


def greet(
    connection: socket.socket, talk: Generator[HandshakeStep, bytes, Proven], *, timeout_s: float
) -> Proven:
    """Run the handshake over a socket within `timeout_s` in total."""
    deadline = time.monotonic() + timeout_s
    try:
        step = next(talk)
        while True:
            connection.settimeout(max(0.001, deadline - time.monotonic()))
            connection.sendall(step.say)
            step = talk.send(_exactly(connection, step.awaits, deadline))
    except StopIteration as end:
        proven: Proven = end.value
        return proven
    except OSError as error:
        raise HungUp(f"a peer closed the connection during the handshake: {error}") from error


def _rank_of(hello: bytes, view: bytes) -> int:
    magic, their_view, rank, _, _ = _HELLO.unpack(hello)
    if magic != _MAGIC or their_view != view:
        raise Refused("rejected a connection: wrong run id, or not an Echelon worker")
    return int(rank)


def _check_integrity(hello: bytes, authenticated: bool) -> None:
    """Refuse a peer that was started with another --integrity."""
    _, _, rank, theirs, _ = _HELLO.unpack(hello)
    if theirs != authenticated:
        words = {True: "authenticated", False: "checksum"}
        raise Refused(
            f"a peer that says it is rank {rank} was started with --integrity {words[theirs]}, this worker "
            f"with --integrity {words[authenticated]}",
            ranks=(rank,),
            fix="give all workers the same --integrity",
        )


def _keys(secret: bytes, hellos: bytes, *, dialled: bool) -> Keys:
    """The keys of one connection: challenges of both sides are in the hellos, so they are new each time."""
    salt = hashlib.sha256(hellos).digest()
    derive = HKDF(hashes.SHA256(), 2 * KEY_BYTES, salt, b"echelon: keys of a connection")
    both = derive.derive(secret)
    there, back = both[:KEY_BYTES], both[KEY_BYTES:]
    return Keys(sending=there, receiving=back) if dialled else Keys(sending=back, receiving=there)


def _no_secret(rank: int) -> Refused:
    return Refused(
        f"a peer that says it is rank {rank} does not know the run's secret",
        ranks=(rank,),
        fix="give all workers the same secret: ECHELON_SECRET, or the file that ECHELON_SECRET_FILE names",
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
