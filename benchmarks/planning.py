"""How long does planning take, and what does the plan bring by prediction? From 4 to 1,000 nodes.

    python benchmarks/planning.py [--quick] [--json]

Nodes of four speeds at one to eight sites, drawn by a seed. The peer is what somebody gets who plans
nothing, predicted in the same run: all nodes with equal shares.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from typing import Any

from echelon.plan.job import ComputeCost, JobProfile, Layer
from echelon.plan.predict.predict import predict
from echelon.plan.search import search
from echelon.plan.topology import Node, Topology, Uplink

SIZES = (4, 14, 100, 1000)
SPEEDS = (0.1, 0.2, 0.5, 1.0)


def cluster(count: int, seed: int) -> Topology:
    """Unequal nodes at some sites, each joined with each."""
    draw = random.Random(seed)
    sites = [f"site-{index}" for index in range(min(8, max(1, count // 7)))]
    nodes = tuple(
        Node(
            name=f"node-{index}",
            site=sites[index % len(sites)],
            speed=draw.choice(SPEEDS) * draw.uniform(0.9, 1.1),
            up_bytes_per_s=1.19e8,
            down_bytes_per_s=1.19e8,
            latency_s=1e-4,
        )
        for index in range(count)
    )
    pairs = [(one, other) for at, one in enumerate(sites) for other in sites[:at]]
    uplinks = tuple(Uplink(between=pair, bytes_per_s=1.19e8, latency_s=2e-3) for pair in pairs)
    return Topology(nodes=nodes, uplinks=uplinks)


def job(count: int) -> JobProfile:
    """Ten layers of 1 MB, 16 samples for each node."""
    layers = tuple(
        Layer(name=f"layer {at}", size_bytes=1_000_000, ready_at=1 - at / 20) for at in range(10)
    )
    cost = ComputeCost(fixed_s=0.01, per_sample_s=0.02, apply_s=0.005)
    return JobProfile(name="ten layers", batch=16 * count, cost=cost, layers=layers)


def measure(count: int) -> dict[str, Any]:
    """Plan once for a cluster of so many nodes."""
    topology, work = cluster(count, seed=count), job(count)
    start, cpu = time.perf_counter(), time.process_time()
    result = search(topology, work, predict=predict)
    taken_s, cpu_s = time.perf_counter() - start, time.process_time() - cpu
    everyone = [one for one in result.candidates if len(one.strategy.nodes) == count]
    equal = [one for one in everyone if max(one.strategy.shares) == min(one.strategy.shares)]
    return {
        "nodes": count,
        "planning_s": taken_s,
        "planning_cpu_s": cpu_s,
        "predictions": len(result.candidates),
        "complete": result.complete,
        "chosen": len(result.best.strategy.nodes),
        "step_s": result.best.step_s,
        "equal_step_s": equal[0].step_s if equal else None,
    }


def main() -> None:
    """Print a table, or JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="up to 100 nodes")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    rows = [measure(count) for count in SIZES if count <= 100 or not asked.quick]
    if asked.json:
        print(json.dumps(rows))
        return
    print("nodes  planning s  (CPU s)  predictions  chosen  step ms  equal shares ms     x")
    for row in rows:
        equal = row["equal_step_s"]
        ratio = f"{equal / row['step_s']:5.2f}" if equal else "     "
        shown = f"{1e3 * equal:15.0f}" if equal else " " * 15
        took = f"{row['planning_s']:10.2f}  {row['planning_cpu_s']:7.2f}  {row['predictions']:11}"
        found = f"{row['chosen']:6}  {1e3 * row['step_s']:7.0f}"
        print(f"{row['nodes']:5}  {took}  {found}  {shown} {ratio}")


if __name__ == "__main__":
    main()
