"""What does a step cost if the run could go on without lost workers? With --min-workers and without.

    python benchmarks/membership.py [--quick] [--json]

Two workers train an MLP of 4 x 256, and one of 4 x 1,024, over shared memory and over TCP. Runs alternate.
The figure is the median over runs of the median step; nothing is lost meanwhile.
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
    print(json.dumps({"step_ms": 1e3 * statistics.median(times[10:])}))
"""


def step_ms(width: int, transport: str, steps: int, *, survives: bool) -> float:
    """The median step of one run."""
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
        return float(json.loads(line)["step_ms"])


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
            without, with_it = [], []
            for turn in range(turns):
                for survives in (False, True) if turn % 2 else (True, False):
                    found = step_ms(width, transport, steps, survives=survives)
                    (with_it if survives else without).append(found)
            before, after = statistics.median(without), statistics.median(with_it)
            rows.append({"width": width, "transport": transport, "off_ms": before, "on_ms": after})
    if asked.json:
        print(json.dumps(rows))
        return
    print("model     transport  off        on         ratio")
    for row in rows:
        model, ratio = f"4 x {row['width']}", row["on_ms"] / row["off_ms"]
        times = f"{row['off_ms']:6.2f} ms  {row['on_ms']:6.2f} ms"
        print(f"{model:8}  {row['transport']:9}  {times}  {ratio:.3f}")


if __name__ == "__main__":
    main()
