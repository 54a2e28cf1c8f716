"""What did a test leave behind: threads, processes, shared memory, namespaces, environment, folder?

A snapshot is taken before and compared after; both cost a fraction of a millisecond. Only when something
is new is it looked at closely: it has up to ten seconds to go away. Shared memory and namespaces belong to
the whole machine: only those that this process or its descendants made count.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
import time
from collections.abc import Set
from dataclasses import dataclass, replace
from multiprocessing import resource_tracker
from pathlib import Path

import psutil

# Long enough for a thread or process that is about to end on a machine with ten times the load.
_GRACE_S = 10.0
_SHARED_MEMORY = Path("/dev/shm")
_NAMESPACES = Path("/run/netns")
_NAMESPACE_PREFIX = "echl"
# What the namespaces of this session's labs begin with, where a test may choose.
LAB_PREFIX = f"{_NAMESPACE_PREFIX}{os.getpid():x}t"

# The processes that this one ever saw among its descendants: they may be gone, and what they made not.
_seen_pids = {os.getpid()}

# Set by pytest, and by scikit-learn and torch when parts of them are first imported.
_OTHERS_VARIABLES = {
    "PYTEST_CURRENT_TEST",
    "PYTEST_VERSION",
    "KMP_DUPLICATE_LIB_OK",
    "KMP_INIT_AT_FORK",
    "TORCHINDUCTOR_CACHE_DIR",
    "TRITON_CACHE_DIR",
}


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What is there now."""

    threads: frozenset[threading.Thread]
    processes: frozenset[int]
    segments: frozenset[str]
    namespaces: frozenset[str]
    environment: dict[str, str]
    folder: str

    @classmethod
    def take(cls, exempt: Set[int] = frozenset()) -> Snapshot:
        """Look around; `exempt` are processes that may be there, with all that they start."""
        processes = frozenset(descendants(exempt))
        _seen_pids.update(processes, exempt)
        return cls(
            threads=frozenset(threading.enumerate()),
            processes=processes,
            segments=frozenset(_names(_SHARED_MEMORY)),
            namespaces=frozenset(n for n in _names(_NAMESPACES) if n.startswith(_NAMESPACE_PREFIX)),
            environment={k: v for k, v in os.environ.items() if k not in _OTHERS_VARIABLES},
            folder=_folder(),
        )


def left_behind(before: Snapshot, exempt: Set[int] = frozenset()) -> list[str]:
    """What is there that was not there before, in words.

    The environment and the folder are put back, and processes ended, so that the next test begins well.
    """
    found = _changes(before)
    deadline = time.monotonic() + _GRACE_S
    pause_s = 0.005
    while True:
        now = Snapshot.take(exempt)
        things = [text for kind, name, text in _things(before, now) if _is_ours(kind, name)]
        if not things or time.monotonic() > deadline:
            break
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.25)
    for pid in now.processes - before.processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return found + things


def left_on_machine(before: Snapshot) -> list[str]:
    """New shared memory and namespaces of the whole test run, after all its processes have ended."""
    machine = replace(Snapshot.take(), threads=before.threads, processes=before.processes)
    return [text for kind, name, text in _things(before, machine) if _is_ours(kind, name)]


def _changes(before: Snapshot) -> list[str]:
    """Environment and folder: no grace, and put back."""
    found = []
    now = {k: v for k, v in os.environ.items() if k not in _OTHERS_VARIABLES}
    if now != before.environment:
        names = sorted(name for name, _ in now.items() ^ before.environment.items())
        found.append(f"changed environment: {', '.join(dict.fromkeys(names))}")
        for name in names:
            os.environ.pop(name, None)
            if name in before.environment:
                os.environ[name] = before.environment[name]
    if _folder() != before.folder:
        found.append(f"changed current folder: {_folder()}")
        os.chdir(before.folder)
    return found


def _things(before: Snapshot, now: Snapshot) -> list[tuple[str, str, str]]:
    """Kind, name and description of each new thing."""
    threads = [thread for thread in new_threads(set(before.threads)) if thread in now.threads]
    processes = sorted(now.processes - before.processes)
    return [
        *(("thread", t.name, f"thread {t.name}{' (daemon)' if t.daemon else ''}") for t in threads),
        *(("process", str(pid), f"process {pid}: {_command(pid)}") for pid in processes),
        *(("segment", n, f"shared memory {n}") for n in sorted(now.segments - before.segments)),
        *(("namespace", n, f"network namespace {n}") for n in sorted(now.namespaces - before.namespaces)),
    ]


