"""Smooth switch against asynchronous and synchronous training, as in its paper, on a virtual clock.

    ECHELON_DATA=... python benchmarks/smooth_switch.py [--data mnist,cifar10] [--seeds 5] [--readings]

25 workers, learning rate 0.01, batches of 32 and 64 per worker, steps of 300 and 500 gradients, half of
the workers delayed by max(0, normal(0, 0.25)) s at every gradient, 100 seconds, the same initial weights
for all policies of a seed. Printed are differences from `async`, averaged over the interval and seeds,
beside the paper's Tables 1 and 2. With --readings, four readings of the algorithm instead: sum or mean of
the buffered gradients, contributors that wait or not.

The paper does not say which network it was, nor how long a gradient or an update takes. Here it is a CNN of
three small convolutions; a gradient takes 0.2 s (one of 25 processes on 28 cores, called through Ray), and
the server 2 ms to take in a gradient, 4 ms for an update and 4 ms to hand out weights. --model, --compute
and --costs change that, and who is ahead depends on it.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from echelon.simulate.outcome import SimulationResult
from echelon.simulate.profile import Costs, Profile
from echelon.simulate.setting import Setting
from echelon.simulate.sweep import simulate_several

METRICS = ("test_accuracy", "test_loss", "train_loss")
# (data, step, batch): differences of accuracy in points, test loss and train loss, as published
PUBLISHED = {
    ("mnist", 300, 32): (1.374, -0.047, -0.047),
    ("mnist", 300, 64): (-0.516, 0.001, -0.001),
    ("mnist", 500, 32): (1.366, -0.053, -0.054),
    ("mnist", 500, 64): (1.291, -0.022, -0.023),
    ("cifar10", 300, 32): (4.849, -0.137, -0.139),
    ("cifar10", 300, 64): (2.435, -0.066, -0.067),
    ("cifar10", 500, 32): (3.468, -0.092, -0.091),
    ("cifar10", 500, 64): (2.884, -0.080, -0.082),
}
READINGS = {
    "mean, no waiting": "",
    "mean, waiting": ", waiting=true",
    "sum, no waiting": ", combine=sum",
    "sum, waiting": ", combine=sum, waiting=true",
}


def switch(step: int, reading: str) -> str:
    """The policy, in one reading."""
    return f"smooth-switch(step={step}{READINGS[reading]})"


def run(data: str, batch: int, policies: list[str], args: argparse.Namespace) -> SimulationResult:
    """All policies for one data set and batch."""
    queue_s, apply_s, hand_s = (float(cost) for cost in args.costs.split(","))
    costs = Costs(queue_s=queue_s, apply_s=apply_s, hand_s=hand_s)
    setting = Setting(
        workers=25,
        model=args.model,
        data=data,
        batch=batch,
        lr=0.01,
        delay="normal(0, 0.25)",
        delayed=0.5,
        seconds=args.seconds,
        seeds=args.seeds,
        test_samples=2000,
        profile=Profile(compute_s=args.compute, costs=costs),
    )
    print(f"{data}, batch {batch}: {', '.join(policies)}", file=sys.stderr, flush=True)
    return simulate_several(setting, policies, jobs=args.jobs)


def line(outcome: SimulationResult, policy: str) -> list[float]:
    """Differences from async: accuracy in points, losses."""
    found = [outcome.difference(policy, "async", metric) for metric in METRICS]
    return [100 * found[0], *found[1:]]


def main() -> None:
    """Simulate and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--data", default="mnist,cifar10")
    parser.add_argument("--batches", default="32,64")
    parser.add_argument("--steps", default="300,500")
    parser.add_argument("--reading", default="sum, no waiting", choices=READINGS)
    parser.add_argument("--readings", action="store_true")
    parser.add_argument("--model", default="cnn(width=4)")
    parser.add_argument("--seconds", type=float, default=100.0)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--compute", type=float, default=0.2)
    parser.add_argument("--costs", default="0.002,0.004,0.004")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--json")
    args = parser.parse_args()
    steps = [int(step) for step in args.steps.split(",")]
    readings = list(READINGS) if args.readings else [args.reading]
    kept = []
    print(f"{'':44s} accuracy  published   test loss  published  train loss  published")
    for data in args.data.split(","):
        for batch in map(int, args.batches.split(",")):
            wanted = [switch(step, reading) for step in steps for reading in readings]
            outcome = run(data, batch, ["async", "full", *wanted], args)
            base = [outcome.average("async", metric) for metric in METRICS]
            print(
                f"{data}, batch {batch}: async itself                   {100 * base[0]:8.3f}             "
                f"{base[1]:8.3f}              {base[2]:8.3f}"
            )
            for policy in ["full", *wanted]:
                found = line(outcome, policy)
                step = next((step for step in steps if f"step={step}" in policy), 0)
                told = PUBLISHED.get((data, step, batch))
                text = [f"{value:9.3f}" for value in told] if told else ["        -"] * 3
                name = f"  {policy}"
                print(
                    f"{name:44s} {found[0]:8.3f}  {text[0]}    {found[1]:8.3f}  {text[1]}    "
                    f"{found[2]:8.3f}  {text[2]}",
                    flush=True,
                )
                kept.append({"data": data, "batch": batch, "policy": policy, "found": found, "told": told})
    if args.json:
        Path(args.json).write_text(json.dumps(kept, indent=1))


if __name__ == "__main__":
    main()
