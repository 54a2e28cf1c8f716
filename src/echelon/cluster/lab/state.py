"""The state files of labs that are up, by which any process can find and remove them.

One JSON file per lab, created before the first namespace and removed after the last. Creating it claims the
lab's id: of two processes that build the same lab, one gets the error that it is already up.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import msgspec

from echelon.cluster.lab.names import PREFIX, STATES, Names, stem_id
from echelon.cluster.lab.spec import LabSpec
from echelon.errors import LabError


class LabState(msgspec.Struct, frozen=True, kw_only=True):
    """One lab: its spec, the process that made it, and whether it outlives that process."""

    id: str
    prefix: str
    run_id: str
    spec: LabSpec
    kept: bool
    created: float
    maker_pid: int
    maker_started: int
    netem: bool = False
    notes: tuple[str, ...] = ()

    @property
    def names(self) -> Names:
        """The names of everything that the lab created."""
        return Names(self.id, self.prefix)

    @property
    def maker_lives(self) -> bool:
        """Whether the process that made it still exists (and not another one with the same pid)."""
        return started_at(self.maker_pid) == self.maker_started


def started_at(pid: int) -> int:
    """The start time of a process, in clock ticks after boot; 0 if there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return 0
    # Field 22; the command name before it may contain spaces and brackets, and ends at the last bracket.
    return int(stat.rpartition(")")[2].split()[19])


def claim(state: LabState) -> None:
    """Write a lab's state file; LabError if a lab with its id is up."""
    file = state.names.state
    try:
        _make(file)
    except FileExistsError:
        raise LabError(
            f"lab {state.spec.name!r} is already up",
            where=str(file),
            fix=f"remove it first: echelon lab down {state.id}",
        ) from None
    except OSError as error:
        raise LabError(f"cannot write the lab's state: {error.strerror}", where=str(file)) from error
    try:
        replace(state)
        write_hosts(state)
    except OSError as error:
        forget(state.names)
        raise LabError(f"cannot write the lab's state: {error.strerror}", where=str(file)) from error


def _make(file: Path) -> None:
    for _ in range(10):
        file.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        # Removing the last lab removes the folder too: then create it again.
        with suppress(FileNotFoundError):
            return file.open("x").close()
    raise FileNotFoundError(2, "its folder is removed repeatedly", str(file))


def replace(state: LabState) -> None:
    """Replace a lab's state file atomically."""
    file = state.names.state
    fresh = file.with_suffix(".new")
    fresh.write_bytes(msgspec.json.encode(state))
    fresh.replace(file)


def write_hosts(state: LabState) -> None:
    """Write the machine's hosts file plus the nodes' names; processes in a node see it as /etc/hosts."""
    names = state.names
    own = Path("/etc/hosts").read_text(encoding="utf-8") if Path("/etc/hosts").is_file() else ""
    lines = []
    for index, node in enumerate(state.spec.nodes):
        address = names.address(index)
        # The mapped form too: c10d looks up IPv4 peers' names on IPv6 sockets, and would warn.
        lines += [f"{address} {node.name}", f"::ffff:{address} {node.name}"]
    names.hosts.write_text("\n".join([own, *lines, ""]), encoding="utf-8")


def forget(names: Names) -> None:
    """Remove a lab's state files."""
    for file in (names.hosts, names.state.with_suffix(".new"), names.state):
        file.unlink(missing_ok=True)
    with suppress(OSError):
        STATES.rmdir()  # succeeds only after the last lab


def read_states(prefix: str = PREFIX) -> list[LabState]:
    """All labs with a readable state file, oldest first; `down --all` removes the unreadable ones."""
    states = []
    for file in _files(prefix):
        with suppress(OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            states.append(msgspec.json.decode(file.read_bytes(), type=LabState))
    return sorted(states, key=lambda state: state.created)


def written_ids(prefix: str = PREFIX) -> set[str]:
    """The ids of all state files, readable or not."""
    return {lab for file in _files(prefix) if (lab := stem_id(file.name, prefix)) is not None}


def maker() -> tuple[int, int]:
    """The pid and start time of this process."""
    return os.getpid(), started_at(os.getpid())


def _files(prefix: str) -> list[Path]:
    return sorted(STATES.glob(f"{prefix}-*.json")) if STATES.is_dir() else []
