"""With what does a worker prove that it belongs to a view, and what does a proved connection have?"""

from __future__ import annotations

import hashlib
import socket
import ssl
from collections.abc import Generator
from dataclasses import dataclass
from typing import NamedTuple

from echelon.comm.meet.handshake import HandshakeStep, Proven, conversation
from echelon.comm.meet.tls import Contexts
from echelon.comm.wire.seals import Keys


class Link(NamedTuple):
    """A connection to a peer that has proved itself, and its keys; without keys, checksums are enough."""

    sock: socket.socket
    keys: Keys | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """What a worker uses to prove its membership. `authenticated`: whether frames are to be."""

    view: bytes
    secret: bytes
    rank: int
    contexts: Contexts | None = None
    authenticated: bool = True

    def __repr__(self) -> str:
        return f"Credentials(rank={self.rank}, ...)"  # no secret in logs

    def talk(self, sock: socket.socket, *, dialled: bool) -> Generator[HandshakeStep, bytes, Proven]:
        """This worker's side of a handshake on this socket."""
        return conversation(
            view=self.view,
            rank=self.rank,
            secret=self.secret,
            dialled=dialled,
            authenticated=self.authenticated,
            channel=lambda: self._certificates(sock, dialled=dialled),
        )

    def _certificates(self, sock: socket.socket, *, dialled: bool) -> bytes:
        """Both certificates' hashes, that of the dialling side first."""
        if self.contexts is None or not isinstance(sock, ssl.SSLSocket):
            return b""
        theirs = hashlib.sha256(sock.getpeercert(binary_form=True) or b"").digest()
        mine = hashlib.sha256(self.contexts.certificate).digest()
        return mine + theirs if dialled else theirs + mine

    def link(self, sock: socket.socket, proven: Proven) -> Link:
        """The connection with its keys, if it needs them: TLS authenticates, too."""
        return Link(sock, proven.keys if self.authenticated and self.contexts is None else None)
