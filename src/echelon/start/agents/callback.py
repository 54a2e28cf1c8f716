"""How does an agent that an engine has started find its launcher? It is invited, and calls back.

The launcher listens, and hands an invitation to its engine: addresses, port and a token. The engine's own
way of starting processes carries it there, never a command line. Both sides prove that they know the token,
and derive the connection's keys from it (the handshake of workers).

    Reception    the launcher's side: waits for agents, and says what it waits for
    call_back    the agent's side
    host_agent   what an engine's task does: runs the agent as a child, until it ends
"""

from __future__ import annotations

import base64
import contextlib
import logging
import os
import secrets
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from typing import IO, Protocol

import msgspec

from echelon.cluster.interfaces import interfaces
from echelon.cluster.machine import network_key
from echelon.comm.meet.handshake import Proven, Refused, conversation, greet
from echelon.comm.meet.strangers import Strangers
from echelon.errors import LaunchError
from echelon.start.agents.channel import Channel
from echelon.start.agents.orphan import ending_with_this

_log = logging.getLogger(__name__)
INVITATION_VARIABLE = "ECHELON_INVITATION"
_VIEW = b"echelon agents 1"
_NONCE_BYTES = 32
_KEY_BYTES = 32
_TRY_S = 3.0
_GREET_S = 5.0
_POLL_S = 0.05
_TELL_AFTER_S = 3.0
_TELL_EVERY_S = 5.0
_MOST_TEXT = 2000


class Invitation(msgspec.Struct, frozen=True, kw_only=True):
    """Where an agent finds its launcher, and what it has to know.

    `env` are variables for the agent and its workers, such as the run's secret. `order` is the number of
    the agent's slot; where all agents get one text, `order_from` names the engine's variable for it.
    """

    addresses: list[str]
    port: int
    token: bytes
    network: str
    timeout_s: float
    env: dict[str, str] = {}
    order: int = 0
    order_from: str = ""

    def encode(self) -> str:
        """As text, for an environment variable or an engine's message."""
        return base64.b64encode(msgspec.msgpack.encode(self)).decode()

    @classmethod
    def decode(cls, text: str) -> Invitation:
        """From text."""
        return msgspec.msgpack.decode(base64.b64decode(text), type=cls)

    def order_in(self, env: Mapping[str, str]) -> int:
        """The number of the agent's slot."""
        return int(env.get(self.order_from) or self.order) if self.order_from else self.order


class EngineJob(Protocol):
    """What an engine runs for a launcher: a task for each agent."""

    def waiting_for(self) -> str:
        """What it waits for, such as free slots; empty if it does not know."""

    def why_ended(self) -> str | None:
        """Why it has ended; None while it runs."""

    def end(self) -> None:
        """End it and all its processes; safe to call twice."""


class Reception:
    """A port at which agents call, for those that know the token."""

    def __init__(self, timeout_s: float, env: Mapping[str, str]) -> None:
        self._token = secrets.token_bytes(_KEY_BYTES)
        self._timeout_s = timeout_s
        self._env = dict(env)
        self._listener = socket.create_server(("", 0), backlog=256)
        self._listener.setblocking(False)
        self._ready = selectors.DefaultSelector()
        self._ready.register(self._listener, selectors.EVENT_READ)
        self._arrived: list[Channel] = []
        self._rejected = 0
        self._strangers = Strangers(
            self._ready,
            talk=lambda sock: conversation(view=_VIEW, rank=0, secret=self._token, dialled=False),
            proven=self._admit,
            rejected=self._reject,
        )

    def invitation(self, *, order: int = 0, order_from: str = "") -> Invitation:
        """The invitation of one agent, or of all."""
        addresses = [one.address for one in interfaces() if one.up and not one.loopback]
        return Invitation(
            addresses=addresses,
            port=int(self._listener.getsockname()[1]),
            token=self._token,
            network=network_key(),
            timeout_s=self._timeout_s,
            env=self._env,
            order=order,
            order_from=order_from,
        )

    def receive(self, count: int, job: EngineJob, engine: str) -> list[Channel]:
        """Wait until so many agents have called; a long wait is told."""
        channels: list[Channel] = []
        until = time.monotonic() + self._timeout_s
        tell_at, told = time.monotonic() + _TELL_AFTER_S, ""
        try:
            while len(channels) < count:
                ended = job.why_ended()
                if ended is not None:
                    raise LaunchError(
                        f"{engine} ended before {_these(count, len(channels))}: {ended}",
                        where=f"--on {engine}",
                    )
                if time.monotonic() > until:
                    raise self._too_late(count, len(channels), job, engine)
                if time.monotonic() > tell_at:
                    told = self._tell(_these(count, len(channels)), job, engine, told)
                    tell_at = time.monotonic() + _TELL_EVERY_S
                channels += self.accept(most=count - len(channels))
        except BaseException:
            for channel in channels:
                channel.close()
            raise
        return channels

    def close(self) -> None:
        """Accept no more calls; safe to call twice."""
        if self._listener.fileno() < 0:
            return
        self._strangers.close()
        self._ready.close()
        self._listener.close()
        for channel in self._arrived:
            channel.close()
        if self._rejected > 1:
            _log.warning("rejected %d connections that are not from this run's agents", self._rejected)

    @property
    def token(self) -> bytes:
        """What callers have to know."""
        return self._token

    def accept(self, *, most: int) -> list[Channel]:
        """Those that have proved themselves by now. Handshakes go on side by side: none delays another."""
        for key, _ in self._ready.select(_POLL_S):
            if key.fd == self._listener.fileno():
                self._strangers.accept(self._listener)
            else:
                self._strangers.hears(key.fd)
        self._strangers.tick()
        found, self._arrived = self._arrived[:most], self._arrived[most:]
        return found

    def _admit(self, sock: socket.socket, proven: Proven) -> None:
        self._arrived.append(_channel(sock, proven, peer="an agent"))

    def _reject(self, refusal: Refused | None, address: str) -> None:
        """A stranger, or an agent of another run: named once, and then counted."""
        self._rejected += 1
        if self._rejected == 1:
            why = refusal.message if refusal is not None else "it did not say in time who it is"
            _log.warning("rejected a connection from %s: %s; further ones are only counted", address, why)

    def _tell(self, what: str, job: EngineJob, engine: str, told: str) -> str:
        """Log what the run waits for, if that is news. Returns what is known by then."""
        waits = job.waiting_for() or what
        if waits != told:
            _log.warning("waiting for %s, at most %g s: %s", engine, self._timeout_s, waits)
        return waits

    def _too_late(self, count: int, there: int, job: EngineJob, engine: str) -> LaunchError:
        waits = job.waiting_for()
        return LaunchError(
            f"{engine} has not started {_these(count, there)} within {self._timeout_s:g} s"
            + (f": {waits}" if waits else ""),
            where=f"--on {engine}",
            fix="ask for fewer workers, wait for free slots, or allow more time with --join-timeout-s; "
            f"the machines must also reach this one at port {self._listener.getsockname()[1]} "
            f"of {', '.join(self.invitation().addresses) or 'loopback'}",
        )


