"""What does a step cost if the run could go on without lost workers? With --min-workers and without.

    python benchmarks/membership.py [--quick] [--json]

Two workers train an MLP of 4 x 256, and one of 4 x 1,024, over shared memory and over TCP. Runs alternate.
The figure is the median over runs of the median step; nothing is lost meanwhile. Runs differ by more than
the option costs, so what it adds is also measured inside its runs: the part of each step's round that a run
without the option does not have, at the median step, over the median step.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

_SCRIPT = """
import json, os, statistics, sys, time
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import echelon
from echelon.reduce.reducer import Reducer

added, round_s, inner_s = [], Reducer._landed_without_lost, Reducer._receive_all

def timed(self, changes):
    began = time.perf_counter()
    landed = round_s(self, changes)
    added.append(time.perf_counter() - began - self.spent)
    return landed

def receiving(self):
    began = time.perf_counter()
    landed = inner_s(self)
    self.spent = time.perf_counter() - began
    return landed

Reducer._landed_without_lost, Reducer._receive_all = timed, receiving
width, steps = int(sys.argv[1]), int(sys.argv[2])
torch.manual_seed(0)
session = echelon.join(seed=1)
layers = [part for _ in range(4) for part in (nn.Linear(width, width), nn.ReLU())]
model = nn.Sequential(*layers)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
data = TensorDataset(torch.randn(steps * 256, width))
model, optimizer, loader = session.prepare(model, optimizer, DataLoader(data, batch_size=256))
times, last = [], None
for (x,) in loader:
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
    now = time.perf_counter()
    if last is not None:
        times.append(now - last)
    last = now
if session.is_leader:
    extra = statistics.median(added[10:]) if added else 0.0
    print(json.dumps({"step_ms": 1e3 * statistics.median(times[10:]), "added_ms": 1e3 * extra}))
"""


def step_ms(width: int, transport: str, steps: int, *, survives: bool) -> tuple[float, float]:
    """The median step of one run, and how much of it the option has added."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "train.py").write_text(_SCRIPT)
        # Without the option, layers may send factors and shares may adapt; here only the copies differ.
        words = ["--workers", "2", "--transport", transport, "--shares", "equal", "--factors", "never"]
        words += ["--min-workers", "1"] if survives else []
        command = [sys.executable, "-m", "echelon", "run", *words, "train.py", str(width), str(steps)]
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, check=True, env=dict(os.environ)
        )
        line = next(line for line in done.stdout.splitlines() if line.startswith('{"step_ms"'))
        figures = json.loads(line)
        return figures["step_ms"], figures["added_ms"]


def main() -> None:
    """Print a row for each model and transport, or the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer and shorter runs")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    turns, steps = (2, 60) if asked.quick else (9, 150)
    rows = []
    for width in (256, 1024):
        for transport in ("shm", "tcp"):
            without, with_it, added = [], [], []
            for turn in range(turns):
                for survives in (False, True) if turn % 2 else (True, False):
                    found, extra = step_ms(width, transport, steps, survives=survives)
                    (with_it if survives else without).append(found)
                    added += [extra] if survives else []
            before, after = statistics.median(without), statistics.median(with_it)
            row = {"width": width, "transport": transport, "off_ms": before, "on_ms": after}
            rows.append({**row, "added_ms": statistics.median(added)})
    if asked.json:
        print(json.dumps(rows))
        return
    print("model     transport  off        on         added    of the step")
    for row in rows:
        model, part = f"4 x {row['width']}", row["added_ms"] / row["on_ms"]
        times = f"{row['off_ms']:7.2f} ms {row['on_ms']:7.2f} ms {row['added_ms']:6.3f} ms  {part:7.1%}"
        print(f"{model:9} {row['transport']:9} {times}")


if __name__ == "__main__":
    main()
