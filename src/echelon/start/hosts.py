"""Which machines, and how many workers on each? Pure: a text or a file's lines in, hosts out.

    a:2,b:4          two workers on a, four on b
    hosts.txt        a file with a line for each: `a`, `a:2`, `a slots=2` or `a 2`; # begins a comment

A name is whatever ssh knows: a host name, an address, an alias of ~/.ssh/config, user@host. An IPv6 address
with a number of workers is in brackets: [fe80::1]:2.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from echelon.errors import ConfigError

_ENTRY = re.compile(
    r"(?P<name>\[[^\]]+\]|[^\s:\[\]]+|[^\s\[\]]*:[^\s\[\]]*:[^\s\[\]]*)(?::(?P<slots>\d+))?"
)
_LINE = re.compile(r"(?P<entry>\S+)(?:\s+(?:slots\s*=\s*)?(?P<slots>\d+))?")


@dataclass(frozen=True, slots=True)
class Host:
    """A machine, and how many workers it gets."""

    name: str
    slots: int = 1


def read_hosts(text: str) -> list[Host]:
    """The hosts of `--hosts`: a list, or the name of a file."""
    path = Path(text).expanduser()
    if "," not in text and path.is_file():
        lines = path.read_text(errors="replace").splitlines()
        return check_hosts((_from_line(line, str(path)) for line in _without_comments(lines)), str(path))
    if "/" in text:
        raise ConfigError(f"there is no file {text}", where="--hosts", fix="give its path, or a:2,b:4")
    return check_hosts((_from_entry(part, "--hosts") for part in text.split(",")), "--hosts")


def _without_comments(lines: Iterable[str]) -> Iterable[str]:
    stripped = (line.partition("#")[0].strip() for line in lines)
    return (line for line in stripped if line)


def _from_line(line: str, where: str) -> Host:
    found = _LINE.fullmatch(line)
    if found is None:
        raise _bad(line, where)
    host = _from_entry(found["entry"], where)
    return Host(host.name, int(found["slots"])) if found["slots"] else host


def _from_entry(text: str, where: str) -> Host:
    found = _ENTRY.fullmatch(text.strip())
    # A name that begins with a dash would be an option of ssh.
    if found is None or found["name"].startswith("-"):
        raise _bad(text, where)
    return Host(found["name"].strip("[]"), int(found["slots"] or 1))


def check_hosts(hosts: Iterable[Host], where: str) -> list[Host]:
    """Refuse no hosts, a host twice, and a host without workers."""
    found = list(hosts)
    names = [host.name for host in found]
    for host in found:
        if names.count(host.name) > 1:
            raise ConfigError(
                f"{host.name} is named twice",
                where=where,
                fix=f"name it once, with a number: {host.name}:2",
            )
        if host.slots < 1:
            raise ConfigError(
                f"{host.name} has no workers", where=where, fix="give at least one, or leave it out"
            )
    if not found:
        raise ConfigError("no host is named", where=where, fix="a:2,b:4")
    return found


def _bad(text: str, where: str) -> ConfigError:
    return ConfigError(
        f"{text.strip()!r} names no host", where=where, fix="write a:2,b:4, or a line `a slots=2`"
    )
