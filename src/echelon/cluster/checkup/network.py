"""Checks whether workers can connect: over which interface, and on which port."""

from __future__ import annotations

import errno
import socket
import threading
from collections.abc import Iterable, Iterator
from contextlib import ExitStack

import psutil  # type: ignore[import-untyped]

from echelon.cluster import interfaces as net
from echelon.cluster.checkup.finding import Finding, Level
from echelon.errors import ConfigError

_LOOPBACK_PORTS = 4
# A resolver that does not answer takes many seconds; its thread is then abandoned.
_RESOLVE_WITHIN_S = 0.4


def network(peer: str | None = None) -> Iterator[Finding]:
    """The interfaces, and which of them would be used for which peers."""
    for name, entries in _by_name(net.interfaces()).items():
        addresses = ", ".join(entry.address.partition("%")[0] for entry in entries)
        speed = f", {entries[0].speed_mbit} Mbit/s" if entries[0].speed_mbit else ""
        kind = ", made by container software" if entries[0].virtual else ""
        down = "" if entries[0].up else ", down"
        yield _network("ok", name, f"{addresses}{speed}{kind}{down}")
    yield _loopback()
    if peer is not None:
        yield _towards("peer", peer)
        return
    yield _default_route()
    yield _own_name()


def _network(level: Level, subject: str, text: str, fix: str = "") -> Finding:
    return Finding(level=level, topic="network", subject=subject, text=text, fix=fix)


def _by_name(entries: Iterable[net.Interface]) -> dict[str, list[net.Interface]]:
    out: dict[str, list[net.Interface]] = {}
    for entry in entries:
        out.setdefault(entry.name, []).append(entry)
    return out


def _loopback() -> Finding:
    choice = net.owning("127.0.0.1")
    if choice is None:
        return _network("problem", "local peers", "no interface has 127.0.0.1", "ip link set lo up")
    return _network("ok", "local peers", f"{choice.name} ({choice.address}), for workers on this machine")


def _towards(subject: str, host: str) -> Finding:
    try:
        choice = net.towards(host)
    except ConfigError as error:
        return _network("problem", subject, error.message, error.fix)
    surprising = net.is_virtual(choice.name) or (
        net.is_loopback(choice.address) and not net.is_loopback(host)
    )
    text = f"{choice.name} ({choice.address}), because {choice.reason}"
    fix = "give the address by which the workers know each other" if surprising else ""
    return _network("note" if surprising else "ok", subject, text, fix)


def _default_route() -> Finding:
    choice = net.default_route()
    if choice is None:
        text = "no default route: only machines on the same network can take part"
        return _network("note", "other peers", text, "check one of them with --peer HOST")
    level: Level = "note" if net.is_virtual(choice.name) else "ok"
    return _network(level, "other peers", f"{choice.name} ({choice.address}), because {choice.reason}")


def _own_name() -> Finding:
    """Check the machine's own name: some libraries, Gloo among them, find their interface by it."""
    name = socket.gethostname()
    found: list[Finding] = []
    asking = threading.Thread(target=lambda: found.append(_towards(name, name)), daemon=True)
    asking.start()
    asking.join(timeout=_RESOLVE_WITHIN_S)
    fix = f"map {name} to its network address in /etc/hosts if workers are on several machines"
    if not found:
        return _network("note", "own name", f"{name} does not resolve quickly", fix)
    if found[0].level == "ok":
        return _network("ok", "own name", found[0].text)
    return _network("note", "own name", found[0].text, fix)


def ports(port: int | None = None) -> Iterator[Finding]:
    """Whether workers on this machine can connect, and whether a given port is free."""
    yield _loopback_ports()
    if port is not None:
        yield _port(port)


def _loopback_ports() -> Finding:
    try:
        with ExitStack() as opened:
            servers = [
                opened.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(_LOOPBACK_PORTS)
            ]
            for server in servers:
                opened.enter_context(socket.create_connection(server.getsockname(), timeout=0.1))
    except OSError as error:
        return Finding(
            level="problem",
            topic="ports",
            subject="loopback",
            text=f"ports cannot be opened on 127.0.0.1: {error.strerror or error}",
            fix="allow connections on the loopback interface (firewall, sandbox, number of open files)",
        )
    text = f"{_LOOPBACK_PORTS} ports were opened and connected to on 127.0.0.1"
    return Finding(level="ok", topic="ports", subject="loopback", text=text)


def _port(port: int) -> Finding:
    subject = f"port {port}"
    try:
        # create_server sets SO_REUSEADDR: a port counts as free once its last server is gone.
        socket.create_server(("", port)).close()
        if socket.has_ipv6:
            socket.create_server(("::", port), family=socket.AF_INET6).close()
    except PermissionError:
        text, fix = (
            "this user may not open it",
            "use a port from 1024 to 65535, or ask for permission",
        )
    except OSError as error:
        if error.errno in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL):  # IPv6 is disabled
            return Finding(level="ok", topic="ports", subject=subject, text="free")
        text = f"in use{_holder(port)}" if error.errno == errno.EADDRINUSE else str(error.strerror)
        fix = "end that program, or use another port"
    else:
        return Finding(level="ok", topic="ports", subject=subject, text="free")
    return Finding(level="problem", topic="ports", subject=subject, text=text, fix=fix)


def _holder(port: int) -> str:
    """The program that listens on a port, if this user may know."""
    try:
        for entry in psutil.net_connections(kind="tcp"):
            if (
                entry.laddr
                and entry.laddr.port == port
                and entry.status == psutil.CONN_LISTEN
                and entry.pid
            ):
                return f" by {psutil.Process(entry.pid).name()} (pid {entry.pid})"
    except psutil.Error:
        pass
    return ""
