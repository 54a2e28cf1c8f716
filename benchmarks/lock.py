"""Does a trainer that holds the interpreter lock hold up communication? An all-reduce beside four trainers.

    python benchmarks/lock.py [--quick] [--json]

Two workers over loopback TCP, 16 MB. Meanwhile each trainer waits, multiplies matrices (torch lets go of
the lock), runs the backward pass of many small layers (torch takes and lets go all the time), or runs plain
Python without pause (it lets go only when it is asked to). Also: how long a thread waits for the lock,
measured by one that sleeps for a millisecond at a time; 99 of 100 waits are shorter than the figure.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable

import torch
from torch import nn

import cluster
from echelon.comm.engine import Engine, EngineGroup
from echelon.comm.meet.place import Place
from echelon.comm.meet.rendezvous import meet

_LENGTH = 4_000_000


def trainers() -> dict[str, Callable[[], None]]:
    """What a trainer does meanwhile, some milliseconds at a time."""
    square = torch.ones(512, 512)
    deep = nn.Sequential(*[nn.Linear(32, 32) for _ in range(50)])
    x = torch.ones(8, 32)
    return {
        "waits": lambda: time.sleep(0.005),
        "multiplies": lambda: [square @ square for _ in range(2)] and None,
        "small layers": lambda: deep(x).sum().backward(),
        "plain Python": lambda: sum(i * i for i in range(50_000)) and None,
    }


def work(repeats: int) -> None:
    """One worker's part."""
    torch.set_num_threads(1)
    place = Place.from_environment(os.environ)
    rendezvous = meet(
        place, node=os.environ["BENCH_NODE"], host=socket.gethostname(), pid=os.getpid(), timeout_s=120
    )
    engine = Engine.connect(rendezvous, place, shared_memory=False, deadline_s=60, timeout_s=60)
    group = EngineGroup(engine, "auto")
    tensor = torch.zeros(_LENGTH)
    found: dict[str, dict[str, float]] = {}
    for name, train in trainers().items():
        seconds, late = [], []
        for turn in range(repeats + 1):
            group.barrier()
            begun = time.perf_counter()
            pending = group.all_reduce(tensor)
            while not pending.done():
                train()
            pending.wait()
            if turn:
                seconds.append(pending.timing.ended - begun)
        stop = threading.Event()
        watcher = threading.Thread(target=_watch, args=(stop, late))
        watcher.start()
        until = time.perf_counter() + 1.0
        while time.perf_counter() < until:
            train()
        stop.set()
        watcher.join()
        group.barrier()
        late.sort()
        found[name] = {"seconds": statistics.median(seconds), "lock_s": late[int(0.99 * len(late))]}
    if place.rank == 0:
        print(json.dumps(found), flush=True)
    group.barrier()
    group.close()


def _watch(stop: threading.Event, late: list[float]) -> None:
    while not stop.is_set():
        begun = time.perf_counter()
        time.sleep(0.001)
        late.append(time.perf_counter() - begun - 0.001)


def main() -> None:
    """Measure and print."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    options.add_argument("--quick", action="store_true", help="fewer repeats")
    options.add_argument("--json", action="store_true")
    asked = options.parse_args()
    found = cluster.measure(__file__, 2, "3" if asked.quick else "11")
    if asked.json:
        print(json.dumps(found))
        return
    for name, row in found.items():
        ratio = row["seconds"] / found["waits"]["seconds"]
        print(
            f"trainer {name:13s} all-reduce {row['seconds'] * 1e3:8.1f} ms  {ratio:5.2f} x   "
            f"lock waited for {row['lock_s'] * 1e3:6.2f} ms"
        )


if __name__ == "__main__":
    if cluster.is_worker():
        work(int(sys.argv[1]))
    else:
        main()
