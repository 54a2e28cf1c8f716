"""What does keeping freed memory save? Models trained by one process each, in turns, with and without it.

    python benchmarks/kept_memory.py [--only resnet18,cnn] [--seconds 4] [--turns 3] [--json]

`as torch is` leaves glibc's settings; `kept` is what `echelon.join()` sets. One thread. Printed are the
median step, pages touched anew in a step, and the most memory of the process, as medians of the turns.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time

WAYS = ("as torch is", "kept")


def work(model_name: str, way: str, seconds: float) -> dict[str, float]:
    """Train in this process."""
    import torch

    from echelon.bench.workloads import WORKLOADS, loss_of
    from echelon.train.freed_memory import keep_freed_memory

    if way == "kept" and not keep_freed_memory():
        raise SystemExit("glibc cannot be set here: is MALLOC_..._ or GLIBC_TUNABLES set?")
    torch.set_num_threads(1)
    model, x, y = WORKLOADS[model_name].make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    steps: list[float] = []
    until = time.perf_counter() + seconds
    touched = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    while len(steps) < 5 or time.perf_counter() < until:
        if len(steps) == 3:
            touched = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        begun = time.perf_counter()
        optimizer.zero_grad()
        loss_of(model, x, y).backward()
        optimizer.step()
        steps.append(time.perf_counter() - begun)
    used = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "step_ms": statistics.median(steps[3:]) * 1e3,
        "pages": (used.ru_minflt - touched) / len(steps[3:]),
        "memory_mb": used.ru_maxrss / 1024,
    }


def main() -> None:
    """Measure and print."""
    from echelon.bench.workloads import WORKLOADS

    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    options.add_argument("--only", default=",".join(WORKLOADS))
    options.add_argument("--seconds", type=float, default=4.0)
    options.add_argument("--turns", type=int, default=3)
    options.add_argument("--json", action="store_true")
    options.add_argument("--work", default="")
    asked = options.parse_args()
    if asked.work:
        print(json.dumps(work(asked.only, asked.work, asked.seconds)))
        return
    table: dict[str, dict[str, dict[str, float]]] = {}
    for model in asked.only.split(","):
        turns: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
        for _ in range(asked.turns):
            for way in WAYS:
                command = [sys.executable, __file__, "--only", model, "--work", way]
                command += ["--seconds", str(asked.seconds)]
                done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True)
                turns[way].append(json.loads(done.stdout.splitlines()[-1]))
        table[model] = {
            way: {name: statistics.median(one[name] for one in found) for name in found[0]}
            for way, found in turns.items()
        }
        if not asked.json:
            usual, kept = (table[model][way] for way in WAYS)
            print(
                f"{model:12s} step {usual['step_ms']:7.2f} -> {kept['step_ms']:7.2f} ms"
                f" ({kept['step_ms'] / usual['step_ms']:.2f})"
                f"   pages {usual['pages']:6.0f} -> {kept['pages']:5.0f}"
                f"   memory {usual['memory_mb']:5.0f} -> {kept['memory_mb']:5.0f} MB",
                flush=True,
            )
    if asked.json:
        print(json.dumps(table))


if __name__ == "__main__":
    main()
