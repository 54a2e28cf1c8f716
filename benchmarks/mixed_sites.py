"""Two sites, a thin uplink, nodes listed in mixed order: is a run that is told nothing as fast as by hand?

    python benchmarks/mixed_sites.py [--rounds 3] [--steps 120] [--only auto,ddp]

Six lab nodes (root needed), three at each site, 1 Gb/s inside, 100 Mb/s between the sites, train a small
multilayer perceptron. `auto` lists nodes of both sites in turn and is told nothing: the run finds the sites
by its own measurements. By hand, nodes are listed by site and the collective is given: several are tried.
`ring` and DDP (Gloo) have the mixed order. The time is the median of the steps in the second half.
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
from itertools import pairwise
from pathlib import Path

# Whether nodes are listed by site, and options of `echelon run`.
WAYS: dict[str, tuple[bool, list[str]]] = {
    "auto": (False, []),
    "by hand: groups of sites": (True, ["--collective", "hierarchical(sizes=[3, 3])"]),
    "by hand: groups, one rail": (True, ["--collective", "hierarchical(sizes=[3, 3], rails=false)"]),
    "by hand: ring by site": (True, ["--collective", "ring"]),
    "ring": (False, ["--collective", "ring"]),
    "ddp": (False, []),
}


def work(way: str, steps: int) -> None:
    """In every worker: some steps; rank 0 prints the median of the second half."""
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU())
    model.append(nn.Linear(512, 10))
    data = TensorDataset(torch.randn(1024, 256), torch.randint(0, 10, (1024,)))
    batch = 48
    if way == "ddp":
        import torch.distributed as dist

        from echelon.observe.readiness import WorkerPhase, tell

        dist.init_process_group("gloo")
        rank = dist.get_rank()
        model = nn.parallel.DistributedDataParallel(model)
        loader = DataLoader(data, batch_size=batch // dist.get_world_size())
        tell(WorkerPhase.TRAINING)
    else:
        import echelon

        session = echelon.join()
        rank = session.rank
        loader = DataLoader(data, batch_size=batch)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    if way != "ddp":
        model, optimizer, loader = session.prepare(model, optimizer, loader, factors="never")
    ends: list[float] = []
    while len(ends) < steps:
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            ends.append(time.perf_counter())
            if len(ends) == steps:
                break
    if rank == 0:
        late = ends[len(ends) // 2 :]
        lengths = [after - before for before, after in pairwise(late)]
        print(json.dumps({"step_ms": 1e3 * statistics.median(lengths)}), flush=True)
    if way == "ddp":
        dist.destroy_process_group()


def lab_of(by_site: bool) -> str:
    """The lab's file; nodes of the two sites in turn, or by site."""
    names = [("a", at) for at in range(3)] + [("b", at) for at in range(3)]
    if not by_site:
        names.sort(key=lambda one: (one[1], one[0]))
    nodes = "".join(
        f'[[node]]\nname = "{site}{at}"\nsite = "{site}"\ncpu = 0.3\nlink = "1gbit"\n' for site, at in names
    )
    return f'{nodes}[[uplink]]\nbetween = ["a", "b"]\nrate = "100mbit"\n'


def run(way: str, steps: int) -> float:
    """One run in the lab; the step's milliseconds."""
    by_site, options = WAYS[way]
    with tempfile.TemporaryDirectory() as folder:
        lab = Path(folder) / "sites.toml"
        lab.write_text(lab_of(by_site))
        command = [sys.executable, "-m", "echelon", "run", "--lab", str(lab), "--runs", folder]
        command += [*options, "--plan", "none", str(Path(__file__).resolve())]
        command += ["--work", way, "--steps", str(steps)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode:
        raise SystemExit(f"{way}: {done.stdout}{done.stderr}")
    return float(json.loads(done.stdout.strip().splitlines()[-1])["step_ms"])


def main() -> None:
    """Measure all ways in turns."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--steps", type=int, default=120)
    options.add_argument("--only", default="", help="ways whose names begin so, with commas")
    options.add_argument("--work", default="")
    asked = options.parse_args()
    if asked.work and "RANK" in os.environ:
        work(asked.work, asked.steps)
        return
    begins = asked.only.split(",") if asked.only else [""]
    found: dict[str, list[float]] = {way: [] for way in WAYS if any(way.startswith(one) for one in begins)}
    for _ in range(asked.rounds):
        for way, times in found.items():
            times.append(run(way, asked.steps))
            print(f"{way}: {times[-1]:.1f} ms", file=sys.stderr, flush=True)
    medians = {way: statistics.median(times) for way, times in found.items()}
    for way, step_ms in medians.items():
        print(f"{way:28s} {step_ms:8.1f} ms a step")
    hand = [step_ms for way, step_ms in medians.items() if way.startswith("by hand")]
    if hand and "auto" in medians:
        part = medians["auto"] / min(hand)
        print(f"nothing told, against the best by hand: {part:.2f} x its time (target 1.1)")


if __name__ == "__main__":
    main()