def _these(count: int, there: int) -> str:
    missing = count - there
    return f"{missing} of {count} agents" if there else f"its {count} agent{'s' if count > 1 else ''}"


def call_back(invitation: Invitation) -> Channel:
    """Connect to the launcher at the first of its addresses that answers."""
    here = invitation.network == network_key() != ""
    addresses = ["127.0.0.1"] if here else [*invitation.addresses, "127.0.0.1"]
    until = time.monotonic() + invitation.timeout_s
    problems: dict[str, str] = {}
    while time.monotonic() < until:
        for address in addresses:
            try:
                connection = socket.create_connection((address, invitation.port), timeout=_TRY_S)
                return secured(connection, invitation.token)
            except (OSError, Refused) as error:
                problems[address] = str(error)
        time.sleep(_POLL_S)
    tried = "; ".join(f"{address}: {problem}" for address, problem in problems.items())
    raise LaunchError(
        f"the launcher cannot be reached at port {invitation.port} ({tried})",
        where=socket.gethostname(),
        fix="allow connections from the workers' machines to the machine that starts the run",
    )


def secured(connection: socket.socket, token: bytes) -> Channel:
    """Prove the token to the launcher, derive keys, and make a channel of the connection."""
    try:
        talk = conversation(view=_VIEW, rank=0, secret=token, dialled=True)
        return _channel(connection, greet(connection, talk, timeout_s=_GREET_S), peer="the launcher")
    except BaseException:
        connection.close()
        raise


def _channel(connection: socket.socket, proven: Proven, *, peer: str) -> Channel:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    fd = connection.detach()
    return Channel(fd, fd, peer=peer, keys=proven.keys)


def host_agent(text: str, errors: IO[bytes] | None = None) -> int:
    """Run an agent for the invitation, as a child that ends with this process; returns its exit code.

    An engine's task calls this, and blocks until the run has ended. The parent-death signal is tied to the
    thread that starts the child, which is this one. It is one that the agent can handle: it ends its
    workers and removes its folder. `errors` takes what the agent prints.
    """
    child = subprocess.Popen(
        ending_with_this([sys.executable, "-m", "echelon.start.agents.agent"]),
        env={**os.environ, INVITATION_VARIABLE: text},
        stdin=subprocess.DEVNULL,
        stderr=errors,
    )
    try:
        return child.wait()
    finally:
        if child.poll() is None:
            child.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(_GREET_S)
            child.kill()
            child.wait()


def host_and_tell(text: str) -> str:
    """Run an agent as `host_agent` does; returns what went wrong, empty if nothing did."""
    with tempfile.TemporaryFile() as errors:
        code = host_agent(text, errors)
        if code == 0:
            return ""
        errors.seek(0)
        said = errors.read()[-_MOST_TEXT:].decode(errors="replace").strip()
        return said or f"the agent's process ended with exit code {code}"
