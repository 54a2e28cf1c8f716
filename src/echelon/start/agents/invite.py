"""How do workers of a further machine join a running run? With a token, its agent calls the launcher.

`Invitations` is the launcher's side. It listens from the first invitation on; a token is good for a limited
time. Who calls proves that it knows the token, as agents of engines do (callback.py), says who it is, and
is let in or refused. `call_run` is the side of the machine that joins.
"""

from __future__ import annotations

import base64
import binascii
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import msgspec

from echelon.comm.meet.handshake import HungUp, Refused
from echelon.config.units import show_seconds
from echelon.errors import LaunchError, WorkerError
from echelon.start.agents.callback import Reception, secured
from echelon.start.agents.channel import Channel
from echelon.start.agents.driver import ConnectedAgent, versions
from echelon.start.agents.protocol import Introduction, JoinRequest, Refusal

_INTRODUCED_S = 15.0
_CONNECT_S = 10.0
_POLL_S = 0.2
_AT_ONCE = 8


class JoinToken(msgspec.Struct, frozen=True, kw_only=True):
    """What a machine has to know to join. `env` are variables of its workers, such as the run's secret."""

    key: bytes
    invitation: str
    env: dict[str, str]

    def encode(self) -> str:
        """As one line of text."""
        return base64.b64encode(msgspec.msgpack.encode(self)).decode()

    @classmethod
    def decode(cls, text: str) -> JoinToken:
        """From text; raises LaunchError."""
        try:
            return msgspec.msgpack.decode(base64.b64decode(text.strip(), validate=True), type=cls)
        except (binascii.Error, ValueError, msgspec.MsgspecError) as error:
            raise LaunchError(
                "this is no token of `echelon invite`",
                where="--token-file",
                fix="copy the whole file that `echelon invite RUN --file FILE` has written",
            ) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Joiner:
    """A machine whose workers are let in: their slots."""

    agent: ConnectedAgent
    slots: list[int]


class _Joined:
    """The process at the other end is a user's command: nothing is known of it, and nothing to be ended."""

    def why(self) -> str:
        """Nothing more than the channel says."""
        return ""

    def end(self) -> None:
        """It ends with its connection."""


class Invitations:
    """The invitations of one run. `decide` gives slots for a machine's workers, or why there are none."""

    def __init__(
        self, env: Mapping[str, str], decide: Callable[[JoinRequest], tuple[list[int], str, str]]
    ) -> None:
        self._env = dict(env)
        self._decide = decide
        self._until: dict[str, float] = {}
        self._reception: Reception | None = None
        self._admitted: list[Joiner] = []
        self._lock = threading.Lock()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="echelon-invitations", daemon=True)

    def invite(self, limit_s: float) -> tuple[str, list[str]]:
        """A token that is good for so long, and the addresses at which to use it."""
        with self._lock:
            if self._reception is None:
                self._reception = Reception(_INTRODUCED_S, {})
                self._thread.start()
            name = secrets.token_hex(8)
            self._until[name] = time.monotonic() + limit_s
            told = self._reception.invitation()
        token = JoinToken(key=self._reception.token, invitation=name, env=self._env)
        return token.encode(), [f"{address}:{told.port}" for address in told.addresses or ["127.0.0.1"]]

    def take(self) -> list[Joiner]:
        """Who was let in since the last call."""
        with self._lock:
            found, self._admitted = self._admitted, []
        return found

    def close(self) -> None:
        """Let nobody in any more."""
        self._closed = True
        if self._thread.ident:
            self._thread.join()
        if self._reception is not None:
            self._reception.close()
        for joiner in self.take():
            joiner.agent.channel.close()

    def _run(self) -> None:
        assert self._reception is not None
        while not self._closed:
            for channel in self._reception.accept(most=_AT_ONCE):
                threading.Thread(
                    target=self._consider, args=(channel,), name="echelon-invited", daemon=True
                ).start()

    def _consider(self, channel: Channel) -> None:
        """Let a caller in that has proved itself, or say why not."""
        try:
            said, asked = _introduced(channel)
            slots, problem, fix = self._slots(said, asked)
            if problem:
                channel.send(Refusal(message=problem, where=asked.node, fix=fix))
                channel.flush(_CONNECT_S)
                channel.close()
                return
        except WorkerError:
            channel.close()
            return
        agent = ConnectedAgent(
            asked.node, channel, _Joined(), slots=asked.workers, introduction=said, shared=self._env
        )
        with self._lock:
            self._admitted.append(Joiner(agent=agent, slots=slots))

    def _slots(self, said: Introduction, asked: JoinRequest) -> tuple[list[int], str, str]:
        again = "let `echelon invite RUN --file FILE` write another one, on the machine of the launcher"
        until = self._until.get(asked.invitation)
        if until is None:
            return [], "the token is of another run", again
        if time.monotonic() > until:
            ago = show_seconds(time.monotonic() - until)
            return [], f"the token has expired {ago} ago", again
        differing = [
            f"{name} {there}, the run has {here}"
            for name, (there, here) in versions(said).items()
            if there != here
        ]
        if differing:
            return [], f"{asked.node} has {'; '.join(differing)}", "install the same versions there"
        return self._decide(asked)


def _introduced(channel: Channel) -> tuple[Introduction, JoinRequest]:
    """What a caller says of itself; raises WorkerError if it does not in time."""
    said: Introduction | None = None
    until = time.monotonic() + _INTRODUCED_S
    while time.monotonic() < until:
        for message in channel.poll(_POLL_S):
            if isinstance(message, Introduction):
                said = message
            elif isinstance(message, JoinRequest) and said is not None:
                return said, message
    raise WorkerError("a machine that called has not said what it wants")


def call_run(address: str, token: JoinToken) -> Channel:
    """Connect to the launcher of a run at HOST:PORT."""
    host, _, port = address.rpartition(":")
    where = f"echelon join {address}"
    try:
        connection = socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_S)
        return secured(connection, token.key)
    except HungUp as error:
        raise LaunchError(
            f"what answers at {address} is not the launcher of a run: {error.message}",
            where=where,
            fix="give the address that `echelon invite` has printed",
        ) from error
    except Refused as error:
        raise LaunchError(
            f"the token is not of the run whose launcher answers at {address}",
            where=where,
            fix="let `echelon invite RUN --file FILE` write one, on the machine of the launcher",
        ) from error
    except OSError as error:
        raise LaunchError(
            f"no launcher answers at {address}: {error.strerror or error}",
            where=where,
            fix="the run may have ended, or a firewall is between the machines; "
            "`echelon invite` prints the addresses",
        ) from error
