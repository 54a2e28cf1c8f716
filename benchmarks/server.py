"""How many gradients does a parameter server apply per second, beside Ray's and the memory's limit?

    python benchmarks/server.py [--workers 2,4,8] [--megabytes 0.5,4,16] [--seconds 3] [--rounds 3]
                                [--peer ray] [--before SRC]

Workers do nothing but push a gradient and take the weights (async, plain SGD), as fast as the server lets
them. The limit is a loop of numpy adds on the same number of bytes, w += g, in one thread. One worker needs
no server, so there are two or more.

With --peer ray the same work is done as Ray's example of a parameter server does it: an actor keeps the
weights, workers are actors that call it with a gradient, get the weights and copy them into their model.
With --before the package in the folder SRC is measured too, which holds an older Echelon. All take turns.
Beside it stands what the server's own work on one gradient takes: keeping it, applying an update, handing
out weights.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np

COSTS = ("queue_s", "apply_s", "hand_s")


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


def served(
    workers: int, elements: int, seconds: float, servers: int, source: str = ""
) -> tuple[float, dict[str, float]]:
    """Gradients applied per second, and what the first server spent on one; `source`: of which package."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable, "-m", "echelon", "run", "--workers", str(workers), "--sync", "async",
            "--servers", str(servers), "--runs", folder, str(Path(__file__).resolve()),
            "--work", str(elements), str(seconds),
        ]  # fmt: skip
        environment = {**os.environ, "PYTHONPATH": source} if source else None
        return _rate(command, environment), _costs(Path(folder), workers)


def _rate(command: list[str], environment: dict[str, str] | None = None) -> float:
    """What a run prints."""
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, check=False, env=environment
    )
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
    line = next(line for line in done.stdout.splitlines() if line.startswith('{"per_s"'))
    return float(json.loads(line)["per_s"])


def _costs(folder: Path, rank: int) -> dict[str, float]:
    from echelon.observe.events import ServerEnded, read_events

    for file in folder.glob("*/events/*"):
        for event in read_events(file):
            if isinstance(event, ServerEnded) and event.rank == rank:
                return {name: getattr(event, name) for name in COSTS}
    return {}


def ray_served(workers: int, elements: int, seconds: float) -> float:
    """As `served`, by Ray, in a process of its own."""
    words = ["--ray", str(workers), str(elements), str(seconds)]
    return _rate([sys.executable, str(Path(__file__).resolve()), *words])


def ray_work(workers: int, elements: int, seconds: float) -> None:
    """A parameter server as an actor, and workers as actors."""
    import ray
    import torch

    class Server:
        def __init__(self) -> None:
            self.weights = torch.zeros(elements)

        def push(self, gradient: np.ndarray) -> np.ndarray:
            self.weights.add_(torch.from_numpy(gradient), alpha=-1e-6)
            return self.weights.numpy()

    class Worker:
        def work(self, server: Any, seconds: float) -> float:
            torch.set_num_threads(1)
            warnings.simplefilter("ignore")  # Ray's arrays are read-only
            parameters = torch.zeros(elements)
            gradient = np.ones(elements, dtype=np.float32)
            begun, steps = time.perf_counter(), 0
            while time.perf_counter() - begun < seconds:
                parameters.copy_(torch.from_numpy(ray.get(server.push.remote(gradient))))
                steps += 1
            return steps / (time.perf_counter() - begun)

    ray.init(num_cpus=workers + 1, include_dashboard=False, log_to_driver=False, logging_level="error")
    actor: Any = ray.remote(num_cpus=1)
    server = actor(Server).remote()
    crew = [actor(Worker).remote() for _ in range(workers)]
    ray.get([one.work.remote(server, 0.5) for one in crew])  # all are up
    rates = ray.get([one.work.remote(server, seconds) for one in crew])
    ray.shutdown()
    print(json.dumps({"per_s": sum(rates)}))


def adds_per_s(elements: int, seconds: float) -> float:
    """A plain loop of additions."""
    weights, gradient = np.zeros(elements, dtype=np.float32), np.ones(elements, dtype=np.float32)
    begun, count = time.perf_counter(), 0
    while time.perf_counter() - begun < seconds:
        for _ in range(10):
            np.add(weights, gradient, out=weights)
        count += 10
    return count / (time.perf_counter() - begun)


def measure(size: float, workers: int, args: argparse.Namespace) -> None:
    """Print one line: the medians of some rounds, in which all take turns."""
    elements = int(size * 1e6 / 4) // 4 * 4
    found: dict[str, list[float]] = {"adds": [], "ours": []}
    costs = []
    for _ in range(args.rounds):
        found["adds"].append(adds_per_s(elements, 0.5))
        rate, cost = served(workers, elements, args.seconds, args.servers)
        found["ours"].append(rate)
        costs.append([cost.get(name, 0.0) * 1e3 for name in COSTS])
        if args.before:
            rate, _ = served(workers, elements, args.seconds, args.servers, args.before)
            found.setdefault("before", []).append(rate)
        if args.peer:
            found.setdefault(args.peer, []).append(ray_served(workers, elements, args.seconds))
    mid = {name: statistics.median(rates) for name, rates in found.items()}
    ratios = {
        name: statistics.median(ours / other for ours, other in zip(found["ours"], rates, strict=True))
        for name, rates in found.items()
        if name != "ours"
    }
    cost = ", ".join(f"{statistics.median(one[i] for one in costs):.2f}" for i in range(len(COSTS)))
    line = f"{size:5g} {workers:8d} {mid['ours']:12.0f} {mid['adds']:9.0f} {ratios['adds']:12.3f}x   {cost}"
    for name in ("before", args.peer):
        if name in found:
            line += f"   {name} {mid[name]:.0f}, {ratios[name]:.2f}x"
    print(line, flush=True)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--workers", default="2,4,8")
    parser.add_argument("--megabytes", default="0.5,4,16")
    parser.add_argument("--servers", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peer", choices=["ray"], default="")
    parser.add_argument("--before", default="")
    parser.add_argument("--work", nargs=2)
    parser.add_argument("--ray", nargs=3)
    args = parser.parse_args()
    if args.work:
        work(int(args.work[0]), float(args.work[1]))
        return
    if args.ray:
        ray_work(int(args.ray[0]), int(args.ray[1]), float(args.ray[2]))
        return
    columns = f"{'MB':>5s} {'workers':>8s} {'gradients/s':>12s} {'adds/s':>9s} {'of the limit':>13s}"
    print(f"{columns}   queue, apply, hand [ms]   other: gradients/s, ours / its")
    for size in map(float, args.megabytes.split(",")):
        for workers in map(int, args.workers.split(",")):
            measure(size, workers, args)


if __name__ == "__main__":
    main()
