"""What is written down about labs that are up, so that any process finds and removes them?

One JSON file per lab, made before the first namespace and removed after the last. Making it claims the
lab's id: of two processes that build the same lab, one is told that it is up already.
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
    """One lab: what it is, who made it, and whether it outlives its maker."""

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
        """The names of all that the lab made."""
        return Names(self.id, self.prefix)

    @property
    def maker_lives(self) -> bool:
        """Whether the process that made it is still there (and not another one with its number)."""
        return started_at(self.maker_pid) == self.maker_started


def started_at(pid: int) -> int:
    """When a process started, in clock ticks after boot; 0 if there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return 0
    # Field 22; the command's name before it may hold spaces and brackets, and ends at the last one.
    return int(stat.rpartition(")")[2].split()[19])


def claim(state: LabState) -> None:
    """Write a lab down; LabError if one of its id is up."""
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
        # The last lab to go may take the folder with it just now: then make it again.
        with suppress(FileNotFoundError):
            return file.open("x").close()
    raise FileNotFoundError(2, "its folder keeps vanishing", str(file))


def replace(state: LabState) -> None:
    """Write what is now known about a lab; a reader sees the old text or the new, never half."""
    file = state.names.state
    fresh = file.with_suffix(".new")
    fresh.write_bytes(msgspec.json.encode(state))
    fresh.replace(file)


def write_hosts(state: LabState) -> None:
    """The machine's own hosts file, and the nodes' names; each process in a node sees it as /etc/hosts."""
    names = state.names
    own = Path("/etc/hosts").read_text(encoding="utf-8") if Path("/etc/hosts").is_file() else ""
    lines = []
    for index, node in enumerate(state.spec.nodes):
        address = names.address(index)
        # The mapped form too: c10d looks up the names of IPv4 peers on IPv6 sockets, and warns otherwise.
        lines += [f"{address} {node.name}", f"::ffff:{address} {node.name}"]
    names.hosts.write_text("\n".join([own, *lines, ""]), encoding="utf-8")


def forget(names: Names) -> None:
    """Remove what is written about a lab."""
    for file in (names.hosts, names.state.with_suffix(".new"), names.state):
        file.unlink(missing_ok=True)
    with suppress(OSError):
        STATES.rmdir()  # only when it was the last


def read_states(prefix: str = PREFIX) -> list[LabState]:
    """All labs that are written down, oldest first; unreadable files are left to `down --all`."""
    states = []
    for file in _files(prefix):
        with suppress(OSError, msgspec.DecodeError):
            states.append(msgspec.json.decode(file.read_bytes(), type=LabState))
    return sorted(states, key=lambda state: state.created)


def written_ids(prefix: str = PREFIX) -> set[str]:
    """The ids of all state files, readable or not."""
    return {lab for file in _files(prefix) if (lab := stem_id(file.name, prefix)) is not None}


def maker() -> tuple[int, int]:
    """This process, as a lab remembers it."""
    return os.getpid(), started_at(os.getpid())


def _files(prefix: str) -> list[Path]:
    return sorted(STATES.glob(f"{prefix}-*.json")) if STATES.is_dir() else []
