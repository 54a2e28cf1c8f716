"""Is any model slower than with DistributedDataParallel? Nine models on two local workers, in turns.

    python benchmarks/models.py [--quick] [--seconds 20] [--json] [--only lstm,cnn]

Defaults on both sides: DDP(model), and session.prepare(model, optimizer). Batch normalisation is over all
workers' samples with Echelon, and over each worker's own with DDP. For models that have it, also: Echelon
with global statistics against Echelon with local ones.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys

from echelon.bench.step import StepComparison, measure_step
from echelon.bench.step_notes import StepRequest
from echelon.bench.workloads import WORKLOADS

_NORMALISED = ("cnn", "resnet18")


def main() -> None:
    """Measure and print."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    options.add_argument("--quick", action="store_true", help="a few seconds for each model")
    options.add_argument("--seconds", type=float, default=20.0, help="for each model")
    options.add_argument("--json", action="store_true")
    options.add_argument("--only", default=",".join(WORKLOADS))
    asked = options.parse_args()
    found = [measure(name, 4.0 if asked.quick else asked.seconds) for name in asked.only.split(",")]
    if asked.json:
        print(json.dumps([dataclasses.asdict(one) for one in found]))
        return
    ratios = [one.ratio() for one in found]
    print(f"median of the ratios: {statistics.median(ratios):.2f}, largest {max(ratios):.2f}")


def measure(name: str, seconds: float) -> StepComparison:
    """One model."""
    sides = ("alone", "ddp", "echelon", *(("local",) if name in _NORMALISED else ()))
    request = StepRequest(model=name, seconds=seconds, sides=sides)
    one = measure_step(request, workers=2, lab=None, progress=lambda text, done: None)
    steps = ", ".join(f"{side} {parts.step_s * 1e3:.2f}" for side, parts in one.sides.items())
    print(f"{name:12s} {one.ratio():.2f} of DDP ({steps} ms)", flush=True)
    for side, parts in one.sides.items():
        told = ", ".join(f"{name} {part_s * 1e3:.2f}" for name, part_s in parts.parts.items())
        print(f"    {side:8s} {told} ms")
    if "local" in one.sides:
        print(f"    {name}: global of local statistics {one.ratio('echelon', 'local'):.2f}")
    sys.stdout.flush()
    return one


if __name__ == "__main__":
    main()
