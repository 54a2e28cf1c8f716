"""Which cores does each worker of a machine have to itself, if workers are pinned?

With `cores` each of n workers gets a run of the usable cores, ordered by NUMA node, so that a worker's
cores are on one node where that is possible. With `numa` it gets all usable cores of the node where that
run begins. On a machine with one node that is all of them: the same as not pinned.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

Pin = Literal["none", "cores", "numa"]
VARIABLE = "ECHELON_CORES"


def numa_cores(root: Path = Path("/")) -> list[tuple[int, ...]]:
    """The cores of each NUMA node; empty if the system does not tell."""
    found = []
    for node in (root / "sys/devices/system/node").glob("node[0-9]*"):
        try:
            text = (node / "cpulist").read_text(encoding="ascii").strip()
        except OSError:
            continue
        found.append((int(node.name.removeprefix("node")), _listed(text)))
    return [cores for _, cores in sorted(found) if cores]


def _listed(text: str) -> tuple[int, ...]:
    """The numbers in a list such as 0-3,8."""
    found: list[int] = []
    for part in text.split(",") if text else ():
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return tuple(found)


def cores_of_worker(
    how: Pin, place: int, count: int, allowed: Sequence[int], nodes: Sequence[Sequence[int]]
) -> tuple[int, ...]:
    """The cores of the worker at this place among so many of a machine; empty: all that it may use."""
    if how == "none" or not allowed:
        return ()
    known = [core for node in nodes for core in node if core in allowed]
    ordered = [*known, *(core for core in allowed if core not in known)]
    begin, end = (len(ordered) * at // count for at in (place, place + 1))
    if how == "cores":
        return tuple(ordered[begin : max(end, begin + 1)])
    return tuple(next((_within(node, allowed) for node in nodes if ordered[begin] in node), ()))


def _within(node: Sequence[int], allowed: Sequence[int]) -> list[int]:
    return [core for core in node if core in allowed]


def pinned(how: Pin, place: int, count: int) -> dict[str, str]:
    """The variable that tells a worker of this machine its cores, if it has some of its own."""
    allowed = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    cores = cores_of_worker(how, place, count, allowed, numa_cores())
    return {VARIABLE: ",".join(map(str, cores))} if cores else {}


def take_cores() -> None:
    """Compute with the cores that the launcher has chosen for this process, if it has."""
    told = os.environ.pop(VARIABLE, "")
    if told and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, [int(core) for core in told.split(",")])
