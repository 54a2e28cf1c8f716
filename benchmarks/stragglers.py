"""Four workers, one of them five times slower and jittery: how much work gets done, policy by policy?

    python benchmarks/stragglers.py [--seconds 6] [--rounds 3] [--json FILE]

Every worker's gradient takes 30 ms, one worker's 150 ms, give or take 40 %. They wait that long, as for
an accelerator, so that the figures do not depend on how many cores this machine has. Counted are samples
whose gradients (or deltas) were applied, over the time; dropped ones are not. What a worker does alone
counts, for it is merged later. The first second does not: detectors get to know the workers, and the first
batches cost more. Each policy is compared with `full` and with the same cluster without the
straggler; per useful worker means: of the three others, without what the straggler adds. Policies take
turns; the medians of their ratios are printed.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

_USUAL_S, _SLOW, _JITTER = 0.03, 5.0, 0.4
_BEFORE_S = 1.0  # not counted
_BATCH = 16
POLICIES = {
    "full": 0,
    "flexible": 1,
    "percentage(shares=[1, 1, 1, 0.2])": 1,
    "backup(1)": 1,
    "bounded-delay(3)": 1,
    "smooth-switch(step=100)": 1,
    "async": 1,
    "local(8)": 0,
}


def work(seconds: float) -> None:
    """In every worker: train for some seconds, then say how many samples counted."""
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    import echelon

    session = echelon.join()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(
        torch.randn(200_000, 64, generator=generator), torch.randint(0, 10, (200_000,), generator=generator)
    )
    loader = DataLoader(data, batch_size=_BATCH * session.world_size, shuffle=True)
    model, optimizer, loader = session.prepare(model, optimizer, loader)
    slow = session.world_size == 4 and session.rank == 3
    draw = random.Random(session.rank)
    counted = 0
    started = time.perf_counter()
    begun = None
    for step, (x, y) in enumerate(loader, 1):
        if begun is None and time.perf_counter() - started > _BEFORE_S:
            begun = time.perf_counter()
            counted = 0
        pause_s = _USUAL_S * (_SLOW * draw.uniform(1 - _JITTER, 1 + _JITTER) if slow else 1.0)
        time.sleep(pause_s)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        counted += 1
        over_s = 0.0 if begun is None else time.perf_counter() - begun
        if over_s > seconds and (not _in_lockstep() or step % 8 == 0):
            over = torch.tensor([1.0])
            if _in_lockstep():
                session.all_reduce(over)
            break
        if _in_lockstep() and step % 8 == 0 and float(session.all_reduce(torch.tensor([0.0]))) > 0:
            break
    elapsed_s = time.perf_counter() - begun
    counts = torch.zeros(session.world_size)
    counts[session.rank] = counted / elapsed_s
    session.all_reduce(counts)
    if session.is_leader:
        print(json.dumps({"steps_per_s": counts.tolist()}))


def _in_lockstep() -> bool:
    return sys.argv[-1] in ("full", "local(8)")


def run(policy: str, workers: int, seconds: float) -> dict[str, float]:
    """Samples per second that counted, and of how many workers."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable, "-m", "echelon", "run", "--workers", str(workers), "--sync", policy,
            "--servers", str(POLICIES[policy]), "--runs", folder,
            str(Path(__file__).resolve()), "--work", str(seconds), policy,
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        if done.returncode:
            raise SystemExit(done.stdout + done.stderr)
        line = next(line for line in done.stdout.splitlines() if line.startswith('{"steps_per_s"'))
        per_s = json.loads(line)["steps_per_s"]
        kept = _kept(Path(folder), workers)
    counted = [rate * share for rate, share in zip(per_s, kept, strict=True)]
    return {"samples_per_s": sum(counted) * _BATCH, "per_s": counted}


def _kept(folder: Path, workers: int) -> list[float]:
    """The share of each worker's work that was applied, by the server's record."""
    from echelon.observe.events import Arrived, Decided, read_events

    pushed, dropped = [0] * workers, [0] * workers
    alone = [0] * workers
    for file in folder.glob(f"*/events/*{workers}*"):
        for event in read_events(file):
            if isinstance(event, Arrived) and event.worker >= 0:
                pushed[event.worker] += event.kind in ("gradient", "delta", "weights")
                alone[event.worker] += event.kind == "ask"
            elif isinstance(event, Decided) and event.what == "drop" and "left out" not in event.reason:
                dropped[event.worker] += 1
    return [1.0 if not p or a else 1 - d / p for p, d, a in zip(pushed, dropped, alone, strict=True)]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json")
    parser.add_argument("--work", nargs=2)
    args = parser.parse_args()
    if args.work:
        work(float(args.work[0]))
        return
    found: dict[str, list[dict[str, float]]] = {name: [] for name in POLICIES}
    without: list[float] = []
    for turn in range(args.rounds):
        print(f"turn {turn + 1} of {args.rounds}", file=sys.stderr, flush=True)
        without.append(run("full", 3, args.seconds)["samples_per_s"])
        for name in POLICIES:
            found[name].append(run(name, 4, args.seconds))
    print("four workers, one five times slower; samples/s that counted, medians")
    columns = f"{'policy':38s} {'samples/s':>9s} {'of full':>8s} {'of 3 without it':>16s}"
    print(f"{columns} {'per useful worker':>18s}")
    print(f"{'full, 3 workers without the straggler':38s} {statistics.median(without):9.0f}")
    for name, runs in found.items():
        rate = statistics.median(one["samples_per_s"] for one in runs)
        of_full = statistics.median(
            one["samples_per_s"] / full["samples_per_s"]
            for one, full in zip(runs, found["full"], strict=True)
        )
        of_without = statistics.median(
            one["samples_per_s"] / base for one, base in zip(runs, without, strict=True)
        )
        useful = statistics.median(
            (sum(sorted(one["per_s"])[1:]) * _BATCH / 3) / (base / 3)
            for one, base in zip(runs, without, strict=True)
        )
        print(f"{name:38s} {rate:9.0f} {of_full:7.2f}x {of_without:15.2f}x {useful:17.2f}x")
    if args.json:
        Path(args.json).write_text(json.dumps({"without": without, "found": found}))


if __name__ == "__main__":
    main()
