"""How long do the others stand still when a worker is killed? Here, torchrun with DDP, and torchft.

    python benchmarks/recovery.py [--kills N] [--torchft FOLDER] [--json]

Four workers train an MLP of 4 x 256, and one of them is killed with SIGKILL:

    echelon   --min-workers 2, with nothing tuned; over shared memory and over TCP
    torchrun  DDP over Gloo with --max-restarts, from a checkpoint that rank 0 writes every 50 steps
    torchft   its DDP over Gloo with its defaults, each worker a group of its own; FOLDER has what
              `pip install --target FOLDER` has put there: torchft-nightly without its dependencies, then
              those other than torch

The pause is the longest time around the kill in which no worker was further than all had been before, so
steps that are done again count as standing still. Beside it the median step before the kill. Systems
alternate. A run without progress for 60 s after the kill counts as 60 s.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

WORKERS, KILLED = 4, 2
_LONGEST_S = 60.0
_START_S = 90.0
_WARM_STEPS, _STEPS = 50, 300

_MODEL = """
import os, time
from datetime import timedelta
import torch
from torch import nn
torch.set_num_threads(1)
torch.manual_seed(0)
layers = [part for _ in range(4) for part in (nn.Linear(256, 256), nn.ReLU())]
model = nn.Sequential(*layers)
told = None

def tell(rank, step):
    global told
    if told is None:
        open(f"pid-{rank}", "w").write(str(os.getpid()))
        told = open(f"steps-{rank}", "a", buffering=1)
    told.write(f"{step} {time.time()}\\n")
"""

_ECHELON = (
    _MODEL
    + """
import echelon
from torch.utils.data import DataLoader, TensorDataset
session = echelon.join(seed=1)
rank = int(os.environ["RANK"])
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
data = TensorDataset(torch.randn(128 * 1000, 256))
model, optimizer, loader = session.prepare(model, optimizer, DataLoader(data, batch_size=128))
for epoch in session.epochs(1000):
    for (x,) in loader:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        tell(rank, session.step)
"""
)

_TORCHRUN = (
    _MODEL
    + """
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
rank = dist.get_rank()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
step = 0
if os.path.exists("saved.pt"):
    saved = torch.load("saved.pt")
    model.load_state_dict(saved["model"]), optimizer.load_state_dict(saved["optimizer"])
    step = saved["step"]
ddp = DistributedDataParallel(model)
while True:
    x = torch.randn(32, 256)
    optimizer.zero_grad()
    ddp(x).square().mean().backward()
    optimizer.step()
    step += 1
    if rank == 0 and step % 50 == 0:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
        torch.save(state, "saving.pt")
        os.replace("saving.pt", "saved.pt")
    tell(rank, step)
"""
)

_TORCHFT = (
    _MODEL
    + """
import torch.distributed as dist
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo
rank = int(os.environ["REPLICA_GROUP_ID"])
inner = torch.optim.SGD(model.parameters(), lr=1e-3)

def load(state):
    model.load_state_dict(state["model"]), inner.load_state_dict(state["optimizer"])

store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
manager = Manager(
    pg=ProcessGroupGloo(), min_replica_size=2, load_state_dict=load,
    state_dict=lambda: {"model": model.state_dict(), "optimizer": inner.state_dict()},
    replica_id=f"worker_{rank}", store_addr="127.0.0.1", store_port=store.port, rank=0, world_size=1,
)
ddp, optimizer = DistributedDataParallel(manager, model), Optimizer(manager, inner)
step = 0
while True:
    x = torch.randn(32, 256)
    optimizer.zero_grad()
    ddp(x).square().mean().backward()
    optimizer.step()
    if manager.current_step() > step:
        step = manager.current_step()
        tell(rank, step)
