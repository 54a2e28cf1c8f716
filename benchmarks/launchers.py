"""What does a launcher cost? Time from the command to the first step of four workers, and steps a second.

    python benchmarks/launchers.py local mpi slurm [--workers 4] [--repeats 5] [--steps 200] [--width 256]

Every engine is ready before: a cluster is up, as for a user of one. It starts `echelon run`, and
DistributedDataParallel by its own means (`PEERS`), in turns.

    first step   from the start of the command until rank 0 has ended its first step, with all workers
    steps/s      of rank 0, after ten steps; the ratio is to `echelon run --on local` in the same turn

Medians of all turns; every turn is on standard error, with the machine's load: where the load is above the
number of cores, or turns differ much, the medians say little. Engines come from
`tests/engines/`; a peer is a name and a command, or none.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path += [str(ROOT / "src"), str(ROOT / "tests")]

from engines import Engine, engine_of  # noqa: E402 - from tests/

# What both train: unless --width says otherwise a small model, so that starting and exchanging is measured.
COMMON = """
import os, sys, time, torch
from torch import nn
torch.manual_seed(0)
width = int(os.environ["WIDTH"])
model = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
steps, told = int(sys.argv[1]), sys.argv[2]
data = torch.utils.data.TensorDataset(torch.randn(64 * steps, 64), torch.randint(0, 10, (64 * steps,)))

def train(model, optimizer, loader, rank):
    begun = None
    for step, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        if step == 0 and rank == 0:
            first = time.time()
        if step == 9:
            begun = time.perf_counter()
    if rank == 0:
        rate = (step - 9) / (time.perf_counter() - begun)
        with open(told, "w") as file:
            file.write(f"{first} {rate}")
"""
OURS = (
    COMMON
    + """
import echelon
session = echelon.join()
loader = torch.utils.data.DataLoader(data, batch_size=64)
train(*session.prepare(model, optimizer, loader), session.rank)
"""
)
DDP = (
    COMMON
    + """
import torch.distributed as dist
def place(*names):
    return next(int(os.environ[name]) for name in names if name in os.environ)
