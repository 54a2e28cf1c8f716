"""`--parallel auto` against layouts given by hand: the step of a model on workers of this machine or a lab.

    python benchmarks/layouts.py
    python benchmarks/layouts.py --lab two-sites --model "mlp(1024, 3)" --data generated

The choice is made first, by its own trials. Then every layout is timed again, the chosen one too. The last
column is the step of the chosen layout against the shortest one of this second time.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from typing import Any

from echelon.config.resolve import resolve
from echelon.config.schema import TrainSettings
from echelon.errors import EchelonError
from echelon.parallel.candidates import candidate_layouts
from echelon.start.few_steps import timed_step_s
from echelon.start.layout_choice import chosen_layout, count_workers
from echelon.start.run import Target

TARGET = Target(argv=["-m", "echelon.train.job"], name="layouts")


def main() -> None:
    """Print a row for the model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="lenet")
    parser.add_argument("--data", default="digits")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--workers", type=int)
    parser.add_argument("--lab")
    parser.add_argument("--steps", type=int, default=20)
    asked = parser.parse_args()
    given: dict[str, Any] = {
        name: getattr(asked, name) for name in ("model", "data", "batch", "workers", "lab")
    }
    if not asked.lab and not asked.workers:
        given["workers"] = 2
    with tempfile.TemporaryDirectory() as cache:
        os.environ["ECHELON_CACHE"] = cache
        resolved = resolve(TrainSettings, {**given, "parallel": "auto"})
        chosen = chosen_layout(resolved, TARGET, lambda text: None).resolved.settings.parallel
    taken: dict[str, float] = {}
    for text in candidate_layouts(count_workers(resolved.settings)):
        try:
            step = timed_step_s(
                TrainSettings, {**given, "parallel": text, "epochs": 1000}, TARGET, asked.steps
            )
        except EchelonError as error:
            print(f"{text}: left out, {error.message}", flush=True)
            continue
        taken[text] = step
        print(f"{text}: {step * 1e3:.1f} ms a step", flush=True)
    best = min(taken, key=lambda text: taken[text])
    print("| model, batch | best by hand | chosen | of the best |")
    print("|---|---|---|---|")
    print(
        f"| {asked.model}, {asked.batch} | {best}: {taken[best] * 1e3:.1f} ms "
        f"| {chosen}: {taken[chosen] * 1e3:.1f} ms | {taken[chosen] / taken[best]:.2f} |"
    )


if __name__ == "__main__":
    main()
