"""Echelon on Ray against Ray Train: time to the first step of four workers, and AlexNet's samples a second.

    python benchmarks/launchers_ray.py [--quick] [--json] [--only start|alexnet]

Both use one Ray that is up before, take turns, and train the same model with a CPU for each worker. Ray
Train is TorchTrainer with DistributedDataParallel.

start    four workers, a small model: from the start of the command until rank 0 has ended its first step
alexnet  two workers, 224x224 pixels, 8 samples each: samples a second after the first steps
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path += [str(ROOT / "src"), str(ROOT / "tests")]

from engines.ray import RayEngine  # noqa: E402 - found by the line above

# What both train: arguments are the model's name, the number of steps, and where rank 0 writes its times.
COMMON = """
import os, sys, time

def build(kind):
    import torch
    torch.manual_seed(0)
    if kind == "small":
        return torch.nn.Linear(64, 10), torch.randn(16, 64), torch.randint(10, (16,))
    from echelon.zoo.dataset import SampleSpec
    from echelon.zoo.model import MODELS
    spec = SampleSpec(shape=(3, 224, 224), dtype="float32", classes=1000, task="classify")
    model = MODELS.build("alexnet").build(spec)
    return model, torch.randn(8, 3, 224, 224), torch.randint(1000, (8,))

def train(model, optimizer, x, y, rank, steps, told):
    import torch
    skipped = min(3, steps - 1)
    for step in range(steps):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        if step == 0:
            first = time.time()
        if step == skipped:
            begun = time.perf_counter()
    rate = (steps - 1 - skipped) / max(1e-9, time.perf_counter() - begun)
    if rank == 0:
        with open(told, "w") as file:
            file.write(f"{first} {rate}")
"""
OURS = (
    COMMON
    + """
import torch, echelon
session = echelon.join()
model, x, y = build(sys.argv[1])
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
model, optimizer = session.prepare(model, optimizer)
train(model, optimizer, x, y, session.rank, int(sys.argv[2]), sys.argv[3])
"""
)
THEIRS = (
    COMMON
    + """
import ray
from ray import train as ray_train
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_model

def loop(config):
    import torch
    model, x, y = build(config["kind"])
    model = prepare_model(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    rank = ray_train.get_context().get_world_rank()
    train(model, optimizer, x, y, rank, config["steps"], config["told"])

kind, steps, told, workers, folder = sys.argv[1:]
TorchTrainer(
    loop,
    train_loop_config={"kind": kind, "steps": int(steps), "told": told},
    scaling_config=ScalingConfig(num_workers=int(workers), resources_per_worker={"CPU": 1}),
    run_config=RunConfig(storage_path=folder),
).fit()
"""
)


@dataclass(frozen=True)
class Measured:
    """One run."""

    first_step_s: float
    steps_per_s: float


def measure(command: list[str], folder: Path, env: dict[str, str], told: Path) -> Measured:
    """Run one command, of which rank 0 writes its times to `told`."""
    told.unlink(missing_ok=True)
    begun = time.time()
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=300)
    if done.returncode or not told.exists():
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
    first, rate = map(float, told.read_text().split())
    for name in ("runs", "theirs"):
        shutil.rmtree(folder / name, ignore_errors=True)
    return Measured(first - begun, rate)


def turns(
    engine: RayEngine, folder: Path, kind: str, workers: int, steps: int, repeats: int
) -> list[dict[str, Measured]]:
    """Both, in turns that begin with one and the other."""
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "PYTHONPATH": path, **engine.env}
    told = folder / "told"
    words = [kind, str(steps), str(told)]
    commands = {
        "ours": [sys.executable, "-m", "echelon", "run", *engine.words(workers), "ours.py", *words],
        "theirs": [sys.executable, "theirs.py", *words, str(workers), str(folder / "theirs")],
    }
    return [
        {
            name: measure(command, folder, env, told)
            for name, command in list(commands.items())[:: 1 if turn % 2 else -1]
        }
        for turn in range(repeats)
    ]


def first_step(engine: RayEngine, folder: Path, repeats: int) -> dict[str, object]:
    """Seconds to the first step of four workers."""
    found = turns(engine, folder, "small", 4, 5, repeats)
    return {
        "what": "first step of 4 workers [s]",
        "echelon": statistics.median(turn["ours"].first_step_s for turn in found),
        "ray train": statistics.median(turn["theirs"].first_step_s for turn in found),
        "echelon / ray train": statistics.median(
            turn["ours"].first_step_s / turn["theirs"].first_step_s for turn in found
        ),
    }


def alexnet(engine: RayEngine, folder: Path, repeats: int) -> dict[str, object]:
    """Samples a second of two workers."""
    found = turns(engine, folder, "alexnet", 2, 15, repeats)
    samples = 2 * 8
    return {
        "what": "AlexNet, 2 workers [samples/s]",
        "echelon": statistics.median(samples * turn["ours"].steps_per_s for turn in found),
        "ray train": statistics.median(samples * turn["theirs"].steps_per_s for turn in found),
        "echelon / ray train": statistics.median(
            turn["ours"].steps_per_s / turn["theirs"].steps_per_s for turn in found
        ),
    }


def main() -> None:
    """Measure and print."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    options.add_argument("--quick", action="store_true", help="fewer repeats")
    options.add_argument("--json", action="store_true")
    options.add_argument("--only", default="start,alexnet")
    asked = options.parse_args()
    if RayEngine.missing():
        raise SystemExit(RayEngine.missing())
    repeats = 3 if asked.quick else 7
    rows = []
    with tempfile.TemporaryDirectory(prefix="launchers-") as made:
        folder = Path(made)
        (folder / "ours.py").write_text(OURS)
        (folder / "theirs.py").write_text(THEIRS)
        engine = RayEngine(folder)
        try:
            if "start" in asked.only:
                rows.append(first_step(engine, folder, repeats))
            if "alexnet" in asked.only:
                rows.append(alexnet(engine, folder, repeats))
        finally:
            engine.close()
    if asked.json:
        print(json.dumps(rows))
        return
    for row in rows:
        print("  ".join(f"{name} {v:.2f}" if isinstance(v, float) else str(v) for name, v in row.items()))


if __name__ == "__main__":
    main()
