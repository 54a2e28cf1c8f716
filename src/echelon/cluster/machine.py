"""Facts about this machine, read from the system. Nothing is measured, and torch is not imported.

A process may use fewer cores than the machine has if it is pinned to some of them (affinity) or its cgroup
has a CPU quota, as in most containers. Quotas apply at every level of the cgroup tree, so the smallest one
between the process's group and the root counts; cgroup versions 1 and 2 are supported.
"""

from __future__ import annotations

import importlib.metadata
import math
import os
import platform
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil  # type: ignore[import-untyped]

_ROOT = Path("/")


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Facts about one machine. None if the system does not tell."""

    kernel: str
    container: str | None
    cpu: str
    cores_logical: int
    cores_allowed: int  # by affinity
    cpu_quota: float | None  # CPU time that the cgroup grants, in cores
    cores_usable: int
    l2_bytes: int | None
    memory_bytes: int
    memory_available_bytes: int
    memory_limit_bytes: int | None  # of the cgroup, if it is below the machine's memory
    shm_bytes: int | None
    shm_free_bytes: int | None
    python: str
    torch: str | None


def describe_machine(root: Path = _ROOT) -> Machine:
    """The facts about this machine. `root` is the root of the system's files."""
    memory = psutil.virtual_memory()
    logical = os.cpu_count() or 1
    quota = cpu_quota(root)
    allowed = _cores_allowed()
    shm, shm_free = _shm_bytes(root)
    return Machine(
        kernel=f"{platform.system()} {platform.release()}",
        container=_container(root),
        cpu=processor_name(root),
        cores_logical=logical,
        cores_allowed=allowed,
        cpu_quota=quota,
        cores_usable=_usable(allowed, quota),
        l2_bytes=_l2_bytes(root),
        memory_bytes=memory.total,
        memory_available_bytes=memory.available,
        memory_limit_bytes=_memory_limit_bytes(root, memory.total),
        shm_bytes=shm,
        shm_free_bytes=shm_free,
        python=platform.python_version(),
        torch=version_of("torch"),
    )


def processor_name(root: Path = _ROOT) -> str:
    """The processor's model name."""
    match = re.search(r"^model name\s*:\s*(.+)$", _read(root / "proc/cpuinfo"), re.MULTILINE)
    return match.group(1).strip() if match else platform.processor() or platform.machine()


def usable_cores(root: Path = _ROOT) -> int:
    """How many cores this process may use; a launcher divides them among its workers' threads."""
    return _usable(_cores_allowed(), cpu_quota(root))


def version_of(distribution: str) -> str | None:
    """The installed version of a package, without importing it; None if it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def cpu_quota(root: Path = _ROOT) -> float | None:
    """The CPU time that this process's cgroup grants, in cores; None without a limit.

    A quota is CPU time per period: 150 ms of every 100 ms is 1.5 cores.
    """
    quotas = []
    for version, folder in _cgroup_folders(root, "cpu"):
        if version == 2:
            words = _read(folder / "cpu.max").split()
        else:
            words = [_read(folder / f"cpu.cfs_{what}_us") for what in ("quota", "period")]
        numbers = [_whole(word) for word in words]
        if len(numbers) == 2 and numbers[0] and numbers[1]:
            quotas.append(numbers[0] / numbers[1])
    return min(quotas, default=None)


def _usable(allowed: int, quota: float | None) -> int:
    """Whole cores only: more threads than the quota allows are throttled."""
    return max(1, allowed if quota is None else min(allowed, math.floor(quota)))


def _cores_allowed() -> int:
    if hasattr(os, "sched_getaffinity"):  # Linux
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _memory_limit_bytes(root: Path, total_bytes: int) -> int | None:
    files = {1: "memory.limit_in_bytes", 2: "memory.max"}
    found = [_whole(_read(folder / files[version])) for version, folder in _cgroup_folders(root, "memory")]
    # Without a limit, version 1 holds a number close to 2**63.
    return min((limit for limit in found if limit is not None and limit < total_bytes), default=None)


def _cgroup_folders(root: Path, controller: str) -> Iterator[tuple[int, Path]]:
    """This process's cgroup and its visible ancestors, each with the cgroup version.

    `/proc/self/cgroup` gives the process's place in each tree, and `/proc/self/mountinfo` the mounted part
    of each tree: in a container the mounted part may begin at the container's own group.
    """
    places: dict[int, str] = {}
    for line in _read(root / "proc/self/cgroup").splitlines():
        number, controllers, place = [*line.split(":", 2), "", ""][:3]
        if number == "0" and not controllers:
            places[2] = place
        elif controller in controllers.split(","):
            places[1] = place
    for line in _read(root / "proc/self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        mount, kind = before.split(), after.split()
        if len(mount) < 5 or len(kind) < 3 or kind[0] not in ("cgroup", "cgroup2"):
            continue
        version = 2 if kind[0] == "cgroup2" else 1
        if version not in places or (version == 1 and controller not in kind[2].split(",")):
            continue
        top = root / mount[4].lstrip("/")
        inside = _below(places[version], mount[3])
        folders = [top, *(top.joinpath(*inside[: depth + 1]) for depth in range(len(inside)))]
        yield from ((version, folder) for folder in folders)


def _below(place: str, mounted: str) -> tuple[str, ...]:
    """The path from the mounted part of a cgroup tree down to the process's group."""
    steps, top = Path(place).parts[1:], Path(mounted).parts[1:]
    return steps[len(top) :] if steps[: len(top)] == top else ()


def _container(root: Path) -> str | None:
    """The kind of container, by the traces that common ones leave; None outside of a container."""
    if (root / ".dockerenv").exists():
        return "docker"
    if (root / "run/.containerenv").exists():
        return "podman"
    match = re.search(r"kubepods|docker|containerd|lxc", _read(root / "proc/1/cgroup"))
    return match.group() if match else None


def _l2_bytes(root: Path) -> int | None:
    for index in sorted((root / "sys/devices/system/cpu/cpu0/cache").glob("index*")):
        size = re.fullmatch(r"(\d+)([KM])", _read(index / "size"))
        if _read(index / "level") == "2" and size is not None:
            return int(size.group(1)) * (2**10 if size.group(2) == "K" else 2**20)
    return None


def _shm_bytes(root: Path) -> tuple[int | None, int | None]:
    """Size and free space of the file system for shared memory."""
    try:
        usage = psutil.disk_usage(str(root / "dev/shm"))
    except OSError:
        return None, None
    return usage.total, usage.free


def _read(file: Path) -> str:
    """A system file's text; empty if it is missing or not readable."""
    try:
        return file.read_text(errors="replace").strip()
    except OSError:
        return ""


def _whole(text: str) -> int | None:
    """A number; None for text that means no limit (max, -1)."""
    return int(text) if re.fullmatch(r"[0-9]+", text) else None


def machine_key(root: Path = _ROOT) -> str:
    """The same for processes that share this machine, its name and its network, and for no others."""
    return f"{platform.node()} {network_key(root)}"


def network_key(root: Path = _ROOT) -> str:
    """The same for processes with the same network interfaces; empty if the system does not tell."""
    try:
        boot = (root / "proc/sys/kernel/random/boot_id").read_text().strip()
        network = (root / "proc/self/ns/net").readlink()
    except OSError:
        return ""
    return f"{boot} {network}"
