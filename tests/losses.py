"""Runs from which workers are taken by signals: starts one, takes workers, and looks at the others."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import psutil

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
def changed(change):
    assert (change.rank, change.world_size) == (session.rank, session.world_size)
    session.barrier()  # all members are at the same place; another one may be lost meanwhile
    told = [change.lost, change.left, change.joined, change.world_size, change.step]
    open(f"changes-{{slot}}", "a").write(json.dumps(told) + "\\n")

session.on_change(changed)
waits, missed, until = "WAITS" in os.environ, False, None
if "ECHELON_RETURNS" in os.environ:
    open("coming", "w").close()
drawn = open(f"drawn-{{slot}}", "a", buffering=1)
stepped = open(f"stepped-{{slot}}", "a", buffering=1)
for epoch in session.epochs({EPOCHS}):
    for x, y, i in loader:
        if not session.is_left_out:
            drawn.write(json.dumps([epoch, i.tolist(), time.time(), os.getpid()]) + "\\n")
        optimizer.zero_grad(set_to_none=epoch % 2 == 0)
        nn.functional.cross_entropy(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if not session.is_left_out:
            stepped.write(f"{{time.time()}}\\n")
        held = time.monotonic() + 90 if "HOLDS" in os.environ else 0
        while time.monotonic() < held and not os.path.exists("go"):
            time.sleep(0.02)
        time.sleep(0.004)
        missed |= session.world_size < {WORKERS}
        waits &= not (missed and session.world_size == {WORKERS})
        if waits and missed:
            until = until or time.monotonic() + 60  # on a busy machine a process takes long to start
            while not os.path.exists("coming") and time.monotonic() < until:
                time.sleep(0.05)
            time.sleep(0.2)
    session.mean(1.0)
weights = b"".join(value.numpy().tobytes() for value in model.state_dict().values())
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


def slowed(slot: int, step: int, times: int, *, anew: bool = False) -> str:
    """The script, with one worker that is far slower for so many batches, from about this step on.

    The others take their time until it is back; with `anew` only once they are in the second epoch.
    """
    slow = f"""
        batches = globals().get("batches", 0) + 1
        if slot == "{slot}" and {step} <= batches < {step + times} and "ECHELON_RETURNS" not in os.environ:
            time.sleep(0.4)
        if slot == "{slot}" and batches == {step + times}:
            open("coming", "w").close()
            open("pid-{slot}", "w").write(str(os.getpid()))
        optimizer.zero_grad("""
    script = SCRIPT.replace("\n        optimizer.zero_grad(", slow)
    return script.replace("time.sleep(0.2)", f"time.sleep(0.01 if {anew} and epoch == 0 else 0.4)")


def unfit(slot: int, steps: str) -> str:
    """The script, where the inputs of one worker are NaN in these steps, such as "session.step == 9"."""
    here = f'slot == "{slot}" and {steps} and "ECHELON_RETURNS" not in os.environ'
    nan = f"""
        x = x * float("nan") if {here} else x
        optimizer.zero_grad("""
    script = SCRIPT.replace("\n        optimizer.zero_grad(", nan)
    drawn = "        if not session.is_left_out:\n            drawn"
    return script.replace(drawn, f"        if not ({here}):\n            drawn")


FLIPPING = f"""
import os, sys, threading
sys.path.insert(0, {str(Path(__file__).resolve().parent.parent)!r})
from tests.attack.relay import Relay
from echelon.comm.meet import mesh

class Flips(Relay):
    def _start(self, act, *args):
        threading.Thread(target=act, args=args, daemon=True).start()

    def _changed(self, frame):
        due = not os.path.exists("flipped") or "ALWAYS" in os.environ
        if os.path.exists("flip") and len(frame) > 200 and due:
            open("flipped", "w").close()
            return frame[:-1] + bytes([frame[-1] ^ 1])
        return frame

publish = mesh.publish

def redirected(rendezvous, view, here):
    if rendezvous.me.rank == 0:
        relay = Flips(("127.0.0.1", here.port), "read")
        here = mesh.ListenAddress("127.0.0.1", relay.port)
    publish(rendezvous, view, here)

if os.environ["RANK"] == "0":
    mesh.publish = redirected
""" + SCRIPT.replace(
    "        optimizer.zero_grad",
    """        if session.step == 9:
            open("flip", "w").close()
        optimizer.zero_grad""",
)
"""The script with a relay before the first worker, which changes a bit in a frame, or in all if ALWAYS."""

NORMALISED = """
class Dying(nn.Module):
    \"\"\"Passes its input on; with DIES="2:forward" (or backward) slot 2 is killed there, in step 9.\"\"\"

    calls = 0

    def forward(self, x):
        self.calls += self.training
        slot, _, where = os.environ.get("DIES", "-1:").partition(":")
        if int(slot) == int(os.environ["RANK"]) and self.calls == 9 and "ECHELON_RETURNS" not in os.environ:
            if where == "forward":
                os.kill(os.getpid(), 9)
            x.register_hook(lambda grad: os.kill(os.getpid(), 9))
        return x

model = nn.Sequential(
    nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), Dying(), nn.Linear(64, 32), nn.BatchNorm1d(32),
    nn.ReLU(), nn.Linear(32, 4),
)
optimizer"""
"""To be put in the place of the script's model: one with batch normalisation over all workers."""


def normalised(script: str = SCRIPT) -> str:
    """The script with this model."""
    start = script.index("model = nn.Sequential")
    return script[:start] + NORMALISED.strip() + script[script.index(" = torch.optim") :]


SAVING = """
import os
from echelon.checkpoint import store

def dies_in(name):
    own, calls = getattr(store, name), []
    def called(*args, **options):
        calls.append(1)
        if os.environ.get("DIES") == f"{os.environ['RANK']}:{name}" and len(calls) == 2:
            os.kill(os.getpid(), 9)
        return own(*args, **options)
    setattr(store, name, called)

dies_in("write_part")
dies_in("commit")
""" + SCRIPT.replace("    session.mean(1.0)\n", "    session.mean(1.0)\n    session.save('own', keep=1)\n")
"""The script, which also saves after each epoch; with DIES="2:write_part" slot 2 is killed there."""

UNEQUAL = SCRIPT.replace(
    "        optimizer.zero_grad",
    "        time.sleep(len(x) * (0.012 if slot == '2' else 0.003))\n        optimizer.zero_grad",
).replace(
    "torch.manual_seed(0)",
    "from echelon.train import auto_shares\nauto_shares._WARM_UP_S = 0.0\ntorch.manual_seed(0)",
)
"""The script with a slow worker, so that shares change soon."""

SLOW = SCRIPT.replace("time.sleep(0.004)", "time.sleep(0.004 if os.path.exists('stopped') else 0.05)")
"""The script, which takes its time until it was stopped once."""


@dataclass(frozen=True)
class Kill:
    """A signal to a worker, so long after all have begun to train, or after the kill before.

    with `on_s` SIGSTOP and, so long after that, SIGCONT; with `machine` the agent of its machine is killed
    leaves  it waits until so many others take part
    """

    slot: int
    after_s: float
    on_s: float | None = None
    machine: bool = False
    leaves: int = 0

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
    dies: str = "",
    words: Sequence[str] = (),
    stops: bool = False,
    act: Callable[[Path], None] | None = None,
    period: int = 1,
    epochs: int = EPOCHS,
    waits: bool = True,
) -> Outcome:
    """Start a run in an empty folder, kill workers of it, and look at what is left.

    With `respawn` the script takes its time while a worker is missing, so that it can come back. `dies`
    names a slot and where it is killed, in scripts that do so themselves; `words` are further options.
    With `stops` the launcher gets SIGTERM after the kills, and the run is resumed. `period`: after how many
    steps workers meet. With `act` all workers wait after some steps, until that function has done something
    to the run. Without `waits` the script does not wait for workers that are missing.
    """
    script = script.replace(f"session.epochs({EPOCHS})", f"session.epochs({epochs})")
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
            env={
                **os.environ,
                **({"WAITS": "1"} if respawn and waits and not act else {}),
                **({"DIES": dies} if dies else {}),
                **({"HOLDS": "1"} if act else {}),
            },
        )
        try:
            killed = _kill(folder, process, kills, timers)
            if act is not None:
                act(folder)
                (folder / "go").touch()
            if stops:
                time.sleep(0.5)
                process.send_signal(signal.SIGTERM)
            code = process.wait(limit_s)
            if stops and code == 75:
                code = _resumed(folder, output, limit_s)
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
    if dies:
        killed[int(dies.partition(":")[0])] = 0.0
    return _judged(folder, code, text, killed, period, epochs)


