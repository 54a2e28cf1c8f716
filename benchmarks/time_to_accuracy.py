"""Time to 95 % on MNIST with LeNet, policy by policy, on four unequal nodes of which two are held up.

    ECHELON_DATA=... python benchmarks/time_to_accuracy.py [--rounds 3] [--only full,async] [--json FILE]

An emulated cluster (root needed): processors of 0.5, 0.35, 0.25 and 0.15 of a core, 1 Gb/s; the two slower
nodes pause max(0, normal(0, 0.25)) seconds in every step; servers run on a node of their own. Batches of
64. Policies that apply every gradient whole use a quarter of the learning rate, for four are applied
where `full` applies their mean. After every 4,800 samples the model is evaluated on 2,000 test images; the
time is that from the first step to the evaluation that reaches 95 %, evaluations included. Policies take
turns. Hogwild is missing, for it needs one machine.
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

_LAB = """
[[node]]
name = "a"
cpu = 0.5
link = "1gbit"
[[node]]
name = "b"
cpu = 0.35
link = "1gbit"
[[node]]
name = "c"
cpu = 0.25
link = "1gbit"
[[node]]
name = "d"
cpu = 0.15
link = "1gbit"
[[node]]
name = "server"
cpu = 0.4
link = "1gbit"
"""
_LR, _TARGET, _MOST_PASSES = 0.02, 0.95, 40
# policy: whether it needs a server, and its learning rate as a part of the usual one
POLICIES = {
    "full": (False, 1.0),
    "local(8)": (False, 1.0),
    "gossip": (False, 1.0),
    "elastic-averaging": (False, 1.0),
    "elastic-averaging(asynchronous=true)": (True, 1.0),
    "percentage(shares=[1, 1, 0.2, 0.2])": (True, 1.0),
    "flexible": (True, 1.0),
    "backup(2)": (True, 1.0),
    "bounded-delay(4)": (True, 1.0),
    "smooth-switch(step=200)": (True, 0.25),
    "async": (True, 0.25),
    "delay-compensated": (True, 0.25),
    "downpour": (True, 0.25),
    "levels(full, async)": (True, 0.5),
    "none": (False, 1.0),
}


def work(lr: float) -> None:
    """In every worker: train until the target is reached."""
    import torch
    from torch.utils.data import DataLoader, RandomSampler, Subset

    import echelon
    from echelon.zoo.dataset import DATASETS
    from echelon.zoo.model import MODELS

    session = echelon.join()
    torch.manual_seed(0)
    splits = DATASETS.build("mnist").load()
    model = MODELS.build("lenet").build(splits.spec)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    sampler = RandomSampler(splits.train, num_samples=4800, generator=torch.Generator().manual_seed(0))
    loader = DataLoader(splits.train, batch_size=64, sampler=sampler, collate_fn=splits.collate)
    test = DataLoader(Subset(splits.test, range(2000)), batch_size=500, collate_fn=splits.collate)
    model, optimizer, loader, test = session.prepare(model, optimizer, loader, test)
    loss_fn = torch.nn.functional.cross_entropy
    begun = time.perf_counter()
    reached = None
    for _ in session.epochs(_MOST_PASSES):
        model.train()
        for x, y in loader:
            optimizer.zero_grad()
            loss_fn(model(x), y).backward()
            optimizer.step()
        model.eval()
        correct = torch.zeros(2)
        with torch.no_grad():
            for x, y in test:
                correct += torch.tensor([float((model(x).argmax(1) == y).sum()), float(len(y))])
        session.all_reduce(correct)
        if float(correct[0] / correct[1]) >= _TARGET:
            reached = time.perf_counter() - begun
            break
    if session.is_leader:
        accuracy = float(correct[0] / correct[1])
        print(json.dumps({"seconds": reached, "accuracy": accuracy, "passes": session.epoch + 1}))


def run(policy: str) -> dict[str, float | None]:
    """One run in a lab."""
    served, part = POLICIES[policy]
    with tempfile.TemporaryDirectory() as folder:
        lab = Path(folder) / "lab.toml"
        lab.write_text(_LAB)
        command = [
            sys.executable, "-m", "echelon", "run", "--lab", str(lab), "--workers", "4",
            "--sync", policy, "--servers", str(int(served)), "--delay", "normal(0, 0.25)",
            "--delayed", "0.5", "--runs", folder, "--groups", "2,2",
            str(Path(__file__).resolve()), "--work", str(_LR * part),
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
    line = next(line for line in done.stdout.splitlines() if line.startswith('{"seconds"'))
    return dict(json.loads(line))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="")
    parser.add_argument("--json")
    parser.add_argument("--work", type=float)
    args = parser.parse_args()
    if args.work:
        work(args.work)
        return
    names = [
        name
        for name in POLICIES
        if not args.only or name == "full" or name.partition("(")[0] in args.only.split(",")
    ]
    found: dict[str, list[dict[str, float | None]]] = {name: [] for name in names}
    for turn in range(args.rounds):
        for name in names:
            found[name].append(run(name))
            print(f"turn {turn + 1}, {name}: {found[name][-1]}", file=sys.stderr, flush=True)
    print("four unequal nodes, two of them held up; seconds to 95 % on MNIST, median")
    print(f"{'policy':40s} {'lr':>6s} {'seconds':>8s} {'x full':>7s} {'passes':>7s} {'accuracy':>9s}")
    full = statistics.median(one["seconds"] or float("inf") for one in found["full"])
    for name, runs in found.items():
        seconds = statistics.median(one["seconds"] or float("inf") for one in runs)
        passes = statistics.median(one["passes"] or 0 for one in runs)
        accuracy = statistics.median(one["accuracy"] or 0 for one in runs)
        gain = f"{full / seconds:6.2f}x" if seconds < float("inf") else "      -"
        lr = _LR * POLICIES[name][1]
        print(f"{name:40s} {lr:6.3f} {seconds:8.1f} {gain} {passes:7.0f} {accuracy:8.1%}")
    if args.json:
        Path(args.json).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
