"""What do checks against silent corruption cost, in percent of a step? In turns with none, in one run.

    python benchmarks/verify.py [--quick] [--json] [--models resnet18,char-transformer]

Two workers of this machine, one thread each, train a model of the zoo. In every turn each check has some
steps, in a session of its own; a check's cost is the median over turns of its median step over that of none
in the same turn. Checks that take place every few steps are measured in every step (each time), and divided
by their default (in a run). replicate(2) has half of the global batch, so that every worker has as many
samples as without it: its figure is the comparison alone, and the samples are computed twice besides.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import socket
import statistics
import sys
import time
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import echelon
from echelon.zoo.dataset import SampleSpec
from echelon.zoo.model import MODELS

WORKERS = 2
NONE = "none"
CHECKS = {  # text: by how many steps its cost is divided in a run with default options
    "gradients": 1,
    "weights(every=1)": 50,
    "replay(every=1)": 100,
    "replicate(2)": 1,
    "gradients; weights(every=1); replay(every=1)": 0,
}
SHAPES = {
    "resnet18": ((3, 32, 32), "float32", "classify", 4),
    "char-transformer": ((64,), "int64", "next-token", 8),
    "mlp(width=1024)": ((784,), "float32", "classify", 64),
}


def job(model: str, batch: int, steps: int) -> tuple[nn.Module, DataLoader[Any]]:
    """A model of the zoo with random samples."""
    shape, dtype, task, _ = SHAPES[model]
    spec = SampleSpec(shape=shape, dtype=dtype, classes=64, task=task)  # type: ignore[arg-type]
    text = dtype == "int64"
    many = batch * steps
    torch.manual_seed(0)
    x = torch.randint(64, (many, *shape)) if text else torch.randn(many, *shape)
    y = torch.randint(64, (many, *shape) if text else (many,))
    return MODELS.build(model).build(spec), DataLoader(TensorDataset(x, y), batch_size=batch)


def step_s(model_name: str, verify: str, steps: int) -> float:
    """The median time of a step, in a session of its own."""
    share = SHAPES[model_name][3]
    batch = share * (1 if verify.startswith("replicate") else WORKERS)
    model, loader = job(model_name, batch, steps)
    times = []
    with echelon.join(record=False, verify=verify, shares="equal") as session:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        model, optimizer, loader = session.prepare(model, optimizer, loader)
        before = time.perf_counter()
        for x, y in loader:
            optimizer.zero_grad()
            logits = model(x)
            nn.functional.cross_entropy(logits.reshape(-1, 64), y.reshape(-1)).backward()
            optimizer.step()
            now = time.perf_counter()
            times.append(now - before)
            before = now
    return statistics.median(times[2:])


def work(rank: int, ports: list[int], models: list[str], steps: int, results: Any) -> None:
    """One worker: every check once in each turn."""
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(WORKERS), "LOCAL_RANK": str(rank)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}
    waiting = iter(ports)
    per_turn = len(models) * (1 + len(CHECKS))
    for _ in range(len(ports) // per_turn):
        for model in models:
            for verify in (NONE, *CHECKS):
                os.environ["MASTER_PORT"] = str(next(waiting))
                found = step_s(model, verify, steps)
                if rank == 0:
                    results.put((model, verify, found))


def free_ports(count: int) -> list[int]:
    """Ports that nobody uses now."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def measure(models: list[str], turns: int, steps: int) -> dict[tuple[str, str], list[float]]:
    """The times of all turns, by model and check."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    sessions = turns * len(models) * (1 + len(CHECKS))
    ports = free_ports(sessions)
    workers = [
        context.Process(target=work, args=(rank, ports, models, steps, results)) for rank in range(WORKERS)
    ]
    for worker in workers:
        worker.start()
    found: dict[tuple[str, str], list[float]] = {}
    for _ in range(sessions):
        model, verify, seconds = results.get(timeout=60)
        found.setdefault((model, verify), []).append(seconds)
    for worker in workers:
        worker.join(60)
    return found


def rows(found: dict[tuple[str, str], list[float]], models: list[str]) -> list[dict[str, Any]]:
    """One row for each model and check."""
    made = []
    for model in models:
        base = found[model, NONE]
        for verify, every in CHECKS.items():
            ratios = [one / plain for one, plain in zip(found[model, verify], base, strict=True)]
            each = 100 * (statistics.median(ratios) - 1)
            made.append(
                {
                    "model": model,
                    "step_ms": 1000 * statistics.median(base),
                    "check": verify,
                    "each_time_percent": each,
                    "in_a_run_percent": each / every if every else None,
                }
            )
    return made


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--models", default=",".join(SHAPES))
    asked = parser.parse_args()
    models = asked.models.split(",")
    turns, steps = (1, 6) if asked.quick else (3, 8)
    made = rows(measure(models, turns, steps), models)
    if asked.json:
        json.dump(made, sys.stdout, indent=1)
        return
    print("| model | step without | check | each time | in a run |")
    print("|---|---|---|---|---|")
    for row in made:
        run = row["in_a_run_percent"]
        shown = f"{run:.1f} %" if run is not None else ""
        print(
            f"| {row['model']} | {row['step_ms']:.1f} ms | `{row['check']}` "
            f"| {row['each_time_percent']:.1f} % | {shown} |"
        )


if __name__ == "__main__":
    main()
