"""Are runs right whose workers are killed, stopped or stuck at random moments? As a table.

    python benchmarks/chaos.py [--runs N] [--faults NAME,...] [--transports shm,tcp] [--job JOB] [--seed S]
                               [--seconds S] [--json] [--store FILE]

Each run has four workers. When the fault comes follows from the seed: during forward or backward passes,
rounds, while the others meet again, at the end of a pass.

    kill    one or two workers are killed, at once or shortly one after the other, and stay away
    return  the same, and lost workers are started again; the second kill may come while the first returns
    first   the first worker is killed, and is started again
    half    two workers at once, killed or stopped, and are started again
    stop    one worker is stopped for 1 to 20 s, then goes on, unless it was left out before
    loop    one worker is in an endless loop, and is started again
    slow    one worker is 20 times slower for a while, is left out, and comes back
    nan     gradients of one worker are NaN in one step, or from one step on
    flip    a bit of a frame between two workers is changed on its way (tcp only)
    elastic one worker leaves, and another one joins
    partition  the uplink of a lab of two sites is cut for 1, 10 or 60 s (a lab, needs root); the run waits
    machine a machine's agent is killed, and with it its two workers, which stay away (hosts only)
    churn   every 0.5 to 2 s a worker is killed, for so many --seconds, and is started again; not before
            two others take part: on a slow machine a process may take longer than that to start

Of transports, shm and tcp are of workers on one machine, and hosts of workers on two machines that ssh
reaches, which are this one: an sshd has to be installed. That one is made only if it is named.

The job is a small network (plain), also with batch normalisation over all workers (batchnorm), with
checkpoints in the background and by the script (checkpoints), with a slow worker and shares that follow it
(shares), with encoded gradients (codec), or with local steps (local).

A run is right if it ends by itself, all that are left have the same weights, every sample of every pass was
used once, and no process and no shared memory is left behind. The pause is the longest step of a worker
around a kill or a stop; the gap is for how long no worker at all took a step. `make chaos` stores both.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from tests.leaks import Snapshot, left_behind
from tests.losses import (
    FLIPPING,
    SAVING,
    SCRIPT,
    UNEQUAL,
    WORKERS,
    Kill,
    Outcome,
    endless,
    longest_gap_s,
    normalised,
    run,
    slowed,
    unfit,
)

from echelon.observe.run_folder import RunFolder
from echelon.start.control_client import ControlClient
from sshd import MISSING, SshServer

LAB = """
[[node]]
name = "east"
count = 2
site = "east"
link = "1gbit"
[[node]]
name = "west"
count = 2
site = "west"
link = "1gbit"
[[uplink]]
between = ["east", "west"]
rate = "100mbit"
"""
SOURCE = Path(__file__).resolve().parent.parent / "src"
LONG_S = 120.0  # a stopped worker is left out long before


class Draws(random.Random):
    """What is drawn for a run; `seconds`: for how long churn goes on."""

    seconds = 60.0


def _kill(drawn: random.Random) -> dict[str, Any]:
    slots = drawn.sample(range(WORKERS), drawn.choice([1, 1, 2]))
    others = [Kill(slot, drawn.choice([0.0, 0.003, drawn.uniform(0, 0.3)])) for slot in slots[1:]]
    return {"kills": [Kill(slots[0], drawn.uniform(0.0, 0.5)), *others]}


def _return(drawn: random.Random) -> dict[str, Any]:
    first, *others = _kill(drawn)["kills"]
    later = drawn.choice([0.0, drawn.uniform(0, 4.0)])
    return {"kills": [first, *(Kill(kill.slot, later) for kill in others)], "respawn": 3}


def _first(drawn: random.Random) -> dict[str, Any]:
    return {"kills": [Kill(0, drawn.uniform(0.0, 0.5))], "respawn": 3}


def _half(drawn: random.Random) -> dict[str, Any]:
    slots, on_s = drawn.sample(range(WORKERS), WORKERS // 2), drawn.choice([None, LONG_S])
    first, *others = slots
    after_s = drawn.uniform(0.0, 0.5)
    kills = [Kill(first, after_s, on_s), *(Kill(slot, 0.0, on_s) for slot in others)]
    return {"kills": kills, "respawn": 3}


def _stop(drawn: random.Random) -> dict[str, Any]:
    slot, after_s, on_s = drawn.randrange(WORKERS), drawn.uniform(0.0, 0.5), drawn.uniform(1.0, 20.0)
    return {"kills": [Kill(slot, after_s, on_s)], "respawn": 3}


def _loop(drawn: random.Random) -> dict[str, Any]:
    return {"kills": [], "respawn": 3, "script": endless(drawn.randrange(WORKERS), drawn.randrange(6, 70))}


def _slow(drawn: random.Random) -> dict[str, Any]:
    script = slowed(drawn.randrange(WORKERS), drawn.randrange(4, 40), drawn.randrange(5, 20))
    return {"kills": [], "respawn": 3, "script": script, "words": ("--leave-out", "median-mad")}


def _nan(drawn: random.Random) -> dict[str, Any]:
    compared = drawn.choice(["==", ">="])
    script = unfit(drawn.randrange(WORKERS), f"session.step {compared} {drawn.randrange(3, 60)}")
    return {"kills": [], "respawn": 3, "script": script, "waits": compared == ">="}


def _flip(drawn: random.Random) -> dict[str, Any]:
    step = f"session.step == {drawn.randrange(2, 70)}"
    return {"kills": [], "script": FLIPPING.replace("session.step == 9", step)}


def _elastic(drawn: random.Random) -> dict[str, Any]:
    slot, wait_s = drawn.randrange(WORKERS), drawn.uniform(0.0, 0.5)

    def act(folder: Path) -> None:
        time.sleep(wait_s)
        with contextlib.closing(ControlClient(RunFolder.find("latest", folder / "runs"))) as client:
            client.join(1)
            until = time.monotonic() + 60
            while client.where([WORKERS]) != {WORKERS: "waiting"} and time.monotonic() < until:
                time.sleep(0.05)
            client.leave([slot])

    return {"kills": [], "respawn": 3, "act": act}


def _partition(drawn: Draws) -> dict[str, Any]:
    at_s, for_s = drawn.uniform(0.5, 3.0), drawn.choice([1.0, 10.0, 60.0])
    lab = LAB + "".join(
        f'[[fault]]\nat_s = {when:.2f}\naction = "{action}"\nlink = "east/west"\n'
        for when, action in ((at_s, "cut"), (at_s + for_s, "restore"))
    )
    return {
        "kills": [],
        "respawn": 3,
        "script": SCRIPT.replace("time.sleep(0.004)", "time.sleep(0.03)"),
        "epochs": 8,
        "words": ("--lab", "lab.toml", "--join-timeout-s", "150"),
        "limit_s": 300.0,
        "files": {"lab.toml": lab},
    }


def _machine(drawn: Draws) -> dict[str, Any]:
    kill = Kill(drawn.choice([0, 2]), drawn.uniform(0.0, 0.5), machine=True)
    return {"kills": [kill], "respawn": 3, "waits": False}


def _churn(drawn: Draws) -> dict[str, Any]:
    kills, left_s = [], drawn.seconds
    while left_s > 0:
        kills.append(Kill(drawn.randrange(WORKERS), drawn.uniform(0.5, 2.0), leaves=2))
        left_s -= kills[-1].after_s
    script = SCRIPT.replace("time.sleep(0.004)", "time.sleep(0.03)")
    return {
        "kills": kills,
        "respawn": 3,
        "script": script,
        "epochs": max(4, round(3 * drawn.seconds)),
        "waits": False,
        "limit_s": 150.0 + 4 * drawn.seconds,
        "fewest": 1,
    }


FAULTS: dict[str, Callable[[Draws], dict[str, Any]]] = {
    "kill": _kill,
    "return": _return,
    "first": _first,
    "half": _half,
    "stop": _stop,
    "loop": _loop,
    "slow": _slow,
    "nan": _nan,
    "flip": _flip,
    "elastic": _elastic,
    "partition": _partition,
    "churn": _churn,
    "machine": _machine,
}
# In shared memory there are no frames, and no links; and on one machine no machine is lost alone.
ONLY = {"flip": "tcp", "partition": "lab", "machine": "hosts"}


JOBS: dict[str, dict[str, Any]] = {
    "plain": {},
    "batchnorm": {"script": normalised()},
    "checkpoints": {"script": SAVING, "words": ("--checkpoint-every", "5steps")},
    "shares": {"script": UNEQUAL},
    "codec": {"words": ("--codec", "one-bit")},
    "local": {"words": ("--sync", "local(4)"), "period": 4},
}


def on_hosts(server: SshServer, asked: dict[str, Any]) -> dict[str, Any]:
    """The same on two machines; ssh hands no variables on, so the script has them."""
    script = asked.get("script", SCRIPT)
    held = {
        "WAITS": asked.get("respawn") and asked.get("waits", True) and not asked.get("act"),
        "HOLDS": asked.get("act"),
    }
    lines = [f'os.environ["{name}"] = "1"' for name, needed in held.items() if needed]
    script = "\n".join(["import os", *lines, script])
    words = (*asked.get("words", ()), "--on", server.launcher, "--hosts", "a:2,b:2")
    return {**asked, "script": script, "words": words}


@contextlib.contextmanager
def server_for(transport: str) -> Iterator[SshServer | None]:
    """An sshd for workers on other machines; None for workers on this one."""
    if transport != "hosts":
        yield None
        return
    with tempfile.TemporaryDirectory() as folder:
        server = SshServer(Path(folder), SOURCE)
        try:
            yield server
        finally:
            server.close()


def carry_out(
    fault: str, transport: str, runs: int, seed: int, job: str, seconds: float
) -> list[tuple[Outcome, float]]:
    """So many runs, one after another, and their gaps; what is wrong with one goes to stderr."""
    drawn = Draws(f"{seed}/{fault}/{transport}")
    drawn.seconds = seconds
    found = []
    for number in range(runs):
        with tempfile.TemporaryDirectory() as folder:
            before, asked = Snapshot.take(), _together(JOBS[job], FAULTS[fault](drawn))
            for name, text in asked.pop("files", {}).items():
                (Path(folder) / name).write_text(text)
            with server_for(transport) as server:
                if server is not None:
                    asked = on_hosts(server, asked)
                over = transport if transport in ("shm", "tcp") else "auto"
                outcome = run(Path(folder), over, **asked)
            outcome.wrong.extend(f"left behind: {one}" for one in left_behind(before))
            if outcome.code:
                outcome.wrong.append(f"exit code {outcome.code}")
            found.append((outcome, longest_gap_s(Path(folder))))
            if outcome.wrong:
                told = f"{fault}, {transport}, run {number}, {asked['kills']}: {'; '.join(outcome.wrong)}"
                print(f"{told}\n{outcome.output[-2000:]}", file=sys.stderr)
    return found


def _together(job: dict[str, Any], fault: dict[str, Any]) -> dict[str, Any]:
    """The job with the fault; a fault that needs a script of its own has it in place of the job's."""
    words = (*job.get("words", ()), *fault.get("words", ()))
    return {**job, **fault, **({"words": words} if words else {})}


