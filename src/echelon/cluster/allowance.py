"""What may a worker use here: cores, memory, cache? And how fast does this machine sum?

Workers of one machine divide its cores and its memory. A CPU quota is a worker's own.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from echelon.cluster.machine import cpu_quota, describe_machine
from echelon.cluster.probe import sweep

_ROOT = Path("/")
_SWEPT_BYTES = (64 << 10, 256 << 10, 1 << 20, 4 << 20)
_ADDED_BYTES = 3 * (4 << 20)  # a sweep's sum adds three buffers of 4 MiB
_LOOK_EVERY_S = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowance:
    """One worker's part of its machine.

    cores         CPU time that it may use, in cores; a fraction with a quota
    memory_bytes  what is free, in equal parts for the machine's workers
    cache_bytes   the second-level cache; 0 if unknown
    """

    cpu: str
    cores: float
    quota: float | None
    memory_bytes: float
    cache_bytes: int
    workers_here: int


def allowance(workers_here: int = 1, root: Path = _ROOT) -> Allowance:
    """This worker's part, beside so many workers on the same machine, itself included."""
    machine = describe_machine(root)
    free = machine.memory_available_bytes
    if machine.memory_limit_bytes is not None:
        free = min(free, machine.memory_limit_bytes)
    quota = machine.cpu_quota
    cores = machine.cores_allowed / workers_here
    return Allowance(
        cpu=machine.cpu,
        cores=cores if quota is None else min(quota, machine.cores_allowed),
        quota=quota,
        memory_bytes=free / workers_here,
        cache_bytes=machine.l2_bytes or 0,
        workers_here=workers_here,
    )


def boot_id(root: Path = _ROOT) -> str:
    """The same for all processes on a running machine, in whichever container; empty if unknown."""
    try:
        return (root / "proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def wait_for_quota(expected: float, *, within_s: float, root: Path = _ROOT) -> bool:
    """Wait until this process has that CPU quota, in cores; False if it did not get it in time."""
    until = time.monotonic() + within_s
    while True:
        found = cpu_quota(root)
        if found is not None and abs(found - expected) <= 0.02 * expected + 1e-6:
            return True
        if time.monotonic() >= until:
            return False
        time.sleep(_LOOK_EVERY_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReduceSpeed:
    """How fast this machine adds received bytes, by the size of pieces."""

    bytes_per_s: Mapping[int, float] = field(default_factory=dict)

    @property
    def best(self) -> float:
        """At the best size."""
        return max(self.bytes_per_s.values(), default=0.0)


def reduce_speed(sizes: Sequence[int] = _SWEPT_BYTES) -> ReduceSpeed:
    """Measure it, in about 0.3 s; workers of one machine that measure at once share it, as they will."""
    return ReduceSpeed(
        bytes_per_s={
            size: _ADDED_BYTES / max(1e-9, statistics.median(seconds))
            for size, seconds in sweep(sizes).items()
        }
    )
