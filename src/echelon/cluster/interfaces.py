"""Finds the network interface that leads to a peer, and says why.

The kernel decides: a UDP socket that is connected to the peer sends nothing, but gets the source address
that packets to the peer would have, and one interface has that address. There is no guessing from a list of
interfaces, so a container bridge is chosen only if the route really uses it, and then the reason says so.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import psutil  # type: ignore[import-untyped]

from echelon.errors import ConfigError

Family = Literal["ipv4", "ipv6"]

# Interfaces that container and virtual-machine software creates. Bridges that people create (br0) are not
# among them: they often carry the machine's only real address.
_VIRTUAL = (
    "docker", "br-", "veth", "virbr", "vnet", "cni", "cali", "cilium", "flannel", "kube-", "weave",
    "podman", "lxc", "lxd", "vmnet", "vboxnet", "vxlan", "dummy", "ifb",
)  # fmt: skip

# Addresses reserved for documentation: nobody has them, so only the default route leads there.
_NOWHERE = ("203.0.113.1", "2001:db8::1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Interface:
    """One address of one network interface; an interface with several addresses appears several times."""

    name: str
    address: str
    family: Family
    up: bool
    loopback: bool
    virtual: bool
    speed_mbit: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class InterfaceChoice:
    """An interface, its address to use, and the reason for the choice."""

    name: str
    address: str
    reason: str


def interfaces() -> list[Interface]:
    """Every address of this machine, in the system's order; interfaces without an address are omitted."""
    families: dict[int, Family] = {socket.AF_INET: "ipv4", socket.AF_INET6: "ipv6"}
    stats = psutil.net_if_stats()
    out = []
    for name, addresses in psutil.net_if_addrs().items():
        state = stats.get(name)
        for entry in addresses:
            family = families.get(entry.family)
            if family is None:
                continue
            out.append(
                Interface(
                    name=name,
                    address=entry.address,
                    family=family,
                    up=state is not None and state.isup,
                    loopback=is_loopback(entry.address)
                    or (state is not None and "loopback" in state.flags.split(",")),
                    virtual=is_virtual(name),
                    speed_mbit=(state.speed or None) if state is not None else None,
                )
            )
    return out


def offered() -> list[Interface]:
    """The addresses at which other machines may reach this one; those of container bridges come last.

    Link-local IPv6 addresses are left out: they mean nothing without the other machine's interface.
    """
    found = [one for one in interfaces() if one.up and not one.loopback]
    usable = [one for one in found if not (one.family == "ipv6" and _is_link_local(one.address))]
    return sorted(usable, key=lambda one: (one.virtual, one.family))


def towards(host: str, port: int = 1) -> InterfaceChoice:
    """The interface by which packets to `host` leave this machine.

    The host's addresses are tried in the resolver's order, IPv4 and IPv6, as for a connection. Nothing is
    sent. Raises ConfigError if the host cannot be resolved or no route leads to it.
    """
    candidates = _resolve(host, port)
    failure = ""
    for family, target in candidates:
        try:
            source = _source_towards(family, target)
        except OSError as error:
            failure = failure or f"{target[0]}: {error.strerror}"
            continue
        return choose(interfaces(), source, host=host, peer=str(target[0]), own_name=socket.gethostname())
    fix = "check this machine's network and routes (ip route), or give another address of the host"
    if any(_needs_zone(str(target[0])) for _, target in candidates):
        fix = f"add the interface to a link-local address: {host}%eth0"
    raise ConfigError(f"no route to {host!r} ({failure})", where=f"host {host}", fix=fix)


def default_route() -> InterfaceChoice | None:
    """The interface of the default route; None if there is none."""
    found = interfaces()
    for nowhere in _NOWHERE:
        family = socket.AF_INET6 if ":" in nowhere else socket.AF_INET
        try:
            source = _source_towards(family, (nowhere, 1))
        except OSError:
            continue
        picked = _owner(found, source)
        if picked is not None and not picked.loopback:
            reason = f"the default route leaves by {picked.name}{_caveat(picked)}"
            return InterfaceChoice(name=picked.name, address=_plain(source), reason=reason)
    return None


def owning(address: str) -> InterfaceChoice | None:
    """The interface with this address; None if it is not one of this machine's."""
    picked = _owner(interfaces(), address)
    if picked is None:
        return None
    reason = f"{_plain(address)} is an address of {picked.name}{_caveat(picked)}"
    return InterfaceChoice(name=picked.name, address=_plain(address), reason=reason)