def _resumed(folder: Path, output: IO[bytes], limit_s: float) -> int:
    (folder / "stopped").touch()
    (record,) = (folder / "runs").iterdir()
    command = [sys.executable, "-m", "echelon", "resume", str(record)]
    return subprocess.run(
        command, cwd=folder, stdout=output, stderr=output, timeout=limit_s, check=False
    ).returncode


def _lines(folder: Path, slot: int) -> list[list]:
    file = folder / f"drawn-{slot}"
    return [json.loads(line) for line in file.read_text().split("\n")[:-1]] if file.exists() else []


def pid_of(folder: Path, slot: int) -> int:
    """The process that has drawn last in a slot."""
    return int(_lines(folder, slot)[-1][3])


def agent_of(pid: int) -> int:
    """The process that has started a worker."""
    environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return int(next(one.partition(b"=")[2] for one in environ if one.startswith(b"ECHELON_LAUNCHER=")))


def longest_gap_s(folder: Path) -> float:
    """For how long no worker took a step, at most."""
    files = folder.glob("stepped-*")
    times = sorted(float(line) for file in files for line in file.read_text().split())
    return max((later - earlier for earlier, later in itertools.pairwise(times)), default=0.0)


def changes(folder: Path, slot: int) -> list[list]:
    """What one worker's function was told: lost, left, joined, how many are left, after how many steps."""
    file = folder / f"changes-{slot}"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def _taking_part(folder: Path, slot: int) -> int:
    """How many others have processes that have drawn."""
    others = [one for one in range(WORKERS) if one != slot]
    return sum(psutil.pid_exists(pid_of(folder, one)) for one in others)


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
        until = time.monotonic() + 60
        while _taking_part(folder, kill.slot) < kill.leaves and time.monotonic() < until:
            time.sleep(0.05)
        if process.poll() is not None or (folder / f"weights-{kill.slot}").exists():
            break  # the run is over
        pid = pid_of(folder, kill.slot)
        try:
            os.kill(agent_of(pid) if kill.machine else pid, kill.signal)
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


