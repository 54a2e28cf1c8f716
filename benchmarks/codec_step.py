"""How long is a training step with a codec on a thin link? Against the dense ring, taking turns in one run.

    python benchmarks/codec_step.py [--quick] [--json] [--only flat,sites,fast,here] [--codecs "one-bit"]

All in the lab (root). Each run trains a model dense and with one codec, in turns; the limit of a step is
max(compute, wire), with compute measured in the same run and wire the bytes sent at the link's rate.

flat   ResNet-18 on 32x32 pixels (44.7 MB of gradients), 4 nodes at 100 Mb/s, against the dense ring
sites  four layers of 1024x1024 (16.8 MB), two sites of two nodes, 1 Gb/s inside, an uplink of 100 Mb/s:
       between(codec), against the dense hierarchy
fast   the same layers on 2 nodes at 10 Gb/s: codec auto against none
here   the same layers on 2 workers of this machine: codec auto against none; with --only here all codecs
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import cluster
import echelon
from echelon.cluster.lab.spec import LabSpec, parse_lab
from echelon.comm.meet.place import Place
from echelon.plan.plan import PlanRequest
from echelon.reduce.round_seen import BucketTimes
from echelon.zoo.dataset import SampleSpec
from echelon.zoo.model import MODELS

CODECS = (
    "dgc(ratio=0.001)",
    "top-k(ratio=0.01)",
    "one-bit",
    "ternary",
    "sparse-binary(ratio=0.01)",
    "random-k(ratio=0.01)",
    "power-sgd(rank=2)",
    "fixed(bits=8)",
    "dynamic-fixed(bits=12)",
    "fp16",
    "bf16",
)
TARGETS = {"dgc": 6.2, "top-k": 6.2, "one-bit": 2.7}
_THIN_BYTES_PER_S = 100e6 / 8


def two_sites() -> LabSpec:
    """Two sites of two nodes on one uplink."""
    nodes = "".join(
        f'[[node]]\nname = "{site}{index}"\nsite = "{site}"\nlink = "1gbit"\n'
        for site in "ab"
        for index in range(2)
    )
    return parse_lab(
        f'{nodes}[[uplink]]\nbetween = ["a", "b"]\nrate = "100mbit"\n', file="benchmark", name="sites"
    )


def model_of(kind: str, batch: int) -> tuple[nn.Module, Tensor, Tensor]:
    """A model and a batch."""
    torch.manual_seed(0)
    if kind == "resnet18":
        spec = SampleSpec(shape=(3, 32, 32), dtype="float32", classes=10, task="classify")
        model = MODELS.build("resnet18").build(spec)
        return model, torch.randn(batch, 3, 32, 32), torch.randint(10, (batch,))
    layers = [layer for _ in range(4) for layer in (nn.Linear(1024, 1024), nn.ReLU())]
    return nn.Sequential(*layers[:-1]), torch.randn(batch, 1024), torch.randint(1024, (batch,))


def work(kind: str, batch: int, collective: str, codec: str, turns: int, steps: int) -> None:
    """One worker's part."""
    torch.set_num_threads(1)
    logging.disable(logging.INFO)
    place = Place.from_environment(os.environ)
    session = echelon.join(record=False, round_timeout_s=120, collective=collective)
    sent: dict[str, list[int]] = {}
    variants: dict[str, Callable[[], None]] = {}
    coding_s: list[float] = []
    told = session._clock.bucket
    now = {"name": ""}

    def bucket(times: BucketTimes) -> None:
        sent.setdefault(now["name"], []).append(times.sent_bytes)
        if times.how != "dense":
            coding_s.append(times.encode_s + times.adding_s)
        told(times)

    session._clock.bucket = bucket  # type: ignore[method-assign]

    def add(name: str, **options: str) -> None:
        model, x, y = model_of(kind, batch)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        if name != "compute":
            model, optimizer = session.prepare(
                model, optimizer, batchnorm="local", factors="never", **options
            )

        def step() -> None:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()

        variants[name] = step

    add("compute")
    add("dense", codec="none")
    add("coded", codec=codec)
    times: dict[str, list[float]] = {name: [] for name in variants}
    for turn in range(turns + 1):
        for name, step in list(variants.items())[:: 1 if turn % 2 else -1]:
            now["name"] = name
            if turn == 1:
                sent.pop(name, None)
            session.barrier()
            begun = time.perf_counter()
            for _ in range(steps):
                step()
            session.barrier()
            if turn:
                times[name].append((time.perf_counter() - begun) / steps)
    found: dict[str, Any] = {name: statistics.median(values) for name, values in times.items()}
    count = turns * steps
    found["sent_bytes"] = {name: sum(parts) / count for name, parts in sent.items() if name}
    found["coding"] = sum(coding_s) / max(1, count + steps)
    found["plan"] = dict(session._plan.reasons).get("codec", "")
    if place.rank == 0:
        print(json.dumps(found), flush=True)
    session.barrier()
    session.close()


