"""Workers on Spark: `echelon.launch(on="spark")` against TorchDistributor with DistributedDataParallel.

    python benchmarks/launchers_spark.py [--quick] [--json] [--only running,new,alexnet]

running  from the call to the end of the first step on 4 workers, in a session that is there already
new      from the start of the program to the same, with a new session
alexnet  samples/s of 2 workers, 224x224 pixels, 8 samples each, one thread each

Both take turns. Needs `pip install "echelon[spark]"` and Java 17.
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
from collections.abc import Callable
from pathlib import Path
from typing import Any

ECHELON, PEER = "echelon", "torch distributor"


def step_of(kind: str) -> tuple[Any, Any, Callable[[Any, Any], None]]:
    """A model, an optimizer, and what a step does with them."""
    import torch
    from torch import nn

    torch.set_num_threads(1)
    torch.manual_seed(0)
    if kind == "alexnet":
        from echelon.zoo.dataset import SampleSpec
        from echelon.zoo.model import MODELS

        sample = SampleSpec(shape=(3, 224, 224), dtype="float32", classes=1000, task="classify")
        model: nn.Module = MODELS.build("alexnet").build(sample)
        x, y = torch.randn(8, 3, 224, 224), torch.randint(1000, (8,))
    else:
        model, x, y = nn.Linear(4, 2), torch.randn(8, 4), torch.randint(2, (8,))

    def step(model: Any, optimizer: Any) -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()

    return model, torch.optim.SGD(model.parameters(), lr=1e-3), step


def timed(model: Any, optimizer: Any, step: Callable[[Any, Any], None], steps: int) -> tuple[float, float]:
    """When the first step ended, and how long each of the others took."""
    step(model, optimizer)
    first = time.time()
    for _ in range(2 if steps else 0):
        step(model, optimizer)
    begun = time.perf_counter()
    for _ in range(steps):
        step(model, optimizer)
    for parameter in model.parameters():
        parameter.detach()  # late updates count
    return first, (time.perf_counter() - begun) / max(steps, 1)


def by_echelon(kind: str, steps: int) -> tuple[float, float]:
    """One worker's part."""
    import echelon

    session = echelon.join()
    model, optimizer, step = step_of(kind)
    return timed(*session.prepare(model, optimizer), step, steps)


def by_peer(kind: str, steps: int) -> tuple[float, float]:
    """The same with DistributedDataParallel."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    model, optimizer, step = step_of(kind)
    found = timed(DistributedDataParallel(model), optimizer, step, steps)
    dist.barrier()
    dist.destroy_process_group()
    return found


def launched(who: str, workers: int, kind: str, steps: int) -> tuple[float, float]:
    """The latest first step, and the longest time of a step."""
    if who == ECHELON:
        import echelon

        results = echelon.launch(by_echelon, (kind, steps), workers=workers, on="spark", quiet=True)
        firsts, each = zip(*results, strict=True)
        return max(firsts), max(each)
    from pyspark.ml.torch.distributor import TorchDistributor

    distributor = TorchDistributor(num_processes=workers, local_mode=False, use_gpu=False)
    first, duration = distributor.run(by_peer, kind, steps)
    return float(first), float(duration)


def session(workers: int) -> Any:
    """A session on this machine."""
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.master(f"local[{workers}]").config("spark.ui.enabled", "false")
    made = builder.config("spark.ui.showConsoleProgress", "false").getOrCreate()
    made.sparkContext.setLogLevel("OFF")
    return made


def alone(who: str) -> None:
    """A whole program with a session of its own: prints when the first step had ended."""
    if who == PEER:
        session(4)
    print(launched(who, 4, "tiny", 0)[0], flush=True)


def in_turns(measure: Callable[[str], float], turns: int) -> dict[str, float]:
    """The medians, without the first turn."""
    found: dict[str, list[float]] = {ECHELON: [], PEER: []}
    for turn in range(turns + 1):
        for who in (ECHELON, PEER)[:: 1 if turn % 2 else -1]:
            value = measure(who)
            print(f"  {who}: {value:.3g}", file=sys.stderr, flush=True)
            if turn:
                found[who].append(value)
    return {who: statistics.median(values) for who, values in found.items()}


def running(who: str) -> float:
    """Seconds to the first step in the active session."""
    begun = time.time()
    return launched(who, 4, "tiny", 0)[0] - begun


def new(who: str) -> float:
    """Seconds to the first step of a new program."""
    begun = time.time()
    done = subprocess.run(
        [sys.executable, __file__, "--alone", who],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        check=True,
    )
    return float(done.stdout.split()[-1]) - begun


def alexnet(who: str) -> float:
    """Samples per second of two workers."""
    return 2 * 8 / launched(who, 2, "alexnet", 8)[1]


def main() -> None:
    """Measure and print."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    options.add_argument("--quick", action="store_true", help="fewer repeats")
    options.add_argument("--json", action="store_true")
    options.add_argument("--only", default="running,new,alexnet")
    options.add_argument("--alone", help=argparse.SUPPRESS)
    asked = options.parse_args()
    warnings.simplefilter("ignore", FutureWarning)
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    if asked.alone:
        alone(asked.alone)
        return
    turns = 3 if asked.quick else 5
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        before = Path.cwd()
        os.chdir(folder)  # the records of the runs
        if "new" in asked.only.split(","):
            rows.append({"what": "start, new session (s)", **in_turns(new, turns)})
        if {"running", "alexnet"} & set(asked.only.split(",")):
            spark = session(4)
            if "running" in asked.only.split(","):
                rows.append({"what": "start, running session (s)", **in_turns(running, turns)})
            if "alexnet" in asked.only.split(","):
                rows.append({"what": "alexnet (samples/s)", **in_turns(alexnet, turns)})
            spark.stop()
        os.chdir(before)
    for row in rows:
        row["ratio"] = row[ECHELON] / row[PEER]
        if not asked.json:
            print(f"{row['what']}: echelon {row[ECHELON]:.3g}, TorchDistributor {row[PEER]:.3g}", end=", ")
            print(f"ratio {row['ratio']:.2f}")
    if asked.json:
        print(json.dumps(rows))


if __name__ == "__main__":
    main()
