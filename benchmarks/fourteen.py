"""The first seed's cluster, 14 nodes in four groups: LeNet to 95 % on MNIST, by plan, by hand, by DDP.

    ECHELON_DATA=... python benchmarks/fourteen.py [--rounds 1] [--only plan,ddp] [--json FILE]

An emulated cluster (root needed): the shipped lab `seed1-table1`. `plan` runs what `echelon plan` writes
for it. The fixed choices are what a user may try by hand: nodes, shares, collective. DDP (Gloo) has all 14
nodes and equal batches. The global batch is 128. After every 6,400 samples the model is evaluated on 2,000
test images; the time is that from the first step to the evaluation that reaches 95 %, evaluations included.
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
from collections.abc import Callable
from pathlib import Path
from typing import Any

_LAB, _BATCH, _LR, _TARGET, _MOST_PASSES = "seed1-table1", 128, 0.04, 0.95, 25
# Options of `echelon run` for each way.
WAYS: dict[str, list[str]] = {
    "plan": [],
    "14 nodes, nothing told": [],
    "14 nodes, equal, ring": ["--shares", "equal", "--collective", "ring"],
    "14 nodes, by speed, ring": ["--shares", "by-speed", "--collective", "ring"],
    "14 nodes, by speed, groups": [
        "--shares", "by-speed", "--collective", "hierarchical(sizes=[4, 4, 3, 3])"
    ],
    "8 nodes, equal, ring": ["--workers", "8", "--shares", "equal", "--collective", "ring"],
    "8 nodes, by speed, ring": ["--workers", "8", "--shares", "by-speed", "--collective", "ring"],
    "8 nodes, by speed, direct": ["--workers", "8", "--shares", "by-speed", "--collective", "direct"],
    "4 nodes, equal, ring": ["--workers", "4", "--shares", "equal", "--collective", "ring"],
    "ddp": [],
}  # fmt: skip


def work(way: str) -> None:
    """In every worker: train until the target is reached; the first one prints the seconds."""
    import torch
    from torch.utils.data import DataLoader, RandomSampler, Subset

    from echelon.zoo.dataset import DATASETS
    from echelon.zoo.model import MODELS

    torch.manual_seed(0)
    splits = DATASETS.build("mnist").load()
    model = MODELS.build("lenet").build(splits.spec)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=_LR, momentum=0.9)
    seeded = torch.Generator().manual_seed(0)
    sampler = RandomSampler(splits.train, num_samples=50 * _BATCH, generator=seeded)
    test_set = Subset(splits.test, range(2000))
    together: Callable[[Any], Any]
    if way == "ddp":
        import torch.distributed as dist

        from echelon.observe.readiness import WorkerPhase, tell

        dist.init_process_group("gloo")
        rank, size = dist.get_rank(), dist.get_world_size()
        seeded.manual_seed(rank)
        sampler = RandomSampler(splits.train, num_samples=50 * (_BATCH // size), generator=seeded)
        loader = DataLoader(
            splits.train, batch_size=_BATCH // size, sampler=sampler, collate_fn=splits.collate
        )
        test = DataLoader(
            Subset(test_set, range(rank, 2000, size)), batch_size=500, collate_fn=splits.collate
        )
        model = torch.nn.parallel.DistributedDataParallel(model)
        together = dist.all_reduce
        tell(WorkerPhase.TRAINING)  # the lab's CPU quotas begin when all workers say so
    else:
        import echelon

        session = echelon.join()
        rank = session.rank
        loader = DataLoader(splits.train, batch_size=_BATCH, sampler=sampler, collate_fn=splits.collate)
        test = DataLoader(test_set, batch_size=500, collate_fn=splits.collate)
        model, optimizer, loader, test = session.prepare(model, optimizer, loader, test)
        together = session.all_reduce
    begun, steps, reached = time.perf_counter(), 0, None
    correct = torch.zeros(2)
    for _ in range(_MOST_PASSES):
        model.train()
        for x, y in loader:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            steps += 1
        model.eval()
        correct = torch.zeros(2)
        with torch.no_grad():
            for x, y in test:
                correct += torch.tensor([float((model(x).argmax(1) == y).sum()), float(len(y))])
        together(correct)
        if float(correct[0] / correct[1]) >= _TARGET:
            reached = time.perf_counter() - begun
            break
    if rank == 0:
        took = time.perf_counter() - begun
        accuracy = float(correct[0] / correct[1])
        found = {"seconds": reached, "accuracy": accuracy, "steps": steps, "step_ms": 1e3 * took / steps}
        print(json.dumps(found), flush=True)
    if way == "ddp":
        import torch.distributed as dist

        dist.barrier()  # the first worker has the store, without which the others would not end
        dist.destroy_process_group()


def run(way: str) -> dict[str, Any]:
    """One run in the lab."""
    with tempfile.TemporaryDirectory() as folder:
        options = [*WAYS[way]]
        if way == "plan":
            file = str(Path(folder) / "plan.toml")
            plan = ["plan", "--lab", _LAB, "--model", "lenet", "--data", "mnist", "--batch", str(_BATCH)]
            said = _echelon([*plan, "-o", file])
            print(said, file=sys.stderr)
            options = ["--plan", file]
        command = ["run", "--lab", _LAB, "--runs", folder, *options]
        printed = _echelon([*command, str(Path(__file__).resolve()), "--work", way])
    line = next(line for line in printed.splitlines() if line.startswith('{"seconds"'))
    return dict(json.loads(line))


def _echelon(command: list[str]) -> str:
    """Run a command; what it printed."""
    done = subprocess.run(
        [sys.executable, "-m", "echelon", *command],
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
    return done.stdout


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--only", default="", help="ways whose names begin so, with commas")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--work", default="")
    args = parser.parse_args()
    if args.work and "RANK" in os.environ:
        work(args.work)
        return
    asked = args.only.split(",") if args.only else [""]
    names = [way for way in WAYS if any(way.startswith(one) for one in asked)]
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for turn in range(args.rounds):
        for name in names:
            found[name].append(run(name))
            print(f"turn {turn + 1}, {name}: {found[name][-1]}", file=sys.stderr, flush=True)
    seconds = {
        name: statistics.median(one["seconds"] or float("inf") for one in runs)
        for name, runs in found.items()
    }
    print(f"{'LeNet to 95 % on MNIST, 14 nodes':34s} {'seconds':>8s} {'ms/step':>8s} {'steps':>6s}")
    for name, runs in found.items():
        step_ms = statistics.median(one["step_ms"] for one in runs)
        print(f"{name:34s} {seconds[name]:8.1f} {step_ms:8.1f} {runs[-1]['steps']:6d}")
    fixed = [seconds[name] for name in names if name not in ("plan", "ddp", "14 nodes, nothing told")]
    if "plan" in seconds and fixed:
        part = seconds["plan"] / min(fixed)
        print(f"plan against the best fixed choice: {part:.2f} x its time (target 1.1)")
    if {"plan", "ddp"} <= set(seconds):
        print(f"plan against DDP: {seconds['ddp'] / seconds['plan']:.2f} x faster (target 3)")
    if args.json:
        args.json.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
