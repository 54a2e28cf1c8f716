"""How long is a training step? Echelon against DistributedDataParallel, taking turns in one run.

    python benchmarks/step.py [--quick] [--json] [--only alexnet|mlp]

alexnet  two workers of this machine, 224x224 pixels, 8 samples each
mlp      four layers of 1024x1024 (16.8 MB of gradients), 32 samples each, on 2 and 4 emulated nodes at
         1 Gb/s (root): also as a multiple of max(compute, wire limit). Compute is a step of all nodes
         without any communication; the wire limit is 2(P-1)/P of the bytes at the rate of one plain TCP
         stream, both measured in the same run
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import allreduce
import cluster
import echelon
from echelon.comm.meet.place import Place
from echelon.zoo.dataset import SampleSpec
from echelon.zoo.model import MODELS

Step = Callable[[], None]


def model_of(kind: str) -> tuple[nn.Module, Tensor, Tensor]:
    """A model and a batch."""
    torch.manual_seed(0)
    if kind == "alexnet":
        model = MODELS.build("alexnet").build(
            SampleSpec(shape=(3, 224, 224), dtype="float32", classes=1000, task="classify")
        )
        return model, torch.randn(8, 3, 224, 224), torch.randint(1000, (8,))
    layers = [layer for _ in range(4) for layer in (nn.Linear(1024, 1024), nn.ReLU())]
    return nn.Sequential(*layers[:-1]), torch.randn(32, 1024), torch.randint(1024, (32,))


def stepping(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Step:
    """One step of training."""

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()

    return step


def work(kind: str, turns: int, steps: int) -> None:
    """One worker's part."""
    torch.set_num_threads(1)
    logging.disable(logging.INFO)
    place = Place.from_environment(os.environ)
    session = echelon.join(record=False, round_timeout_s=60)
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{place.address}:{place.port + 1}",
        rank=place.rank,
        world_size=place.world_size,
    )
    variants: dict[str, Step] = {}
    models: dict[str, nn.Module] = {}

    def add(name: str, wrap: Callable[[nn.Module, torch.optim.Optimizer], tuple[Any, Any]]) -> None:
        model, x, y = model_of(kind)
        models[name] = model
        model, optimizer = wrap(model, torch.optim.SGD(model.parameters(), lr=1e-3))
        variants[name] = stepping(model, optimizer, x, y)

    add("compute", lambda model, optimizer: (model, optimizer))
    add("ddp", lambda model, optimizer: (nn.parallel.DistributedDataParallel(model), optimizer))
    whole = "auto" if kind == "alexnet" else "never"  # on one machine, auto sends no factors
    ways = {
        "backward": {"overlap": "backward", "factors": whole},
        "step": {"overlap": "step", "factors": whole},
    }
    if kind == "mlp":
        ways["factors"] = {"overlap": "step", "factors": "auto"}
    for name, options in ways.items():
        add(name, lambda model, optimizer, o=options: session.prepare(model, optimizer, **o))
    times: dict[str, list[float]] = {name: [] for name in variants}
    for turn in range(turns + 1):
        for name, step in list(variants.items())[:: 1 if turn % 2 else -1]:
            dist.barrier()
            begun = time.perf_counter()
            for _ in range(steps):
                step()
            for p in models[name].parameters():
                p.detach()  # late updates count
            dist.barrier()
            if turn:
                times[name].append((time.perf_counter() - begun) / steps)
    found: dict[str, Any] = {name: statistics.median(values) for name, values in times.items()}
    if kind == "mlp":
        assert session._rendezvous is not None
        found["stream_bytes_per_s"] = allreduce.stream(session._rendezvous, place)
    if place.rank == 0:
        print(json.dumps(found), flush=True)
    dist.barrier()
    session.close()
    dist.destroy_process_group()


def main() -> None:
    """Measure and print."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    options.add_argument("--quick", action="store_true", help="fewer repeats")
    options.add_argument("--json", action="store_true")
    options.add_argument("--only", default="alexnet,mlp")
    asked = options.parse_args()
    rows = []
    if "alexnet" in asked.only:
        found = cluster.measure(__file__, 2, "alexnet", "3" if asked.quick else "7", "3")
        rows.append({"what": "alexnet", "workers": 2, **found})
    if "mlp" in asked.only:
        for workers in (2, 4):
            lab = cluster.nodes(workers, "1gbit")
            found = cluster.measure(__file__, workers, "mlp", "3" if asked.quick else "5", "15", lab=lab)
            whole = 4 * 1024 * 1025 * 4
            wire = 2 * (workers - 1) / workers * whole / found["stream_bytes_per_s"]
            rows.append({"what": "mlp", "workers": workers, **found, "wire": wire})
    for row in rows:
        row |= ratios(row)
        if not asked.json:
            show(row)
    if asked.json:
        print(json.dumps(rows))


def ratios(row: dict[str, Any]) -> dict[str, float]:
    """What the targets are about."""
    if row["what"] == "alexnet":
        return {"speedup": row["ddp"] / row["backward"], "target": 1.25}
    limit = max(row["compute"], row["wire"])
    names = ("ddp", "backward", "step")
    return {f"{name} of the limit": row[name] / limit for name in names} | {
        "target": 1.05,
        "factors of ddp": row["factors"] / row["ddp"],
        "factors target": 0.3,
    }


def show(row: dict[str, Any]) -> None:
    """A few lines."""
    print(f"{row['what']}, {row['workers']} workers, a step:")
    for name in ("compute", "wire", "ddp", "backward", "step", "factors"):
        if name in row:
            print(f"  {name:9s} {row[name] * 1e3:8.1f} ms")
    for name in row:
        if " of " in name or name == "speedup":
            print(f"  {name}: {row[name]:.2f}")
    sys.stdout.flush()


if __name__ == "__main__":
    if cluster.is_worker():
        work(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
    else:
        main()
