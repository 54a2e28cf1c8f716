"""Measures once at which piece size this machine sums fastest, and caches it. Does not import torch.

The piece size: buffers are summed piece by piece, and a piece that stays in the cache until it has been
written is not fetched twice. If pieces are too small, calls cost more than sums; so sizes around that of
the second-level cache are tried.

The cache is a file, `probe.json`, in the folder that ECHELON_CACHE names, or in `~/.cache/echelon`
(XDG_CACHE_HOME moves it). It has an entry for each machine, because machines often share a home folder. It
never causes an error: if it cannot be read or is invalid, the machine is measured again; if it cannot be
written, the result is not kept.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from echelon.cluster.machine import describe_machine
from echelon.errors import ConfigError
from echelon.observe.atomic import write_whole
from echelon.zoo.locate import cache_folder

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

PIECES_BYTES = tuple(1 << bits for bits in range(14, 23))  # 16 KiB to 4 MiB
_BUFFERS = 4
_BUFFER_BYTES = 4 << 20
_REPEATS = 25
_LAST_BEGIN_S = 0.3
_TIE = 1.02
_ROOT = Path("/")


class _ProbeEntry(msgspec.Struct, frozen=True):
    """The cached results of one machine."""

    piece_bytes: int


def piece_bytes() -> int:
    """The piece size at which this machine sums several buffers fastest: from the cache, or measured.

    Measuring takes less than half a second. Only one worker per machine should call this and tell the
    others: workers that measure at the same time disturb each other.
    """
    machine, file = fingerprint(), _cache_file()
    known = _read(file)
    if machine in known and known[machine].piece_bytes in PIECES_BYTES:
        return known[machine].piece_bytes
    measured = fastest(sweep())
    if file is not None:
        entries = {**known, machine: _ProbeEntry(piece_bytes=measured)}
        with contextlib.suppress(ConfigError):
            write_whole(file, msgspec.json.format(msgspec.json.encode(entries)))
    return measured


def fastest(seconds: Mapping[int, Sequence[float]]) -> int:
    """The size with the smallest median time; of those within 2 % of it, the smallest size."""
    medians = {size: statistics.median(times) for size, times in seconds.items()}
    best = min(medians.values())
    return min(size for size, median in medians.items() if median <= _TIE * best)


def sweep(sizes: Sequence[int] = PIECES_BYTES) -> dict[int, list[float]]:
    """Seconds to sum four buffers and write the sum to all of them, several times for each piece size.

    Sizes alternate, so that other load on the machine affects all of them.
    """
    import numpy as np

    buffers = [np.full(_BUFFER_BYTES // 4, 0, dtype=np.float32) for _ in range(_BUFFERS)]
    seconds: dict[int, list[float]] = {size: [] for size in sizes}
    _sum(buffers, max(sizes) // 4)  # untimed: the first access to memory is slower
    begun = time.perf_counter()
    for repeat in range(_REPEATS):
        if repeat and time.perf_counter() - begun > _LAST_BEGIN_S:
            break
        for size in sizes:
            started = time.perf_counter()
            _sum(buffers, size // 4)
            seconds[size].append(time.perf_counter() - started)
    return seconds


def _sum(buffers: Sequence[npt.NDArray[np.float32]], step: int) -> None:
    """Sum as the workers of one machine do, in one process."""
    import numpy as np

    for low in range(0, len(buffers[0]), step):
        first, *others = (buffer[low : low + step] for buffer in buffers)
        for other in others:
            np.add(first, other, out=first)
        for other in others:
            np.copyto(other, first)


def fingerprint(root: Path = _ROOT) -> str:
    """What determines the result: processor, caches, cores and the version of torch."""
    machine = describe_machine(root)
    caches = " ".join(cache_sizes(root)) or "unknown"
    return f"{machine.cpu}, caches {caches}, {machine.cores_logical} cores, torch {machine.torch}"


def cache_sizes(root: Path = _ROOT) -> list[str]:
    """The caches of the first core, such as `L2:1024K`; empty if the system does not tell."""
    found = []
    for index in sorted((root / "sys/devices/system/cpu/cpu0/cache").glob("index*")):
        with contextlib.suppress(OSError):
            level, size = ((index / name).read_text().strip() for name in ("level", "size"))
            found.append(f"L{level}:{size}")
    return found


def _cache_file() -> Path | None:
    given = os.environ.get("ECHELON_CACHE", "")
    try:
        folder = Path(given).expanduser() if given else cache_folder()
    except RuntimeError:  # no home folder
        return None
    return folder / "probe.json"


def _read(file: Path | None) -> dict[str, _ProbeEntry]:
    """The file's valid entries."""
    if file is None:
        return {}
    try:
        found: dict[str, Any] = msgspec.json.decode(file.read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return {}
    entries = {}
    for machine, entry in found.items():
        with contextlib.suppress(msgspec.MsgspecError):
            entries[machine] = msgspec.convert(entry, _ProbeEntry)
    return entries
