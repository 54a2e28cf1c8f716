"""A pipeline of four stages over 1 Gb/s links: schedules in turns, torch's own beside them.

    python benchmarks/pipeline.py [--quick] [--json] [--only schedules|unequal]

In a lab (root). Layers sleep instead of computing, so that four nodes do not share two cores; activations
are real: 2.24 MB for each of 8 micro-batches, 19 ms on the wire, where a stage computes for 36 ms.

schedules  four equal nodes; every schedule, and torch.distributed.pipelining's GPipe, 1F1B and ZBV on Gloo,
           take turns. `simulated` is what the same lists take on a machine without overhead; there is none
           for `stale`, whose batches overlap
unequal    nodes of speed .8, .4, .2 and .1: cuts by measured times against cuts by the number of layers,
           both filled, with 16 micro-batches
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import cluster
from echelon.comm.c10d import C10dGroup
from echelon.comm.engine import Engine, EngineGroup
from echelon.comm.meet.place import Place
from echelon.comm.meet.rendezvous import meet
from echelon.parallel.layout import Mesh
from echelon.parallel.schedule_time import schedule_s
from echelon.parallel.spread import SpreadModel
from echelon.parallel.strategies.pipeline import Pipeline

STAGES, MICRO, SAMPLES = 4, 8, 8
WIDTH = 70_000  # of float32: 2.24 MB a micro-batch, 19 ms at 1 Gb/s
LAYERS, LAYER_S = 8, 0.006  # of each part: forward, gradient of the input, gradient of the weights
SPEEDS = (0.8, 0.4, 0.2, 0.1)
UNEQUAL_LAYERS, UNEQUAL_LAYER_S, UNEQUAL_MICRO = 15, 0.002, 16
PAYLOAD_BYTES_PER_S = 125e6 * 1448 / 1538  # of 1 Gb/s, without the frames of Ethernet and TCP
EQUAL = "2,4,6"  # what is compared here is the order, so all have the same cuts
WAYS = {
    "gpipe": Pipeline(schedule="gpipe", micro=MICRO, cuts=EQUAL),
    "1f1b": Pipeline(schedule="1f1b", micro=MICRO, cuts=EQUAL),
    "1f1b, 1 ahead": Pipeline(schedule="1f1b", micro=MICRO, cuts=EQUAL, ahead=1),
    "filled": Pipeline(schedule="filled", micro=MICRO, cuts=EQUAL),
    "filled, 1 ahead": Pipeline(schedule="filled", micro=MICRO, cuts=EQUAL, ahead=1),
    "interleaved": Pipeline(schedule="interleaved", micro=MICRO, cuts="1,2,3,4,5,6,7"),
    "stale": Pipeline(schedule="stale", micro=MICRO, cuts=EQUAL),
}


class Sleeping(nn.Module):
    """A layer of which each part takes so long; its values are those of a product with its weights."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self._seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        """Each of the two views is an operation of its own in the backward pass, where the layer sleeps."""
        time.sleep(self._seconds)
        parts = x.view_as(x), self.weight.view_as(self.weight)
        for part in parts:
            if part.grad_fn is not None:
                part.grad_fn.register_prehook(lambda gradients: time.sleep(self._seconds))
        return parts[0] * parts[1]


class Few(nn.Module):
    """Some of the features, so that the output is small."""

    def forward(self, x: Tensor) -> Tensor:
        """Ten classes."""
        return x[:, :10]


def layers(count: int, seconds: float) -> nn.Sequential:
    """The model; its last layer takes no time."""
    return nn.Sequential(*(Sleeping(seconds) for _ in range(count)), Few())


class Unobserved:
    """An observer that records nothing."""

    def staged(self, **fields: Any) -> None:
        """A stage was cut."""

    def passed(self, *passes: Any) -> None:
        """A batch is done."""

    def computing(self) -> None:
        """Gradients are there."""

    def arrived(self) -> None:
        """They could be sent."""

    def reduced(self, sent_bytes: int) -> None:
        """They have been summed."""


def own_step(group: EngineGroup, model: nn.Module, options: Pipeline) -> Callable[[Tensor, Tensor], None]:
    """A step of a model that is spread over all workers."""
    SpreadModel(
        model,
        options,
        Mesh(ranks=(tuple(range(group.size)),)),
        group,
        memory_bytes=float("inf"),
        weight=lambda: 1.0,
        keeps=lambda: False,
        agree=lambda what: None,
        observer=Unobserved(),
        explain=lambda topic, why, tell: None,
    )

    def step(x: Tensor, y: Tensor) -> None:
        nn.functional.cross_entropy(model(x), y).backward()
        for p in model.parameters():
            p.grad = None

    return step


def torch_step(name: str, rank: int, seconds: float) -> Callable[[Tensor, Tensor], None]:
    """The same with torch.distributed.pipelining; ZBV has two pieces on each worker."""
    from torch.distributed import pipelining

    pieces = 2 if name == "torch ZBV" else 1
    count = STAGES * pieces
    own = [rank, count - 1 - rank] if pieces == 2 else [rank]
    stages = []
    for at in own:
        parts: list[nn.Module] = [Sleeping(seconds) for _ in range(LAYERS // count)]
        if at == count - 1:
            parts.append(Few())
        stages.append(pipelining.PipelineStage(nn.Sequential(*parts), at, count, torch.device("cpu")))
    kinds = {
        "torch GPipe": pipelining.ScheduleGPipe,
        "torch 1F1B": pipelining.Schedule1F1B,
        "torch ZBV": pipelining.ScheduleZBVZeroBubble,
    }
    runner = kinds[name](stages if pieces == 2 else stages[0], MICRO, loss_fn=nn.functional.cross_entropy)

    def step(x: Tensor, y: Tensor) -> None:
        given = (x,) if 0 in own else ()
        runner.step(*given, **({"target": y} if count - 1 in own else {}))
        for stage in stages:
            stage.submod.zero_grad()

    return step


def work(what: str, repeats: int) -> None:
    """One worker's part."""
    torch.set_num_threads(1)
    place = Place.from_environment(os.environ)
    rendezvous = meet(
        place, node=os.environ["BENCH_NODE"], host=socket.gethostname(), pid=os.getpid(), timeout_s=120
    )
    gloo = C10dGroup.connect(rendezvous, place, deadline_s=120)
    engine = Engine.connect(rendezvous, place, shared_memory=False, deadline_s=120, timeout_s=60)
    group = EngineGroup(engine, "auto")
    steps: dict[str, Callable[[Tensor, Tensor], None]] = {}
    if what == "schedules":
        for name, options in WAYS.items():
            steps[name] = own_step(group, layers(LAYERS, LAYER_S), options)
        for name in ("torch GPipe", "torch 1F1B", "torch ZBV"):
            steps[name] = torch_step(name, place.rank, LAYER_S)
    else:
        seconds = UNEQUAL_LAYER_S / SPEEDS[place.rank]
        for name, cuts in (("by measured times", ""), ("by number of layers", "4,8,12")):
            options = Pipeline(schedule="filled", micro=UNEQUAL_MICRO, ahead=1, cuts=cuts)
            steps[name] = own_step(group, layers(UNEQUAL_LAYERS, seconds), options)
    x = torch.randn(MICRO * SAMPLES, WIDTH)
    y = torch.arange(MICRO * SAMPLES) % 10
    times: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(repeats + 1):
        for name in list(steps)[:: 1 if turn % 2 else -1]:
            gloo.barrier()
            begun = time.perf_counter()
            steps[name](x, y)
            gloo.barrier()
            if turn:
                times[name].append(time.perf_counter() - begun)
    if place.rank == 0:
        print(json.dumps({name: statistics.median(found) for name, found in times.items()}), flush=True)
    gloo.barrier()
    group.close()
    gloo.close()