"""
)


@dataclass(frozen=True)
class Recovery:
    """How one run took the kill; the step is the median before it."""

    pause_s: float
    step_ms: float


@contextlib.contextmanager
def _started(folder: Path, commands: list[tuple[list[str], dict[str, str]]]) -> Iterator[None]:
    """Processes in sessions of their own, ended with all that they started."""
    with (folder / "output").open("ab") as output:
        processes = [
            subprocess.Popen(
                command,
                cwd=folder,
                env={**os.environ, "OMP_NUM_THREADS": "1", **env},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            for command, env in commands
        ]
        try:
            yield
        finally:
            for process in processes:
                process.send_signal(signal.SIGINT)
            for process in processes:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(10)
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            for file in folder.glob("pid-*"):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(file.read_text()), signal.SIGKILL)


def _front(folder: Path) -> list[float]:
    """When a step was taken that was further than all before, by time."""
    lines = [
        (float(at), int(step))
        for file in folder.glob("steps-*")
        for step, at in (line.split() for line in file.read_text().split("\n")[:-1])
    ]
    found, furthest = [], 0
    for at, step in sorted(lines):
        if step > furthest:
            found.append(at)
            furthest = step
    return found


def _measured(folder: Path) -> Recovery:
    """Kill a worker of the run that goes on in this folder."""
    until = time.monotonic() + _START_S
    while len(_front(folder)) < _STEPS or len(list(folder.glob("pid-*"))) < WORKERS:
        if time.monotonic() > until:
            raise SystemExit(f"no {_STEPS} steps within {_START_S:g} s\n" + (folder / "output").read_text())
        time.sleep(0.2)
    os.kill(int((folder / f"pid-{KILLED}").read_text()), signal.SIGKILL)
    killed = time.time()
    until = time.monotonic() + _LONGEST_S
    while sum(at > killed for at in _front(folder)) < _WARM_STEPS and time.monotonic() < until:
        time.sleep(0.2)
    front = _front(folder)
    before = [b - a for a, b in itertools.pairwise(front[_WARM_STEPS:]) if b <= killed]
    around = [b - a for a, b in itertools.pairwise(front) if b > killed]
    went_on = len(around) >= _WARM_STEPS
    return Recovery(max(around) if went_on else _LONGEST_S, 1e3 * statistics.median(before))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def echelon_run(folder: Path, transport: str) -> Recovery:
    """`echelon run --min-workers 2`."""
    (folder / "train.py").write_text(_ECHELON)
    words = ["--workers", str(WORKERS), "--min-workers", "2", "--transport", transport]
    command = [sys.executable, "-m", "echelon", "run", *words, "train.py"]
    with _started(folder, [(command, {})]):
        return _measured(folder)


def torchrun(folder: Path) -> Recovery:
    """DDP, restarted from its last checkpoint."""
    (folder / "train.py").write_text(_TORCHRUN)
    words = ["--standalone", "--nproc-per-node", str(WORKERS), "--max-restarts", "3"]
    command = [sys.executable, "-m", "torch.distributed.run", *words, "train.py"]
    with _started(folder, [(command, {})]):
        return _measured(folder)


def torchft(folder: Path, installed: Path) -> Recovery:
    """torchft with its defaults."""
    (folder / "train.py").write_text(_TORCHFT)
    port = _free_port()
    env = {
        "PYTHONPATH": str(installed),
        "TORCHFT_LIGHTHOUSE": f"http://127.0.0.1:{port}",
        "NUM_REPLICA_GROUPS": str(WORKERS),
    }
    lighthouse = [str(installed / "bin" / "torchft_lighthouse"), "--min_replicas", "2"]
    commands = [([sys.executable, *lighthouse, "--bind", f"0.0.0.0:{port}"], env)]
    commands += [
        ([sys.executable, "train.py"], {**env, "REPLICA_GROUP_ID": str(rank)}) for rank in range(WORKERS)
    ]
    with _started(folder, commands):
        return _measured(folder)


def main() -> None:
    """Print the table, or the figures as JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=5, help="how many runs of each system")
    parser.add_argument("--torchft", type=Path, help="where it is installed; left out without it")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    systems: dict[str, Callable[[Path], Recovery]] = {
        "echelon, shm": lambda folder: echelon_run(folder, "shm"),
        "echelon, tcp": lambda folder: echelon_run(folder, "tcp"),
        "torchrun": torchrun,
    }
    if asked.torchft is not None:
        systems["torchft"] = lambda folder: torchft(folder, asked.torchft.resolve())
    found: dict[str, list[Recovery]] = {name: [] for name in systems}
    for _ in range(asked.kills):
        for name, carry_out in systems.items():
            with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
                found[name].append(carry_out(Path(folder)))
    rows = {
        name: {
            "kills": len(all_of),
            "median_pause_s": round(statistics.median(one.pause_s for one in all_of), 3),
            "worst_pause_s": round(max(one.pause_s for one in all_of), 3),
            "step_ms": round(statistics.median(one.step_ms for one in all_of), 2),
        }
        for name, all_of in found.items()
    }
    if asked.json:
        print(json.dumps(rows))
        return
    print("system        kills  pause, median  worst     step without faults")
    for name, row in rows.items():
        times = f"{row['median_pause_s']:11.3f} s  {row['worst_pause_s']:6.3f} s"
        print(f"{name:12}  {row['kills']:5}  {times}  {row['step_ms']:16.2f} ms")


if __name__ == "__main__":
    main()
