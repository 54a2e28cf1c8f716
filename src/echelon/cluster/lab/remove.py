"""Removes a lab, even if the process that made it was killed.

It works by name: everything with the lab's stem is removed, in an order that leaves nothing running and
nothing that cannot be found. Processes first, then namespaces (with their links and bridges), then CPU
groups, and the state files last.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from echelon.cluster.lab.commands import run
from echelon.cluster.lab.cpu import CpuGroups, find_controller
from echelon.cluster.lab.names import NAMESPACES, PREFIX, Names, stem_id
from echelon.cluster.lab.processes import command_of, end, in_namespaces
from echelon.cluster.lab.state import forget, written_ids
from echelon.errors import LabError


def remove(names: Names) -> None:
    """Remove one lab. May be called repeatedly; LabError names what could not be removed."""
    controller = find_controller()
    groups = CpuGroups(controller, names.stem) if controller else None
    with uninterrupted():
        if groups is not None:
            groups.lift_quotas()
        remaining = end(lambda: _pids(names, groups))
        if remaining:
            pid = min(remaining)
            raise LabError(
                f"process {pid} ({command_of(pid)[:60]}) in the lab does not end",
                where=f"lab {names.id}",
                fix=f"end it, then: echelon lab down {names.id}",
            )
        for namespace in names.namespaces():
            try:
                run(["ip", "netns", "delete", namespace], doing="remove a network namespace")
            except LabError:
                if namespace in names.namespaces():  # otherwise another process has removed it
                    raise
        if groups is not None:
            groups.remove()
        forget(names)


def remove_all(prefix: str = PREFIX) -> list[str]:
    """Remove everything with the prefix, and nothing else; returns the ids of the labs."""
    found = lab_ids(prefix)
    for lab in found:
        remove(Names(lab, prefix))
    return found


def lab_ids(prefix: str = PREFIX) -> list[str]:
    """The ids of all labs with anything left: a namespace, a group or a state file."""
    found = written_ids(prefix)
    if NAMESPACES.is_dir():
        found |= {lab for path in NAMESPACES.iterdir() if (lab := stem_id(path.name, prefix))}
    controller = find_controller()
    if controller is not None:
        found |= set(controller.labs(prefix))
    return sorted(found)


def _pids(names: Names, groups: CpuGroups | None) -> set[int]:
    pids = in_namespaces(NAMESPACES / name for name in names.namespaces())
    return pids | groups.pids() if groups is not None else pids


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Delay Ctrl-C until the block is done: an interrupted cleanup is worse than a short wait."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    seen: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        seen.append(number)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.SIG_DFL if before is None else before)
    if seen:
        raise KeyboardInterrupt