def simulated_s(options: Pipeline) -> float:
    """What it takes without overhead."""
    parts = options.parts * STAGES
    wire_s = SAMPLES * WIDTH * 4 / PAYLOAD_BYTES_PER_S
    return schedule_s(options, MICRO, [3 * LAYER_S * LAYERS / parts] * parts, [wire_s] * (parts - 1))


def main() -> None:
    """Measure and print."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    options.add_argument("--quick", action="store_true", help="fewer repeats")
    options.add_argument("--json", action="store_true")
    options.add_argument("--only", choices=("schedules", "unequal"))
    asked = options.parse_args()
    repeats = "3" if asked.quick else "9"
    found: dict[str, Any] = {}
    for what in (asked.only,) if asked.only else ("schedules", "unequal"):
        found[what] = cluster.measure(__file__, STAGES, what, repeats, lab=cluster.nodes(STAGES, "1gbit"))
    bounds = {name: simulated_s(way) for name, way in WAYS.items() if not way.late}
    if asked.json:
        print(json.dumps({"seconds": found, "simulated": bounds}))
        return
    for name, step_s in found.get("schedules", {}).items():
        line = f"{name:16s} {step_s * 1e3:7.1f} ms"
        if name in bounds:
            line += f"  {step_s / bounds[name]:5.2f} x simulated {bounds[name] * 1e3:.1f} ms"
        print(line)
    if "schedules" in found:
        own, peer = found["schedules"]["filled, 1 ahead"], found["schedules"]["torch ZBV"]
        print(f"filled, 1 ahead, against torch ZBV: {own / peer:.2f} x (target 0.90)")
    for name, step_s in found.get("unequal", {}).items():
        print(f"cuts {name}: {step_s * 1e3:.1f} ms")
    if "unequal" in found:
        measured, counted = found["unequal"].values()
        print(f"cuts by measured times: {counted / measured:.2f} times as fast (target 2.30)")


if __name__ == "__main__":
    if cluster.is_worker():
        work(sys.argv[1], int(sys.argv[2]))
    else:
        main()
