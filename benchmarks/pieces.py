"""How fast is a sum, by the size of the pieces it is done in? The curve has its best near the L2 cache.

    python benchmarks/pieces.py [--quick] [--json]

ring   a piece comes in (is copied to a landing place) and is added to the own buffer: two streams
ps     a server sums the same piece of four workers' buffers into a fifth

GB/s is of what comes in: the buffer for a ring, four buffers for a server. Sizes take turns, medians are
shown. The peer is torch on whole buffers, unpieced, in the same run: x is how often faster the pieces are.
One thread; 64 MB buffers.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from echelon.cluster.machine import describe_machine
from echelon.cluster.probe import piece_bytes

SIZES = [1 << bits for bits in range(13, 24)]  # 8 KiB to 8 MiB
LENGTH = 16_000_000
WORKERS = 4
BAR = 40

Buffer = npt.NDArray[np.float32]


def ring(own: Buffer, incoming: Buffer, landing: Buffer, step: int) -> None:
    """Receive a piece, add it while it is in the cache, and so on."""
    for low in range(0, len(own), step):
        came = incoming[low : low + step]
        place = landing[: len(came)]
        np.copyto(place, came)
        mine = own[low : low + step]
        np.add(mine, place, out=mine)


def server(total: Buffer, buffers: list[Buffer], step: int) -> None:
    """Sum a piece of all buffers, then the next one."""
    for low in range(0, len(total), step):
        first, second, *others = (buffer[low : low + step] for buffer in buffers)
        place = total[low : low + step]
        np.add(first, second, out=place)
        for other in others:
            np.add(place, other, out=place)


def whole_ring(own: Buffer, incoming: Buffer, landing: Buffer) -> None:
    """The peer: all of it comes in, then all of it is added."""
    mine, came, place = (torch.from_numpy(buffer) for buffer in (own, incoming, landing))
    place.copy_(came)
    mine.add_(place)


def whole_server(total: Buffer, buffers: list[Buffer]) -> None:
    """The peer: one whole buffer after the other."""
    place = torch.from_numpy(total)
    first, second, *others = (torch.from_numpy(buffer) for buffer in buffers)
    torch.add(first, second, out=place)
    for other in others:
        place.add_(other)


def measure(repeats: int) -> list[dict[str, Any]]:
    """One row for each kind and size, and one for each peer (size None)."""
    total, landing, *buffers = (np.full(LENGTH, 0, dtype=np.float32) for _ in range(WORKERS + 2))
    own, incoming = buffers[:2]
    runs: dict[tuple[str, int | None], Callable[[], None]] = {
        ("ring", None): partial(whole_ring, own, incoming, landing),
        ("ps", None): partial(whole_server, total, buffers),
    }
    for size in SIZES:
        runs["ring", size] = partial(ring, own, incoming, landing, size // 4)
        runs["ps", size] = partial(server, total, buffers, size // 4)
    seconds: dict[tuple[str, int | None], list[float]] = {key: [] for key in runs}
    for turn in range(repeats + 1):  # the first turn warms up
        for key, run in runs.items():
            begun = time.perf_counter()
            run()
            if turn:
                seconds[key].append(time.perf_counter() - begun)
    median = {key: statistics.median(times) for key, times in seconds.items()}
    streams = {"ring": 1, "ps": WORKERS}
    return [
        {
            "what": kind,
            "piece_bytes": size,
            "GB/s": streams[kind] * 4 * LENGTH / median[kind, size] / 1e9,
            "ratio": median[kind, None] / median[kind, size],
        }
        for kind, size in runs
    ]


def show(rows: list[dict[str, Any]], chosen: int, l2_bytes: int | None) -> None:
    """A bar for each size; the size that the engine uses, and the L2 cache, are marked."""
    for kind in ("ring", "ps"):
        mine = [row for row in rows if row["what"] == kind]
        best = max(row["GB/s"] for row in mine)
        for row in mine:
            size = row["piece_bytes"]
            name = "torch, whole" if size is None else f"{size >> 10} KiB"
            bar = "#" * round(BAR * row["GB/s"] / best)
            marks = ["measured piece"] * (size == chosen) + ["L2"] * (size is not None and size == l2_bytes)
            line = f"{kind:5s}{name:>13s} {row['GB/s']:6.2f} GB/s {row['ratio']:5.2f} x  {bar:{BAR}s}"
            print(f"{line}  {', '.join(marks)}".rstrip())
        print()
    cache = "not known" if l2_bytes is None else f"{l2_bytes >> 10} KiB"
    print(f"measured piece: {chosen >> 10} KiB, L2: {cache}")


def main() -> None:
    """Measure and print."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    options.add_argument("--quick", action="store_true", help="fewer repeats")
    options.add_argument("--json", action="store_true")
    asked = options.parse_args()
    torch.set_num_threads(1)
    chosen, l2_bytes = piece_bytes(), describe_machine().l2_bytes
    rows = measure(3 if asked.quick else 9)
    if asked.json:
        print(json.dumps({"piece_bytes": chosen, "l2_bytes": l2_bytes, "rows": rows}))
    else:
        show(rows, chosen, l2_bytes)


if __name__ == "__main__":
    main()