def _judged(
    folder: Path, code: int, text: str, killed: dict[int, float], period: int, epochs: int
) -> Outcome:
    wrong: list[str] = []
    done = [slot for slot in range(2 * WORKERS) if (folder / f"weights-{slot}").exists()]
    if len({(folder / f"weights-{slot}").read_text() for slot in done}) != 1:
        wrong.append("survivors have different weights")
    told = {slot: changes(folder, slot) for slot in done}
    out = {int(slot) for slot in re.findall(r"rank (\d+) was left out: a step took", text)}
    longest = max(told.values(), key=len, default=[])  # a later process knows the last ones
    several = {slot for slot in told if len({line[3] for line in _lines(folder, slot)}) > 1}
    known = {slot: one for slot, one in told.items() if one and slot not in out | several}
    if any(one != longest[-len(one) :] for one in known.values()):
        wrong.append(f"survivors were told of different changes: {told}")
    counts: dict[int, Counter[int]] = defaultdict(Counter)
    under_way: dict[int, list[set[int]]] = defaultdict(list)
    few: dict[tuple[int, tuple[int, ...]], int] = {}  # drawn again by all of them, if fewer than workers
    pause_s = 0.0
    for slot in range(2 * WORKERS):
        lines = _lines(folder, slot)
        pids = list(dict.fromkeys(line[3] for line in lines))
        for pid in pids if slot not in done else pids[:-1]:
            own = [at for at, line in enumerate(lines) if line[3] == pid]
            for last in reversed(own[-period:]):
                epoch, positions, *_ = lines.pop(last)  # it may have been in the last sum, or not
                under_way[epoch].append(set(positions))
        for epoch, positions, *_ in lines:
            first = few.setdefault((epoch, tuple(positions)), slot) if len(positions) < WORKERS else slot
            counts[epoch].update(positions if first == slot else ())
        if slot in done and len(pids) == 1:
            pause_s = max(pause_s, _pause_s(folder, slot, [line[2] for line in lines], killed.values()))
    for epoch in range(epochs):
        if twice := [i for i, n in counts[epoch].items() if n > 1]:
            wrong.append(f"epoch {epoch}: {len(twice)} samples were used twice")
        missing = set(range(SAMPLES)) - set(counts[epoch])
        parts = under_way[epoch]
        choices = (c for n in range(len(parts) + 1) for c in itertools.combinations(parts, n))
        if not any(missing == set().union(*choice) for choice in choices):
            wrong.append(f"epoch {epoch}: {len(missing)} samples were not used")
    return Outcome(code, text, wrong, pause_s)
