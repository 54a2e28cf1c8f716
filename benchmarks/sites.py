"""Two sites of four nodes, 1 Gb/s inside, one shared uplink of 100 Mb/s: a hierarchy against flat rings.

    python benchmarks/sites.py [--quick] [--json]

All-reduce of 4.2 MB in the lab (root): hierarchical, a ring in the order of sites, a ring whose neighbours
are on alternating sites, and Gloo in both orders. The limit is what has to cross the uplink each way, one
buffer, at its rate.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import sys
import time
from typing import Any

import torch

import cluster
from echelon.cluster.lab.spec import LabSpec, parse_lab
from echelon.comm.c10d import C10dGroup
from echelon.comm.engine import Engine, EngineGroup
from echelon.comm.group import Group
from echelon.comm.meet.place import Place
from echelon.comm.meet.rendezvous import meet

_LENGTH = 1_050_000  # of float32: 4.2 MB
_UPLINK_BYTES_PER_S = 100e6 / 8


def lab(order: str) -> LabSpec:
    """The two sites, with ranks in the order of sites or alternating between them."""
    sites = [("a", index) for index in range(4)] + [("b", index) for index in range(4)]
    if order == "alternating":
        sites.sort(key=lambda node: (node[1], node[0]))
    nodes = "".join(
        f'[[node]]\nname = "{site}{index}"\nsite = "{site}"\nlink = "1gbit"\n' for site, index in sites
    )
    return parse_lab(
        f'{nodes}[[uplink]]\nbetween = ["a", "b"]\nrate = "100mbit"\n', file="benchmark", name="sites"
    )


def work(order: str, repeats: int) -> None:
    """One worker's part."""
    torch.set_num_threads(1)
    place = Place.from_environment(os.environ)
    rendezvous = meet(
        place, node=os.environ["BENCH_NODE"], host=socket.gethostname(), pid=os.getpid(), timeout_s=120
    )
    gloo = C10dGroup.connect(rendezvous, place, deadline_s=120)
    engine = Engine.connect(rendezvous, place, shared_memory=False, deadline_s=120, timeout_s=60)
    groups: dict[str, Group] = {"ring": EngineGroup(engine, "ring"), "gloo": gloo}
    if order == "by site":
        groups["hierarchical"] = EngineGroup(engine, "hierarchical(group=4, rails=true)")
    times: dict[str, list[float]] = {name: [] for name in groups}
    tensor = torch.zeros(_LENGTH)
    for turn in range(repeats + 1):
        for name in list(groups)[:: 1 if turn % 2 else -1]:
            gloo.barrier()
            begun = time.perf_counter()
            groups[name].all_reduce(tensor).wait()
            if turn:
                times[name].append(time.perf_counter() - begun)
    if place.rank == 0:
        print(json.dumps({name: statistics.median(values) for name, values in times.items()}), flush=True)
    gloo.barrier()
    groups["ring"].close()
    gloo.close()


def main() -> None:
    """Measure and print."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    options.add_argument("--quick", action="store_true", help="fewer repeats")
    options.add_argument("--json", action="store_true")
    asked = options.parse_args()
    repeats = "3" if asked.quick else "9"
    ordered = cluster.measure(__file__, 8, "by site", repeats, lab=lab("by site"))
    mixed = cluster.measure(__file__, 8, "alternating", repeats, lab=lab("alternating"))
    found: dict[str, Any] = {
        "limit": _LENGTH * 4 / _UPLINK_BYTES_PER_S,
        "hierarchical": ordered["hierarchical"],
        "ring by site": ordered["ring"],
        "ring alternating": mixed["ring"],
        "gloo by site": ordered["gloo"],
        "gloo alternating": mixed["gloo"],
    }
    targets = {"ring by site": 1.6, "ring alternating": 4.0}
    if asked.json:
        ratios = {name: found[name] / found["hierarchical"] for name in found}
        print(json.dumps({"seconds": found, "ratios": ratios, "targets": targets}))
        return
    for name, seconds in found.items():
        target = f" (target {targets[name]:.1f})" if name in targets else ""
        ratio = seconds / found["hierarchical"]
        print(f"{name:18s} {seconds * 1e3:8.1f} ms  {ratio:5.2f} x hierarchical{target}", flush=True)


if __name__ == "__main__":
    if cluster.is_worker():
        work(sys.argv[1], int(sys.argv[2]))
    else:
        main()
