"""What does a session cost a script that runs alone? A session against a plain loop, in one run.

    python benchmarks/overhead.py [--repeats 40] [--json]

LeNet on the built-in digits, batch 64, one thread. The three loops take turns, epoch by epoch, in an
order that rotates; each turn's ratio is to the plain loop of the same turn, and the median of them is
reported. All of it runs in one thread and waits for nothing, so CPU time is what it costs; wall time would
count what else the machine does. What recording costs is too little to see that way: it is also measured by
itself, over 20,000 steps.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

import echelon
from echelon.observe.recorder import Recorder
from echelon.train.clock import StepClock
from echelon.zoo.dataset import DATASETS
from echelon.zoo.model import MODELS
from echelon.zoo.task import cross_entropy

TARGET = 1.02


def make() -> tuple[nn.Module, torch.optim.Optimizer, DataLoader[Any]]:
    """The same model, optimizer and loader for all three."""
    torch.manual_seed(0)
    splits = DATASETS.build("digits").load()
    model = MODELS.build("lenet").build(splits.spec)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return (
        model,
        optimizer,
        DataLoader(splits.train, batch_size=64, shuffle=True, collate_fn=splits.collate),
    )


def epoch(
    model: nn.Module, optimizer: torch.optim.Optimizer, loader: Any, log: Callable[..., None]
) -> float:
    """CPU seconds for one pass over the data."""
    begun = time.thread_time()
    for x, y in loader:
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        log(loss=loss)
    return time.thread_time() - begun


def record_one_step(folder: str) -> float:
    """CPU seconds to record a step: clock readings, the event, and its part of a write to disk."""
    count = 20_000
    with Recorder(Path(folder) / "events.jsonl") as recorder:
        clock = StepClock(recorder, 0)
        begun = time.thread_time()
        for _ in range(count):
            clock.data_asked()
            clock.data_handed(64, 64)
            clock.applying()
            clock.applied()
            clock.note_loss(1.0)
        recorder.flush()
        return (time.thread_time() - begun) / count


def main() -> None:
    """Measure and print."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    options.add_argument("--repeats", type=int, default=40)
    options.add_argument("--json", action="store_true")
    asked = options.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as runs:
        quiet, recorded = echelon.join(record=False), echelon.join(runs=runs, record=True)
        plain = make()
        loops: dict[str, Callable[[], float]] = {
            "plain": lambda: epoch(*plain, lambda loss: float(loss.detach())),
        }
        for name, session in (("session", quiet), ("session with record", recorded)):
            things = session.prepare(*make())
            loops[name] = lambda things=things, session=session: epoch(*things, session.log)
        steps = len(plain[2])
        for loop in loops.values():
            loop()
        turns: list[dict[str, float]] = []
        names = list(loops)
        for turn in range(asked.repeats):
            order = names[turn % 3 :] + names[: turn % 3]
            turns.append({name: loops[name]() for name in order})
        record_s = record_one_step(runs)
        quiet.close()
        recorded.close()
    plain_s = statistics.median(turn["plain"] for turn in turns) / steps
    result = {
        "plain step [ms]": plain_s * 1e3,
        "session / plain": statistics.median(t["session"] / t["plain"] for t in turns),
        "session with record / plain": statistics.median(
            t["session with record"] / t["plain"] for t in turns
        ),
        "recording a step [us]": record_s * 1e6,
        "recording / plain step [%]": 100 * record_s / plain_s,
    }
    if asked.json:
        print(json.dumps(result))
        return
    for name, value in result.items():
        print(f"{name:32s} {value:8.3f}")
    print(f"{'target: with record / plain <=':32s} {TARGET:8.3f}")


if __name__ == "__main__":
    main()