def choose(
    found: Sequence[Interface], source: str, *, host: str, peer: str, own_name: str = ""
) -> InterfaceChoice:
    """The interface with the source address that the kernel chose for `host` at address `peer`."""
    picked = _owner(found, source)
    if picked is None:
        raise ConfigError(
            f"packets to {host!r} leave from {source}, which no interface of this machine has",
            where=f"host {host}",
            fix="check this machine's addresses and routes (ip address, ip route)",
        )
    address = _plain(source)
    named = host if _plain(host) == _plain(peer) else f"{host} ({_plain(peer)})"
    return InterfaceChoice(
        name=picked.name, address=address, reason=_reason(picked, named, host, peer, own_name)
    )


def _reason(picked: Interface, named: str, host: str, peer: str, own_name: str) -> str:
    if is_loopback(peer):
        if own_name and host.lower() in (own_name.lower(), own_name.lower().partition(".")[0]):
            return (
                f"{host} is this machine's own name, which /etc/hosts or the resolver turns into "
                f"the loopback address {_plain(peer)}; other machines cannot reach it by that"
            )
        return f"{named} is the loopback address, so the peer is on this machine"
    if _plain(peer) == _plain(picked.address):
        return f"{named} is this machine's own address, on {picked.name}{_caveat(picked)}"
    return f"the route to {named} leaves by {picked.name}{_caveat(picked)}"


def _caveat(picked: Interface) -> str:
    if picked.virtual:
        return ", a bridge or link of container software that other machines usually cannot reach"
    return "" if picked.up else ", which is down"


def _owner(found: Sequence[Interface], address: str) -> Interface | None:
    """The interface with that address; if several have it, preferably one that is up and not virtual.

    All of 127.0.0.0/8 belongs to the loopback interface, although it lists only one address.
    """
    matching = [entry for entry in found if _plain(entry.address) == _plain(address)]
    if not matching and is_loopback(address):
        matching = [entry for entry in found if entry.loopback]
    return min(matching, key=lambda entry: (not entry.up, entry.virtual), default=None)


def is_loopback(address: str) -> bool:
    """Whether an address (or the name localhost) never leaves this machine."""
    if address.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(_plain(address)).is_loopback
    except ValueError:
        return False


def is_virtual(name: str) -> bool:
    """Whether an interface of that name was made by container or virtual-machine software."""
    return name.startswith(_VIRTUAL)


def _plain(address: str) -> str:
    """The canonical form of an address: no zone, no brackets, no IPv4-mapped IPv6."""
    bare = address.strip("[]").partition("%")[0]
    try:
        parsed = ipaddress.ip_address(bare)
    except ValueError:
        return bare
    if isinstance(parsed, ipaddress.IPv6Address) and parsed.ipv4_mapped is not None:
        return str(parsed.ipv4_mapped)
    return str(parsed)


def _needs_zone(address: str) -> bool:
    return "%" not in address and _is_link_local(address) and ":" in address


def _is_link_local(address: str) -> bool:
    return ipaddress.ip_address(_plain(address)).is_link_local


_Target = tuple[Any, ...]  # as getaddrinfo gives it: two fields for IPv4, four for IPv6


def _resolve(host: str, port: int) -> list[tuple[int, _Target]]:
    """The host's addresses as socket family and target, in the order to try them."""
    if not 0 < port < 65536:
        raise ConfigError(
            f"port {port} does not exist", where=f"host {host}", fix="give a port from 1 to 65535"
        )
    bare = host.strip().strip("[]")
    try:
        if not bare:
            raise ValueError("no name given")
        found = socket.getaddrinfo(bare, port, type=socket.SOCK_DGRAM)
    except (OSError, ValueError) as error:  # a name that cannot be encoded is a ValueError
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(
            f"host {host!r} cannot be resolved: {why}",
            where=f"host {host}",
            fix="check its spelling, give its address instead, or add it to /etc/hosts",
        ) from None
    if any(ipaddress.ip_address(_plain(str(entry[4][0]))).is_unspecified for entry in found):
        raise ConfigError(
            f"{host!r} means every interface and is not the address of a peer",
            where=f"host {host}",
            fix="give the address or name by which other machines know it",
        )
    return [(int(entry[0]), entry[4]) for entry in found]


def _source_towards(family: int, target: _Target) -> str:
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])
