"""`--local auto` against every fixed way of using this machine: samples/s of LeNet, MLP, AlexNet and VGG16.

    python benchmarks/local.py

First the choice is made as `--local auto` makes it, within its five seconds; then all usual ways and their
chunks take turns for longer. The last column is what the chosen way has of the best one's samples/s.
"""

from __future__ import annotations

import argparse
import time

from echelon.bench.local import TIMES_OF_WORKLOAD, measure_local
from echelon.bench.workloads import workload
from echelon.parallel.local_way import best_way, chunked, usual_ways
from echelon.start.local_choice import way_rates
from echelon.start.local_trial import my_cores
from echelon.train.local_messages import LocalJob


def main() -> None:
    """Print a row for each model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--models", default="lenet,mlp,alexnet,vgg16")
    parser.add_argument("--turns", type=int, default=5)
    given = parser.parse_args()
    cores = my_cores()
    print("| model, batch | torch as it is | best fixed way | chosen | of the best |")
    print("|---|---|---|---|---|")
    for name in given.models.split(","):
        batch = TIMES_OF_WORKLOAD * workload(name).batch
        job = LocalJob(
            name=name,
            maker="echelon.bench.workloads:trial_model",
            options={"workload": name},
            batch=batch,
        )
        begun = time.monotonic()
        chosen = best_way(way_rates(job, cores))
        took_s = time.monotonic() - begun
        ways = usual_ways(len(cores), batch)
        ways += [one for way in ways for one in chunked(way, batch)]
        ways += [chosen] if chosen not in ways else []  # with cores of its own
        table = measure_local(
            name, batch=batch, turns=given.turns, progress=lambda text, done: None, ways=ways
        )
        mine = next(row for row in table.rows if row.way == chosen)
        best = table.best
        print(
            f"| {name}, {batch} | {table.usual.rate:.1f} | {best.way}: {best.rate:.1f} "
            f"| {chosen}: {mine.rate:.1f} (found in {took_s:.1f} s) | {mine.rate / best.rate:.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