def row(runs: list[tuple[Outcome, float]]) -> dict[str, float]:
    """The figures of runs with one fault."""
    found, gaps = [one for one, _ in runs], [gap_s for _, gap_s in runs]
    pauses = [one.pause_s for one in found]
    return {
        "runs": len(found),
        "wrong": sum(bool(one.wrong) for one in found),
        "median_pause_s": round(statistics.median(pauses), 3),
        "worst_pause_s": round(max(pauses), 3),
        "worst_gap_s": round(max(gaps), 3),
        "lost": sum(one.output.count(" was lost (") for one in found),
        "left_out": sum(one.output.count(" was left out: ") for one in found),
        "returns": sum(one.output.count(" is back after ") for one in found),
        "met_again": sum(one.output.count(" workers met again") for one in found),
    }


def main() -> None:
    """Print the table, or the figures as JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=20, help="how many for each fault and transport")
    parser.add_argument("--faults", default=",".join(FAULTS))
    parser.add_argument("--transports", default="shm,tcp")
    parser.add_argument("--job", default="plain", choices=list(JOBS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=60.0, help="how long churn goes on")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--store", type=Path, help="a file for the figures, as JSON")
    asked = parser.parse_args()
    faults = asked.faults.split(",")
    if unknown := set(faults) - set(FAULTS):
        parser.error(f"there is no fault {', '.join(sorted(unknown))}; there are {', '.join(FAULTS)}")
    rows: dict[str, dict[str, float]] = {}
    if not asked.json:
        print("fault    transport  runs  wrong  pause, median  worst     gap      lost  left out  back")
    for fault in faults:
        if ONLY.get(fault) == "lab" and os.geteuid():
            print(f"{fault:7}  left out: a lab needs root", file=sys.stderr)
            continue
        if "hosts" in (ONLY.get(fault), *asked.transports.split(",")) and MISSING:
            print(f"{fault:7}  left out: {MISSING}", file=sys.stderr)
            continue
        for transport in [ONLY[fault]] if fault in ONLY else asked.transports.split(","):
            one = rows[f"{fault} {transport}"] = row(
                carry_out(fault, transport, asked.runs, asked.seed, asked.job, asked.seconds)
            )
            if not asked.json:
                times = f"{one['median_pause_s']:11.3f} s  {one['worst_pause_s']:6.3f} s"
                counts = f"{one['lost']:4}  {one['left_out']:8}  {one['returns']:4}"
                times += f"  {one['worst_gap_s']:5.1f} s"
                left = f"{fault:7}  {transport:9}  {one['runs']:4}  {one['wrong']:5}"
                print(f"{left}  {times}  {counts}", flush=True)
    if asked.json:
        print(json.dumps(rows))
    if asked.store is not None:
        told = {"seed": asked.seed, "job": asked.job, "rows": rows}
        asked.store.write_text(json.dumps(told, indent=1) + "\n")
    sys.exit(any(one["wrong"] for one in rows.values()))


if __name__ == "__main__":
    main()
