"""How many gradients does a parameter server apply per second, beside the memory's limit?

    python benchmarks/server.py [--workers 2,4,8] [--megabytes 0.5,4,16] [--seconds 3] [--rounds 3]

Workers do nothing but push a gradient and take the weights (async, plain SGD), as fast as the server lets
them. The limit is a loop of numpy adds on the same number of bytes, w += g, in one thread. Both are
measured in turns. Beside it stands what the server's own work on one gradient takes: keeping it, applying
an update, handing out weights. One worker needs no server, so there are two or more.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np


def work(elements: int, seconds: float) -> None:
    """In every worker: push and pull for some seconds."""
    import torch
    from torch import nn

    import echelon

    session = echelon.join()
    model = nn.ParameterList([nn.Parameter(torch.zeros(part)) for part in _parts(elements)])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    model, optimizer = session.prepare(model, optimizer)
    session.barrier()
    begun, steps = time.perf_counter(), 0
    gradients = [torch.ones_like(p) for p in model]
    while time.perf_counter() - begun < seconds:
        for p, gradient in zip(model, gradients, strict=True):
            p.grad = gradient
        optimizer.step()
        steps += 1
    elapsed_s = time.perf_counter() - begun
    session.pause()
    rates = torch.zeros(session.world_size)
    rates[session.rank] = steps / elapsed_s
    session.all_reduce(rates)
    if session.is_leader:
        print(json.dumps({"per_s": float(rates.sum())}))


def _parts(elements: int) -> list[int]:
    """A few parameters, as a model would have."""
    return [elements // 4] * 4


def served(workers: int, elements: int, seconds: float, servers: int) -> tuple[float, dict[str, float]]:
    """Gradients applied per second, and what the first server spent on one."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable, "-m", "echelon", "run", "--workers", str(workers), "--sync", "async",
            "--servers", str(servers), "--runs", folder, str(Path(__file__).resolve()),
            "--work", str(elements), str(seconds),
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        if done.returncode:
            raise SystemExit(done.stdout + done.stderr)
        line = next(line for line in done.stdout.splitlines() if line.startswith('{"per_s"'))
        return json.loads(line)["per_s"], _costs(Path(folder), workers)


def _costs(folder: Path, rank: int) -> dict[str, float]:
    from echelon.observe.events import Logged, read_events

    for file in folder.glob("*/events/*"):
        for event in read_events(file):
            if isinstance(event, Logged) and event.rank == rank and "queue_s" in event.values:
                return event.values
    return {}


def adds_per_s(elements: int, seconds: float) -> float:
    """A plain loop of additions."""
    weights, gradient = np.zeros(elements, dtype=np.float32), np.ones(elements, dtype=np.float32)
    begun, count = time.perf_counter(), 0
    while time.perf_counter() - begun < seconds:
        for _ in range(10):
            np.add(weights, gradient, out=weights)
        count += 10
    return count / (time.perf_counter() - begun)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--workers", default="2,4,8")
    parser.add_argument("--megabytes", default="0.5,4,16")
    parser.add_argument("--servers", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--work", nargs=2)
    args = parser.parse_args()
    if args.work:
        work(int(args.work[0]), float(args.work[1]))
        return
    columns = f"{'MB':>5s} {'workers':>8s} {'gradients/s':>12s} {'adds/s':>9s} {'of the limit':>13s}"
    print(f"{columns}   queue, apply, hand [ms]")
    for size in map(float, args.megabytes.split(",")):
        elements = int(size * 1e6 / 4) // 4 * 4
        for workers in map(int, args.workers.split(",")):
            rates, limits, costs = [], [], []
            for _ in range(args.rounds):
                limits.append(adds_per_s(elements, 0.5))
                rate, cost = served(workers, elements, args.seconds, args.servers)
                rates.append(rate)
                costs.append([cost.get(name, 0.0) * 1e3 for name in ("queue_s", "apply_s", "hand_s")])
            ratio = statistics.median(r / limit for r, limit in zip(rates, limits, strict=True))
            cost = [statistics.median(one[i] for one in costs) for i in range(3)]
            print(
                f"{size:5g} {workers:8d} {statistics.median(rates):12.0f} {statistics.median(limits):9.0f} "
                f"{ratio:12.3f}x   {cost[0]:.2f}, {cost[1]:.2f}, {cost[2]:.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
