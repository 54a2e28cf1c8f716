"""Unequal CPUs: how much of the ideal gain do shares bring when nothing is told? DDP beside it.

    python benchmarks/unequal.py [--quick] [--clusters 5] [--seconds 12] [--only auto,equal]
    python benchmarks/unequal.py --alike --rounds 5 --only auto,equal

Lab nodes with CPU quotas train a small convolutional net; the batch is global. `equal` gives every worker
the same share, `by-speed` the quotas that the lab's file states, `without-slowest` too, on all nodes but
the slowest, `auto` is told nothing. The ideal gain on equal shares is the sum of the speeds over the number
of nodes times the slowest one: it knows no cost of a step apart from its samples. DDP (Gloo) has equal
batches. The first cluster has quotas of 0.8, 0.4, 0.2 and 0.1 of a core; the others are drawn at random. Of
each run the first part is not counted (`--warm-up`), in which `auto` still measures. `--alike`: two workers
of this machine without quotas, where automatic shares can only cost something.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

_WAYS = ("ddp", "equal", "by-speed", "without-slowest", "auto")

_SHARES = {
    "ddp": "equal",
    "without-slowest": "by-speed",
}


def work(way: str, batch: int, seconds: float, warm_up_s: float, steps: int = 0) -> None:
    """In every worker: train for some seconds, or steps; rank 0 prints samples per second."""
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(1024, 10),
    )  # fmt: skip
    data = TensorDataset(torch.randn(4096, 3, 32, 32), torch.randint(0, 10, (4096,)))
    if way == "ddp":
        import torch.distributed as dist

        from echelon.observe.readiness import WorkerPhase, tell

        dist.init_process_group("gloo")
        rank, size = dist.get_rank(), dist.get_world_size()
        model = nn.parallel.DistributedDataParallel(model)
        loader = DataLoader(data, batch_size=batch // size, shuffle=True)
        together = dist.all_reduce
        tell(WorkerPhase.TRAINING)  # the lab's CPU quotas begin when all workers say so
    else:
        import echelon

        session = echelon.join()
        rank = session.rank
        loader = DataLoader(data, batch_size=batch, shuffle=True, drop_last=True)
        together = session.all_reduce
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    if way != "ddp":
        model, optimizer, loader = session.prepare(model, optimizer, loader)
    begun, step, ends = time.perf_counter(), 0, []
    while True:
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            step += 1
            ends.append(time.perf_counter() - begun)
            if steps and step == steps:
                break
            if not steps and step % 16 == 0:
                over = torch.tensor([1.0 if rank == 0 and ends[-1] > seconds + warm_up_s else 0.0])
                together(over)
                if float(over) > 0:
                    break
        else:
            continue
        break
    if rank == 0:
        late = [end for end in ends if end > warm_up_s] or ends
        rate = batch * (len(late) - 1) / (late[-1] - late[0])
        print(
            json.dumps({"rate": rate, "steps": step, "ends": [round(end, 3) for end in ends[:60]]}),
            flush=True,
        )
    if way == "ddp":
        dist.destroy_process_group()


def lab_of(quotas: list[float]) -> str:
    """The lab file of a cluster."""
    node = '[[node]]\nname = "n{at}"\ncpu = {quota}\nlink = "1gbit"\n'
    return "".join(node.format(at=at, quota=quota) for at, quota in enumerate(quotas))


def run(way: str, quotas: list[float], options: argparse.Namespace) -> dict[str, float]:
    """One run; what rank 0 found."""
    if way == "without-slowest":
        quotas = sorted(quotas)[1:]
    with tempfile.TemporaryDirectory() as folder:
        lab = Path(folder) / "unequal.toml"
        lab.write_text(lab_of(quotas))
        shares = _SHARES.get(way, way)
        where = ["--workers", str(len(quotas))] if options.alike else ["--lab", str(lab)]
        command = [sys.executable, "-m", "echelon", "run", *where, "--shares", shares]
        command += ["--runs", folder, __file__, "--work", way, "--batch", str(options.batch)]
        command += ["--seconds", str(options.seconds), "--warm-up", str(options.warm_up)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        if options.verbose:
            print(done.stderr, file=sys.stderr)
        if done.returncode:
            raise SystemExit(f"{way}: {done.stderr[-2000:]}")
        return json.loads(done.stdout.strip().splitlines()[-1])


def drawn(count: int, seed: int = 14) -> list[list[float]]:
    """Clusters at random: 3 to 6 nodes, speeds from 0.05 to 0.8 of a core, 1.5 cores in all at most."""
    rng = random.Random(seed)
    found = []
    for _ in range(count):
        speeds = [rng.uniform(0.05, 0.8) for _ in range(rng.randint(3, 6))]
        scale = min(1.0, 1.5 / sum(speeds))
        found.append([round(max(0.05, speed * scale), 2) for speed in speeds])
    return found


def main() -> None:
    """Measure every way on every cluster, in turns."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    options.add_argument("--work", default="")
    options.add_argument("--batch", type=int, default=96)
    options.add_argument("--seconds", type=float, default=12.0)
    options.add_argument("--warm-up", type=float, default=5.0)
    options.add_argument("--steps", type=int, default=0)
    options.add_argument("--clusters", type=int, default=5)
    options.add_argument("--quotas", default="", help="one cluster of these, with commas, and no others")
    options.add_argument("--rounds", type=int, default=1)
    options.add_argument("--only", default="")
    options.add_argument("--quick", action="store_true")
    options.add_argument("--alike", action="store_true")
    options.add_argument("--verbose", action="store_true")
    asked = options.parse_args()
    if asked.work and "RANK" in os.environ:
        work(asked.work, asked.batch, asked.seconds, asked.warm_up, asked.steps)
        return
    ways = [way for way in _WAYS if not asked.only or way in asked.only.split(",")]
    clusters = [[0.8, 0.4, 0.2, 0.1], *(() if asked.quick else drawn(asked.clusters))]
    if asked.quotas:
        clusters = [[float(one) for one in asked.quotas.split(",")]]
    if asked.alike:
        clusters = [[1.0] * 2]
    fractions = []
    for quotas in clusters:
        rates: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(asked.rounds):
            for way in ways:
                rates[way].append(run(way, quotas, asked)["rate"])
        medians = {way: statistics.median(found) for way, found in rates.items()}
        ideal = sum(quotas) / (len(quotas) * min(quotas))
        line = "  ".join(f"{way} {rate:.0f}" for way, rate in medians.items())
        if {"equal", "auto"} <= set(ways):
            gain = medians["auto"] / medians["equal"]
            fractions.append(gain / ideal)
            line += f"  gain {gain:.2f} of ideal {ideal:.2f}: {gain / ideal:.2f}"
        if {"without-slowest", "auto"} <= set(ways):
            line += f"  auto of without-slowest {medians['auto'] / medians['without-slowest']:.2f}"
        print(f"quotas {quotas}: samples/s {line}", flush=True)
    if fractions:
        usual = statistics.median(fractions)
        print(f"fraction of the ideal gain: median {usual:.2f}, least {min(fractions):.2f}")


if __name__ == "__main__":
    main()