rank = place("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
size = place("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS")
torch.set_num_threads(max(1, (os.cpu_count() or 1) // size))
dist.init_process_group("gloo", rank=rank, world_size=size)
sampler = torch.utils.data.distributed.DistributedSampler(data, size, rank, shuffle=False)
loader = torch.utils.data.DataLoader(data, batch_size=64 // size, sampler=sampler)
train(nn.parallel.DistributedDataParallel(model), optimizer, loader, rank)
dist.destroy_process_group()
"""
)


@dataclass(frozen=True)
class Peer:
    """How an engine starts training by itself.

    `command(workers)` is followed by the number of steps and the file that rank 0 writes to. The working
    folder has `ddp.py`; a program of another kind is written by `prepare`.
    """

    name: str
    command: Callable[[int], list[str]]
    prepare: Callable[[Path], None] = lambda folder: None


def _mpirun(workers: int) -> list[str]:
    found = shutil.which("mpirun") or str(Path(sys.executable).with_name("mpirun"))
    as_root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    return [
        found,
        *as_root,
        "--oversubscribe",
        "--bind-to",
        "none",
        "-n",
        str(workers),
        sys.executable,
        "ddp.py",
    ]


PEERS: dict[str, Peer] = {
    "local": Peer(
        "torchrun + DDP",
        lambda workers: [
            sys.executable,
            "-m",
            "torch.distributed.run",
            f"--nproc-per-node={workers}",
            "ddp.py",
        ],
    ),
    "mpi": Peer("mpirun + DDP", _mpirun),
    "slurm": Peer(
        "srun + DDP",
        lambda workers: [
            "srun",
            "--nodes=2",
            f"--ntasks={workers}",
            "--mpi=none",
            sys.executable,
            "ddp.py",
        ],
    ),
}


@dataclass(frozen=True)
class Measured:
    """One run."""

    first_step_s: float
    steps_per_s: float


def ours(engine: Engine, workers: int) -> list[str]:
    """The command that trains with Echelon on this engine."""
    return [sys.executable, "-m", "echelon", "run", *engine.words(workers), "ours.py"]


def measure(command: list[str], steps: int, folder: Path, env: dict[str, str]) -> Measured:
    """Run one command."""
    told = folder / "told"
    told.unlink(missing_ok=True)
    begun = time.time()
    done = subprocess.run(
        [*command, str(steps), str(told)], cwd=folder, env=env, capture_output=True, text=True, timeout=300
    )
    if done.returncode or not told.exists():
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
    first, rate = map(float, told.read_text().split())
    shutil.rmtree(folder / "runs", ignore_errors=True)
    return Measured(first - begun, rate)


def environment(engine: Engine, width: int) -> dict[str, str]:
    """That of a command. The address is for peers; `echelon run` finds its own."""
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    return {
        **os.environ, "WIDTH": str(width), "PYTHONPATH": path,
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511", **engine.env,
    }  # fmt: skip


def turns(engines: dict[str, Engine], asked: argparse.Namespace, folder: Path) -> list[dict[str, Measured]]:
    """All commands in turns, in an order that rotates."""
    commands = {f"{name} ours": (ours(engine, asked.workers), engine) for name, engine in engines.items()}
    for name in engines:
        if name in PEERS:
            PEERS[name].prepare(folder)
            commands[f"{name} peer"] = (PEERS[name].command(asked.workers), engines[name])
    names = list(commands)
    found: list[dict[str, Measured]] = []
    for turn in range(asked.repeats):
        at = turn % len(names)
        found.append({})
        for name in names[at:] + names[:at]:
            command, engine = commands[name]
            one = measure(command, asked.steps, folder, environment(engine, asked.width))
            found[-1][name] = one
            load = os.getloadavg()[0]
            said = f"first step {one.first_step_s:.1f} s, {one.steps_per_s:.0f} steps/s, load {load:.1f}"
            print(f"turn {turn}, {name}: {said}", file=sys.stderr, flush=True)
    return found


def rows(engines: list[str], found: list[dict[str, Measured]]) -> list[dict[str, object]]:
    """One row for each engine, of medians."""
    out: list[dict[str, object]] = []
    for name in engines:
        row: dict[str, object] = {
            "engine": name,
            "first step [s]": _median(turn[f"{name} ours"].first_step_s for turn in found),
        }
        if name in PEERS:
            row["peer"] = PEERS[name].name
            row["its first step [s]"] = _median(turn[f"{name} peer"].first_step_s for turn in found)
            row["ours / its"] = _median(
                turn[f"{name} ours"].first_step_s / turn[f"{name} peer"].first_step_s for turn in found
            )
        row["steps/s"] = _median(turn[f"{name} ours"].steps_per_s for turn in found)
        row["of local"] = _median(
            turn[f"{name} ours"].steps_per_s / turn["local ours"].steps_per_s for turn in found
        )
        out.append(row)
    return out


def _median(values: object) -> float:
    return statistics.median(values)  # type: ignore[call-overload, no-any-return]


def main() -> None:
    """Measure and print."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    options.add_argument("engines", nargs="+")
    options.add_argument("--workers", type=int, default=4)
    options.add_argument("--repeats", type=int, default=5)
    options.add_argument("--steps", type=int, default=200)
    options.add_argument("--width", type=int, default=256, help="of the model's hidden layer")
    options.add_argument("--json", action="store_true")
    asked = options.parse_args()
    names = list(dict.fromkeys(["local", *asked.engines]))
    missing = {name: engine_of(name).missing() for name in names if engine_of(name).missing()}
    for name, why in missing.items():
        print(f"{name}: {why}", file=sys.stderr)
    names = [name for name in names if name not in missing]
    engines: dict[str, Engine] = {}
    with tempfile.TemporaryDirectory(prefix="launchers-") as made:
        folder = Path(made)
        (folder / "ours.py").write_text(OURS)
        (folder / "ddp.py").write_text(DDP)
        try:
            for name in names:
                (folder / name).mkdir()
                engines[name] = engine_of(name)(folder / name)
            table = rows(names, turns(engines, asked, folder))
        finally:
            for engine in engines.values():
                engine.close()
    if asked.json:
        print(json.dumps(table))
        return
    columns = list(dict.fromkeys(column for row in table for column in row))
    print("  ".join(f"{column:>18s}" for column in columns))
    for row in table:
        texts = [row.get(column, "") for column in columns]
        print("  ".join(f"{text:18.2f}" if isinstance(text, float) else f"{text!s:>18s}" for text in texts))


if __name__ == "__main__":
    main()
