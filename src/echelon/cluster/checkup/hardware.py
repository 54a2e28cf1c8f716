"""Checks processor, memory, shared memory and clock."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator
from pathlib import Path

from echelon.cluster.checkup.finding import Finding, Level
from echelon.cluster.machine import Machine
from echelon.config.units import show_bytes

_LOW_MEMORY_BYTES = 10**9
_LOW_SHM_BYTES = 256 * 2**20
_FULL_SHM_BYTES = 2**20
_SLOW_CLOCKS = ("hpet", "acpi_pm", "jiffies")
_CLOCK_SOURCE = Path("/sys/devices/system/clocksource/clocksource0/current_clocksource")
_TIME_ERROR = 5  # the result of adjtimex while the clock is not synchronised


def hardware(machine: Machine) -> Iterator[Finding]:
    """Check processor, memory, shared memory and clock."""
    where = f", in a container ({machine.container})" if machine.container else ""
    yield _machine("ok", "system", f"{machine.kernel}, python {machine.python}{where}")
    yield from resources(machine)
    yield _clock()


def resources(machine: Machine) -> Iterator[Finding]:
    """Check processor, memory and shared memory, of this machine or of another."""
    yield _cores(machine)
    yield _memory(machine)
    yield _shared_memory(machine)


def _machine(level: Level, subject: str, text: str, fix: str = "") -> Finding:
    return Finding(level=level, topic="machine", subject=subject, text=text, fix=fix)


def _cores(machine: Machine) -> Finding:
    l2 = f", L2 {machine.l2_bytes / 2**20:g} MiB" if machine.l2_bytes else ""
    cores = "1 core" if machine.cores_logical == 1 else f"{machine.cores_logical} cores"
    text = f"{machine.cpu}, {cores}{l2}"
    if machine.cores_usable >= machine.cores_logical:
        return _machine("ok", "processor", text)
    why = "this process is pinned to them"
    if machine.cpu_quota is not None and machine.cpu_quota < machine.cores_allowed:
        why = f"the cgroup's quota is {machine.cpu_quota:g} cores"
    return _machine("note", "processor", f"{text}; {machine.cores_usable} usable, because {why}")


def _memory(machine: Machine) -> Finding:
    text = f"{show_bytes(machine.memory_available_bytes)} of {show_bytes(machine.memory_bytes)} available"
    least = machine.memory_available_bytes
    if machine.memory_limit_bytes is not None:
        text += f"; the cgroup allows {show_bytes(machine.memory_limit_bytes)}"
        least = min(least, machine.memory_limit_bytes)
    if least >= _LOW_MEMORY_BYTES:
        return _machine("ok", "memory", text)
    return _machine("note", "memory", text, "start fewer workers: each needs some 300 MB for torch alone")


def _shared_memory(machine: Machine) -> Finding:
    if machine.shm_bytes is None or machine.shm_free_bytes is None:
        return _machine("note", "/dev/shm", "missing", "mount a tmpfs on /dev/shm")
    text = f"{show_bytes(machine.shm_free_bytes)} of {show_bytes(machine.shm_bytes)} free"
    if machine.shm_free_bytes < _FULL_SHM_BYTES:
        return _machine("problem", "/dev/shm", f"full: {text}", "remove leftover files in /dev/shm")
    if machine.shm_free_bytes < _LOW_SHM_BYTES:
        fix = "make it larger: mount -o remount,size=2g /dev/shm, or docker run --shm-size=2g"
        return _machine("note", "/dev/shm", text, fix)
    return _machine("ok", "/dev/shm", text)


def _clock() -> Finding:
    """Check the clock. Events carry each worker's own time, so machines need synchronised clocks."""
    try:
        source = _CLOCK_SOURCE.read_text().strip()
    except OSError:
        source = "unknown"
    now = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    text = f"{now}, source {source}"
    if source in _SLOW_CLOCKS:
        return _machine(
            "note", "clock", f"{text}, which is slow to read", "see the kernel's log for the reason"
        )
    if _clock_is_free_running():
        fix = "run chrony or systemd-timesyncd if workers are on several machines"
        return _machine("note", "clock", f"{text}, not synchronised with other machines", fix)
    return _machine("ok", "clock", text)


def _clock_is_free_running() -> bool:
    """Whether the kernel reports that its clock is not synchronised; False if it cannot be asked."""
    try:
        question = ctypes.create_string_buffer(512)  # all zero: only read
        return bool(ctypes.CDLL(None).adjtimex(question) == _TIME_ERROR)
    except (OSError, AttributeError):
        return False
