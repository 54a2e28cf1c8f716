"""How fast are small operations and messages between workers of one machine? Against Gloo, in one run.

    python benchmarks/small.py [--quick] [--json] [--only group|session|pair]

group    all-reduce and gather of 2 KB inside the library, 2 workers, and 4 workers; also against
         DeepSpeed's all-reduce in shared memory, if it is installed
session  the script's calls with 2 KB, 2 workers: all workers also compare that they make the same call
pair     one message there and one back, half the time of both; 4 KB to 16 MB, 2 workers
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import cluster
from echelon.comm.c10d import C10dGroup
from echelon.comm.engine import Engine, EngineGroup
from echelon.comm.meet.place import Place
from echelon.comm.meet.rendezvous import meet
from echelon.train.collectives import ScriptCollectives

FLOATS = 512
SIZES = (4 << 10, 16 << 10, 32 << 10, 1 << 20, 4 << 20, 16 << 20)
Act = Callable[[], Any]


def work(kind: str, turns: int) -> None:
    """One worker's part."""
    torch.set_num_threads(1)
    place = Place.from_environment(os.environ)
    rendezvous = meet(
        place, node=os.environ["BENCH_NODE"], host=socket.gethostname(), pid=os.getpid(), timeout_s=120
    )
    gloo = C10dGroup.connect(rendezvous, place, deadline_s=60)
    engine = Engine.connect(rendezvous, place, shared_memory=True, deadline_s=60, timeout_s=60)
    ours = EngineGroup(engine, "auto")
    pairs = {"group": in_groups, "session": in_sessions, "pair": between_two}[kind](ours, gloo)
    rows = []
    for name, (repeats, acts) in pairs.items():
        rows.append({"what": name, **compare(gloo, acts, repeats, turns)})
    if place.rank == 0:
        print(json.dumps({"rows": rows}), flush=True)
    gloo.barrier()
    ours.close()
    gloo.close()


def compare(gloo: C10dGroup, acts: dict[str, Act], repeats: int, turns: int) -> dict[str, float]:
    """Median seconds of one of `repeats` calls in a row; the peers take turns."""
    times: dict[str, list[float]] = {name: [] for name in acts}
    for turn in range(turns + 1):
        for name in acts if turn % 2 else reversed(acts):
            gloo.barrier()
            acts[name]()  # all workers are there
            begun = time.perf_counter()
            for _ in range(repeats):
                acts[name]()
            if turn:
                times[name].append((time.perf_counter() - begun) / repeats)
    return {name: statistics.median(values) for name, values in times.items()}


def in_groups(ours: EngineGroup, gloo: C10dGroup) -> dict[str, tuple[int, dict[str, Act]]]:
    """Calls of the library's own groups."""
    mine, theirs = torch.ones(FLOATS), torch.ones(FLOATS)

    reduced: dict[str, Act] = {
        "ours": lambda: ours.all_reduce(mine, "max").wait(),
        "gloo": lambda: gloo.all_reduce(theirs, "max").wait(),
    }
    deepspeed = deepspeed_reduction()
    if deepspeed is not None:
        reduced["deepspeed"] = deepspeed
    gathered: dict[str, Act] = {
        "ours": lambda: ours.all_gather(mine),
        "gloo": lambda: gloo.all_gather(theirs),
    }
    return {"all_reduce": (200, reduced), "all_gather": (200, gathered)}


def deepspeed_reduction() -> Act | None:
    """DeepSpeed's all-reduce in shared memory, which compiles its kernel on first use; None without it."""
    try:
        from deepspeed.ops.op_builder import ShareMemCommBuilder  # type: ignore[import-not-found]
    except ImportError:
        return None
    os.environ["LOCAL_SIZE"] = os.environ["WORLD_SIZE"]
    builder = ShareMemCommBuilder().load()
    builder.initialize(dist.get_world_size(), dist.get_rank())
    tensor = torch.zeros(FLOATS)
    return lambda: torch.ops.deepspeed.inference_all_reduce_(tensor)


def in_sessions(ours: EngineGroup, gloo: C10dGroup) -> dict[str, tuple[int, dict[str, Act]]]:
    """Calls that a script makes."""
    session = ScriptCollectives(ours, ["here"] * ours.size)
    mine, theirs = torch.ones(FLOATS), torch.ones(FLOATS)
    parts = [torch.empty(FLOATS) for _ in range(gloo.size)]
    maximum = dist.ReduceOp.MAX
    calls: dict[str, tuple[Act, Act]] = {
        "all_reduce": (lambda: session.all_reduce(mine, "max"), lambda: dist.all_reduce(theirs, maximum)),
        "all_gather": (lambda: session.all_gather(mine), lambda: dist.all_gather(parts, theirs)),
        "broadcast": (lambda: session.broadcast(mine), lambda: dist.broadcast(theirs, 0)),
        "barrier": (session.barrier, dist.barrier),
    }
    return {name: (200, {"ours": own, "gloo": peer}) for name, (own, peer) in calls.items()}


def between_two(ours: EngineGroup, gloo: C10dGroup) -> dict[str, tuple[int, dict[str, Act]]]:
    """A message there and one back; each counts as two."""
    found: dict[str, tuple[int, dict[str, Act]]] = {}
    peer = 1 - ours.rank
    for size in SIZES:
        out, into = torch.ones(size // 4), torch.zeros(size // 4)

        def there_and_back(send: Act, receive: Act) -> None:
            for act in (send, receive) if ours.rank == 0 else (receive, send):
                act()

        def own(out: torch.Tensor = out, into: torch.Tensor = into) -> None:
            there_and_back(lambda: ours.send(out, peer).wait(), lambda: ours.receive(into, peer).wait())

        def theirs(out: torch.Tensor = out, into: torch.Tensor = into) -> None:
            there_and_back(lambda: dist.send(out, peer), lambda: dist.recv(into, peer))

        found[f"{size // 1024} KB"] = (100 if size < 1 << 20 else 8, {"ours": own, "gloo": theirs})
    return found


def main() -> None:
    """Measure and print."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    options.add_argument("--quick", action="store_true", help="fewer turns")
    options.add_argument("--json", action="store_true")
    options.add_argument("--only", default="group,session,pair")
    asked = options.parse_args()
    turns = "5" if asked.quick else "15"
    rows: list[dict[str, Any]] = []
    for kind in asked.only.split(","):
        for workers in (2, 4) if kind == "group" else (2,):
            for row in cluster.measure(__file__, workers, kind, turns)["rows"]:
                if kind == "pair":
                    row |= {name: row[name] / 2 for name in ("ours", "gloo")}
                rows.append({"kind": kind, "workers": workers, **row})
                if not asked.json:
                    show(rows[-1])
    if asked.json:
        print(json.dumps(rows))


def show(row: dict[str, Any]) -> None:
    """One line."""
    line = (
        f"{row['kind']:7s} {row['workers']} workers {row['what']:>10s}: ours {row['ours'] * 1e3:7.4f} ms, "
        f"gloo {row['gloo'] * 1e3:7.4f} ms, {row['gloo'] / row['ours']:6.1f} x"
    )
    if "deepspeed" in row:
        line += f"; deepspeed {row['deepspeed'] * 1e3:7.4f} ms"
    print(line, flush=True)


if __name__ == "__main__":
    if cluster.is_worker():
        work(sys.argv[1], int(sys.argv[2]))
    else:
        main()
