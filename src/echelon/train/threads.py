"""How many threads does each worker compute with, if it was not `echelon run` that started it?

A worker gets its part of every core that it may run on: of a core that three workers may use, a third. So
workers that are pinned to cores of their own use these, and workers that share a machine divide it. More
threads than cores make workers spin while they wait for each other.

torch computes with all cores by default. Where MPI's variables are set, it computes with one: MKL notices
MPI, and leaves the other cores to other processes.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence

import psutil  # type: ignore[import-untyped]
import torch

from echelon.comm.meet.rendezvous import Member

_SET = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
_MPI = ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")


def chosen(env: Mapping[str, str], usable: int) -> int:
    """The number of threads that the user or the launcher has chosen; 0 if nobody has."""
    now = torch.get_num_threads()
    if any(env.get(name) for name in _SET):
        return now
    if now == 1:
        return 0 if any(env.get(name) for name in _MPI) else 1
    every = {usable, os.cpu_count() or 1, psutil.cpu_count(logical=False) or 1}
    return 0 if now in every else now


def allowed_cores() -> tuple[int, ...]:
    """The cores that this process may run on; empty if the system does not tell."""
    return tuple(sorted(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else ()


def divided(workers: Sequence[Member]) -> list[int]:
    """A fair number of threads for each worker, whatever it has chosen."""
    users = Counter((one.host, one.node, core) for one in workers for core in one.cores)
    found = []
    for one in workers:
        part = sum(1 / users[one.host, one.node, core] for core in one.cores)
        granted = one.usable_cores / len(one.cores) if one.cores else 0.0
        found.append(max(1, math.floor(part * min(1.0, granted) + 1e-9)))
    return found


def taken(workers: Sequence[Member]) -> list[int]:
    """The threads that each worker computes with."""
    return [one.threads or fair for one, fair in zip(workers, divided(workers), strict=True)]


def reason(workers: Sequence[Member], env: Mapping[str, str]) -> str:
    """Why the leader computes with so many threads."""
    me, fair = workers[0], divided(workers)[0]
    if not me.threads:
        return "each worker's part of the cores that it may run on"
    named = next((name for name in _SET if env.get(name)), "")
    if not named:
        return "as the script has set"
    if named == "OMP_NUM_THREADS" and env[named] == "1" and env.get("TORCHELASTIC_RUN_ID") and fair > 1:
        return (
            "OMP_NUM_THREADS=1, which torchrun sets unless it is set: "
            f"there are cores for {fair} threads in each worker"
        )
    return f"{named}={env[named]}"