def main() -> None:
    """Measure and print."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    options.add_argument("--quick", action="store_true", help="fewer repeats")
    options.add_argument("--json", action="store_true")
    options.add_argument("--only", default="flat,sites,fast,here")
    options.add_argument("--codecs", default="; ".join(CODECS))
    options.add_argument("--batch", type=int, default=4, help="samples of a worker, ResNet-18")
    asked = options.parse_args()
    codecs = [text.strip() for text in asked.codecs.split(";")]
    turns = "2" if asked.quick else "4"
    rows = []

    def run(what: str, codec: str, workers: int, *args: str, lab: LabSpec | None, groups: Any = ()) -> None:
        row = cluster.measure(
            __file__, workers, *args[:3], codec, turns, args[3], lab=lab, asked=PlanRequest(groups=groups)
        )
        row |= {"what": what, "codec": codec, "speedup": row["dense"] / row["coded"]}
        rows.append(row)
        if not asked.json:
            show(row)

    for codec in codecs:
        if "flat" in asked.only.split(","):
            lab = cluster.nodes(4, "100mbit")
            run("flat", codec, 4, "resnet18", str(asked.batch), "ring", "1", lab=lab)
    for codec in codecs if "sites" in asked.only.split(",") else ():
        args = ("layers", "32", "hierarchical(group=2)", "2")
        run("sites", f"between({codec})", 4, *args, lab=two_sites(), groups=((0, 1), (2, 3)))
    if "fast" in asked.only.split(","):
        run("fast", "auto", 2, "layers", "32", "auto", "10", lab=cluster.nodes(2, "10gbit"))
    for codec in (
        ("auto", *(codecs if asked.only == "here" else ())) if "here" in asked.only.split(",") else ()
    ):
        run("here", codec, 2, "layers", "32", "auto", "10", lab=None)
    if asked.json:
        print(json.dumps(rows))


def show(row: dict[str, Any]) -> None:
    """A line."""
    target = TARGETS.get(row["codec"].partition("(")[0]) if row["what"] == "flat" else None
    target = 5.0 if row["what"] == "sites" else target
    sent = row["sent_bytes"]
    print(
        f"{row['what']:5s} {row['codec']:36s} compute {row['compute'] * 1e3:7.1f} ms"
        f"  dense {row['dense'] * 1e3:7.1f}  coded {row['coded'] * 1e3:7.1f}"
        f"  coding {row['coding'] * 1e3:6.1f}  {row['speedup']:6.2f}x"
        f"{f' (target {target:g}x)' if target else ''}"
        f"  sent {sent.get('coded', 0) / 1e6:.3f} of {sent.get('dense', 0) / 1e6:.1f} MB  {row['plan']}",
        flush=True,
    )


if __name__ == "__main__":
    if cluster.is_worker():
        kind, batch, collective, codec, turns, steps = sys.argv[1:]
        work(kind, int(batch), collective, codec, int(turns), int(steps))
    else:
        main()