def new_threads(before: set[threading.Thread]) -> list[threading.Thread]:
    """Python's own threads that were not there before; those that torch runs natively do not count."""
    return [
        thread
        for thread in threading.enumerate()
        if thread not in before and not isinstance(thread, threading._DummyThread)
    ]


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)  # noqa: PTH208 - iterdir would build a path for each
    except FileNotFoundError:
        return []


def _folder() -> str:
    try:
        return os.getcwd()  # noqa: PTH109 - as text, this is done twice for each test
    except FileNotFoundError:
        return "(removed)"


def descendants(exempt: Set[int] = frozenset()) -> set[int]:
    """Running child processes, and theirs, except Python's own bookkeeper of shared memory."""
    tracker = resource_tracker._resource_tracker._pid  # type: ignore[attr-defined]
    found: set[int] = set()
    todo = [os.getpid()]
    while todo:
        for pid in _children(todo.pop()):
            if pid != tracker and pid not in exempt and pid not in found and not _has_ended(pid):
                found.add(pid)
                todo.append(pid)
    return found


def _children(pid: int) -> list[int]:
    """The kernel lists each thread's children: much cheaper than looking at all processes there are."""
    found = []
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for task in os.listdir(f"/proc/{pid}/task"):  # noqa: PTH208
            text = Path(f"/proc/{pid}/task/{task}/children").read_text()
            found += [int(child) for child in text.split()]
    return found


def _has_ended(pid: int) -> bool:
    """A zombie holds nothing; it only waits to be asked for its exit code."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:200]
    except (FileNotFoundError, ProcessLookupError):
        return "ended meanwhile"


# Who made it? Shared memory and namespaces belong to the machine, and so may be another program's.


def _is_ours(kind: str, name: str) -> bool:
    if kind not in ("segment", "namespace"):
        return True
    ours = {os.getpid(), *descendants()}
    uses = _maps_segment if kind == "segment" else _lives_in
    if any(uses(pid, name) for pid in ours):
        return True
    if _carries_our_mark(kind, name):
        return _exists(kind, name)
    others = [p.pid for p in psutil.process_iter() if p.pid not in ours]
    if any(uses(pid, name) for pid in others):
        return False
    # Nobody uses it. It is ours if nobody else could have made it; asked last, for it may be gone by now.
    return not _another_maker(others) and _exists(kind, name)


def _exists(kind: str, name: str) -> bool:
    return ((_SHARED_MEMORY if kind == "segment" else _NAMESPACES) / name).exists()


def _carries_our_mark(kind: str, name: str) -> bool:
    """Torch names a segment torch_PID_...; tests name their labs by LAB_PREFIX."""
    if kind == "namespace":
        return name.startswith(LAB_PREFIX)
    return not _seen_pids.isdisjoint(int(number) for number in re.findall(r"(?<=_)[0-9]+(?=_|$)", name))


def _maps_segment(pid: int, name: str) -> bool:
    path = f"{_SHARED_MEMORY}/{name}"
    with contextlib.suppress(OSError):
        if path in Path(f"/proc/{pid}/maps").read_text():
            return True
        handles = Path(f"/proc/{pid}/fd").iterdir()
        return any(str(handle.readlink()) == path for handle in handles)
    return False


def _lives_in(pid: int, name: str) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/ns/net").stat().st_ino == (_NAMESPACES / name).stat().st_ino
    return False


def _another_maker(others: list[int]) -> bool:
    """Is there another test session (also a pytest-xdist sibling) or another program that uses torch?"""
    above = {parent.pid for parent in psutil.Process().parents()}
    return any(_may_make(pid) for pid in others if pid not in above)


def _may_make(pid: int) -> bool:
    command = _command(pid)
    if "pytest" in command or "echelon" in command:
        return True
    with contextlib.suppress(OSError):
        return "libtorch" in Path(f"/proc/{pid}/maps").read_text()
    return False
