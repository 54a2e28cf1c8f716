"""Runs from which workers are taken by signals: starts one, takes workers, and looks at the others."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

SAMPLES, EPOCHS, WORKERS = 600, 3, 4

SCRIPT = f"""
import hashlib, json, os, time
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
import echelon

class Numbers(Dataset):
    def __len__(self):
        return {SAMPLES}
    def __getitem__(self, i):
        return torch.full((16,), i / {SAMPLES}), torch.tensor(i % 4), i

torch.manual_seed(0)
session = echelon.join(seed=1)
slot = os.environ["RANK"]
model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
model, optimizer, loader = session.prepare(
    model, optimizer, DataLoader(Numbers(), batch_size=24, shuffle=True)
)
waits, missed = "WAITS" in os.environ, False
if "ECHELON_RETURNS" in os.environ:
    open("coming", "w").close()
drawn = open(f"drawn-{{slot}}", "a", buffering=1)
stepped = open(f"stepped-{{slot}}", "a", buffering=1)
for epoch in session.epochs({EPOCHS}):
    for x, y, i in loader:
        drawn.write(json.dumps([epoch, i.tolist(), time.time(), os.getpid()]) + "\\n")
        optimizer.zero_grad(set_to_none=epoch % 2 == 0)
        nn.functional.cross_entropy(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        stepped.write(f"{{time.time()}}\\n")
        time.sleep(0.004)
        missed |= session.world_size < {WORKERS}
        waits &= not (missed and session.world_size == {WORKERS})
        if waits and missed:
            until = time.monotonic() + 60  # on a busy machine a process takes long to start
            while not os.path.exists("coming") and time.monotonic() < until:
                time.sleep(0.05)
            time.sleep(0.2)
    session.mean(1.0)
weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
open(f"weights-{{slot}}", "w").write(hashlib.sha256(weights).hexdigest())
session.print(f"done with {{session.world_size}} workers")
"""


def endless(slot: int, step: int) -> str:
    """The script, with a loop that does not end, on one worker after so many steps."""
    loop = f"""
        while slot == "{slot}" and session.step == {step} and "ECHELON_RETURNS" not in os.environ:
            time.sleep(0.001)
        optimizer.zero_grad("""
    return SCRIPT.replace("\n        optimizer.zero_grad(", loop)


@dataclass(frozen=True)
class Kill:
    """A signal to a worker, so long after all have begun to train, or after the kill before.

    with `on_s` SIGSTOP and, so long after that, SIGCONT
    """

    slot: int
    after_s: float
    on_s: float | None = None

    @property
    def signal(self) -> signal.Signals:
        """Which signal takes the worker."""
        return signal.SIGKILL if self.on_s is None else signal.SIGSTOP


@dataclass(frozen=True)
class Outcome:
    """How a run went. `wrong` is empty if survivors have the same weights and each sample was used once."""

    code: int
    output: str
    wrong: list[str]
    pause_s: float


def run(
    folder: Path,
    transport: str,
    kills: list[Kill],
    *,
    fewest: int = 2,
    respawn: int = 0,
    limit_s: float = 150.0,
    script: str = SCRIPT,
    words: tuple[str, ...] = (),
) -> Outcome:
    """Start a run in an empty folder, kill workers of it, and look at what is left.

    With `respawn` the script takes its time while a worker is missing, so that it can come back.
    """
    (folder / "train.py").write_text(script)
    timers: list[threading.Timer] = []
    options = ["--workers", str(WORKERS), "--min-workers", str(fewest), "--transport", transport]
    options += ["--respawn", str(respawn), *words]
    with (folder / "output").open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "echelon", "run", *options, "train.py"],
            cwd=folder,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **({"WAITS": "1"} if respawn else {})},
        )
        try:
            killed = _kill(folder, process, kills, timers)
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = -1
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
                process.wait(20)
            for timer in timers:
                timer.cancel()
                timer.join()
    text = (folder / "output").read_text(errors="replace")
    if code == -1:
        return Outcome(code, text, ["it hangs"], limit_s)
    return _judged(folder, code, text, killed)


def _lines(folder: Path, slot: int) -> list[list]:
    file = folder / f"drawn-{slot}"
    return [json.loads(line) for line in file.read_text().split("\n")[:-1]] if file.exists() else []


def _go_on(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


def _kill(
    folder: Path, process: subprocess.Popen[bytes], kills: list[Kill], timers: list[threading.Timer]
) -> dict[int, float]:
    until = time.monotonic() + 90
    while process.poll() is None and time.monotonic() < until:
        if all(_lines(folder, slot) for slot in range(WORKERS)):
            break
        time.sleep(0.01)
    killed: dict[int, float] = {}
    for kill in kills:
        time.sleep(kill.after_s)
        pid = _lines(folder, kill.slot)[-1][3]
        try:
            os.kill(pid, kill.signal)
        except ProcessLookupError:  # it was done
            continue
        killed[kill.slot] = time.time()
        if kill.on_s is not None:
            going_on = threading.Timer(kill.on_s, _go_on, (pid,))
            going_on.start()
            timers.append(going_on)
    return killed


def _pause_s(folder: Path, slot: int, drawn: list[float], killed: Collection[float]) -> float:
    """The longest of the steps during and after a kill, from the batch to the end of the step."""
    ends = [float(line) for line in (folder / f"stepped-{slot}").read_text().split()]
    steps = list(zip(drawn, ends, strict=False))
    found = [next((at for at, (_, end) in enumerate(steps) if end >= t), len(steps)) for t in killed]
    return max((end - begin for at in found for begin, end in steps[at : at + 2]), default=0.0)


def _judged(folder: Path, code: int, text: str, killed: dict[int, float]) -> Outcome:
    wrong: list[str] = []
    done = [slot for slot in range(WORKERS) if (folder / f"weights-{slot}").exists()]
    if len({(folder / f"weights-{slot}").read_text() for slot in done}) != 1:
        wrong.append("survivors have different weights")
    counts: dict[int, Counter[int]] = defaultdict(Counter)
    under_way: dict[int, list[set[int]]] = defaultdict(list)
    pause_s = 0.0
    for slot in range(WORKERS):
        lines = _lines(folder, slot)
        pids = list(dict.fromkeys(line[3] for line in lines))
        for pid in pids if slot not in done else pids[:-1]:
            last = max(at for at, line in enumerate(lines) if line[3] == pid)
            epoch, positions, *_ = lines.pop(last)  # it may have been in the last sum, or not
            under_way[epoch].append(set(positions))
        for epoch, positions, *_ in lines:
            counts[epoch].update(positions)
        if slot in done and len(pids) == 1:
            pause_s = max(pause_s, _pause_s(folder, slot, [line[2] for line in lines], killed.values()))
    for epoch in range(EPOCHS):
        if twice := [i for i, n in counts[epoch].items() if n > 1]:
            wrong.append(f"epoch {epoch}: {len(twice)} samples were used twice")
        missing = set(range(SAMPLES)) - set(counts[epoch])
        parts = under_way[epoch]
        choices = (c for n in range(len(parts) + 1) for c in itertools.combinations(parts, n))
        if not any(missing == set().union(*choice) for choice in choices):
            wrong.append(f"epoch {epoch}: {len(missing)} samples were not used")
    return Outcome(code, text, wrong, pause_s)
