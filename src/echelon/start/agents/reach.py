"""Which addresses of other machines does this one reach, and what is in the way? The agent's side.

A port answers with a token: an address that several machines have, such as a container bridge's, leads to
another machine than was meant, or back to this one.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import secrets
import selectors
import socket
import struct
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from echelon.cluster.interfaces import interfaces, offered
from echelon.cluster.machine import describe_machine
from echelon.start.agents.protocol import (
    Listening,
    MachineDescription,
    ReachOutcome,
    ReachTarget,
    TryReach,
)

_BACKLOG = 256
_TICK_S = 0.05
_MOST_ADDRESSES = 8
_STEADY_PORTS = range(20_000, 30_000)  # Linux chooses from 32768 on
_MOST_TRIES = 50
_NO_IPV6 = (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL)
_PROBLEMS = {
    errno.ECONNREFUSED: "refused",
    errno.ECONNRESET: "reset",
    errno.ETIMEDOUT: "timeout",
    errno.EHOSTUNREACH: "no-route",
    errno.ENETUNREACH: "no-route",
    errno.EACCES: "forbidden",
    errno.EPERM: "forbidden",
    errno.EINVAL: "blackhole",  # what Linux answers for a route of that type
}


def own_addresses() -> list[str]:
    """This machine's addresses that others might reach, the likely ones first."""
    return [one.address for one in offered()][:_MOST_ADDRESSES]


def description() -> MachineDescription:
    """This machine, for `echelon doctor`."""
    return MachineDescription(
        t=time.time(), executable=sys.executable, machine=describe_machine(), interfaces=interfaces()
    )


class ReachListeners:
    """Ports that answer everybody with this agent's token, on all addresses."""

    def __init__(self) -> None:
        self._token = secrets.token_hex(16)
        self._opened: dict[int, socket.socket] = {}
        self._thread: threading.Thread | None = None
        self._closed = False

    def open(self, port: int, *, steady: bool = False) -> Listening:
        """Open a port; 0 is any, `steady` one that the system does not choose for others by itself."""
        try:
            listener = _listen_steadily() if steady else _listen(port)
        except OSError as error:
            return Listening(port, problem=os.strerror(error.errno) if error.errno else str(error))
        found = int(listener.getsockname()[1])
        self._opened[found] = listener
        if self._thread is None:
            self._thread = threading.Thread(target=self._answer, name="echelon-reach", daemon=True)
            self._thread.start()
        return Listening(found, self._token)

    def close(self) -> None:
        """Close all; safe to call twice."""
        self._closed = True
        if self._thread is not None:
            self._thread.join()
        for listener in self._opened.values():
            listener.close()
        self._opened.clear()

    def _answer(self) -> None:
        while not self._closed:
            with selectors.DefaultSelector() as ready:
                for listener in list(self._opened.values()):
                    ready.register(listener, selectors.EVENT_READ)
                for key, _ in ready.select(_TICK_S):
                    assert isinstance(key.fileobj, socket.socket)
                    with contextlib.suppress(OSError):
                        caller, _ = key.fileobj.accept()
                        with caller:
                            caller.sendall(self._token.encode())  # shorter than any socket's buffer


def _listen_steadily() -> socket.socket:
    """A listener below the ports that the system chooses, for outgoing connections too."""
    for port in random.sample(_STEADY_PORTS, _MOST_TRIES):
        with contextlib.suppress(OSError):
            return _listen(port)
    return _listen(0)


def _listen(port: int) -> socket.socket:
    """A listener for IPv4 and, if there is any, IPv6."""
    try:
        listener = socket.create_server(
            ("::", port), family=socket.AF_INET6, backlog=_BACKLOG, dualstack_ipv6=True
        )
    except (ValueError, OSError) as error:
        if isinstance(error, OSError) and error.errno not in _NO_IPV6:
            raise
        listener = socket.create_server(("", port), backlog=_BACKLOG)
    listener.setblocking(False)
    return listener


@dataclass(slots=True)
class _Call:
    """One attempt that is under way."""

    target: ReachTarget
    sock: socket.socket
    connected: bool = False
    heard: bytearray = field(default_factory=bytearray)


def attempt(wanted: TryReach) -> list[ReachOutcome]:
    """Connect to all targets at once; ends after `timeout_s` at the latest."""
    outcomes: dict[int, ReachOutcome] = {}
    until = time.monotonic() + wanted.timeout_s
    with contextlib.ExitStack() as stack, selectors.DefaultSelector() as ready:
        for at, target in enumerate(wanted.targets):
            begun = _begin(target)
            if isinstance(begun, ReachOutcome):
                outcomes[at] = begun
                continue
            stack.callback(begun.sock.close)
            ready.register(begun.sock, selectors.EVENT_WRITE, (at, begun))
        spared = False
        while ready.get_map() and (left := until - time.monotonic()) > 0:
            for key, _ in ready.select(left):
                at, call = key.data
                outcome = _go_on(call, ready)
                if outcome is not None:
                    outcomes[at] = outcome
                    ready.unregister(call.sock)
            if not spared and _each_reached(wanted.targets, outcomes):
                spared = True
                until = min(until, time.monotonic() + wanted.spare_s)
    late = ReachOutcome("not-awaited" if spared else "timeout")
    return [outcomes.get(at, late) for at in range(len(wanted.targets))]


def _begin(target: ReachTarget) -> _Call | ReachOutcome:
    family = socket.AF_INET6 if ":" in target.address else socket.AF_INET
    try:
        sock = socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        return _failed(error.errno)
    sock.setblocking(False)
    # A reset ends the connection on both machines at once: the port is the run's soon.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    try:
        code = sock.connect_ex((target.address, target.port))
    except OSError as error:  # not an address
        sock.close()
        return _failed(error.errno)
    if code not in (0, errno.EINPROGRESS):
        sock.close()
        return _failed(code)
    return _Call(target, sock)


def _go_on(call: _Call, ready: selectors.BaseSelector) -> ReachOutcome | None:
    """What the attempt came to, once it is known."""
    if not call.connected:
        code = call.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            return _failed(code)
        call.connected = True
        key = ready.get_key(call.sock)
        ready.modify(call.sock, selectors.EVENT_READ, key.data)
        return None
    expected = call.target.token.encode()
    try:
        data = call.sock.recv(len(expected) - len(call.heard))
    except BlockingIOError:
        return None
    except OSError as error:
        return _failed(error.errno)
    call.heard += data
    if data and len(call.heard) < len(expected):
        return None
    if bytes(call.heard) != expected:
        return ReachOutcome("another")
    return ReachOutcome("", str(call.sock.getsockname()[0]))


def _each_reached(targets: Sequence[ReachTarget], outcomes: dict[int, ReachOutcome]) -> bool:
    """Whether each port of each machine was reached at one of its addresses."""
    wanted = {(target.node, target.port) for target in targets}
    found = {(targets[at].node, targets[at].port) for at, one in outcomes.items() if not one.problem}
    return wanted == found


def _failed(code: int | None) -> ReachOutcome:
    if code in _PROBLEMS:
        return ReachOutcome(_PROBLEMS[code])
    return ReachOutcome(os.strerror(code) if code else "it failed")
