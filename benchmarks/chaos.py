"""Are runs right whose workers are killed, stopped or stuck at random moments? As a table.

    python benchmarks/chaos.py [--runs N] [--faults NAME,...] [--transports shm,tcp,hosts] [--job JOB]
                               [--seed S] [--json]

Each run has four workers. When the fault comes follows from the seed: during forward or backward passes,
rounds, while the others meet again, at the end of a pass.

    kill    one or two workers are killed, at once or shortly one after the other, and stay away
    return  the same, and lost workers are started again; the second kill may come while the first returns
    first   the first worker is killed, and is started again
    half    two workers at once, killed or stopped, and are started again
    stop    one worker is stopped for 1 to 20 s, then goes on, unless it was left out before
    loop    one worker is in an endless loop, and is started again
    machine a machine's agent is killed, and with it its two workers, which stay away; only with hosts

Of transports, shm and tcp are of workers on one machine, and hosts of workers on two machines that ssh
reaches, which are this one: an sshd has to be installed.

The job is a small network (plain), also with batch normalisation over all workers (batchnorm), with
checkpoints in the background and by the script (checkpoints), with a slow worker and shares that follow it
(shares), with encoded gradients (codec), or with local steps (local).

A run is right if it ends by itself, all that are left have the same weights, every sample of every pass was
used once, and no process and no shared memory is left behind. The pause is the longest step of a worker
around a kill or a stop.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from tests.leaks import Snapshot, left_behind
from tests.losses import SAVING, SCRIPT, UNEQUAL, WORKERS, Kill, Outcome, endless, normalised, run

from sshd import MISSING, SshServer

SOURCE = Path(__file__).resolve().parent.parent / "src"
LONG_S = 120.0  # a stopped worker is left out long before


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


def _machine(drawn: random.Random) -> dict[str, Any]:
    return {"kills": [Kill(drawn.choice([0, 2]), drawn.uniform(0.0, 0.5), machine=True)], "respawn": 3}


FAULTS: dict[str, Callable[[random.Random], dict[str, Any]]] = {
    "kill": _kill,
    "return": _return,
    "first": _first,
    "half": _half,
    "stop": _stop,
    "loop": _loop,
    "machine": _machine,
}

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
    if asked.get("respawn") and not any(kill.machine for kill in asked["kills"]):
        script = f'import os\nos.environ["WAITS"] = "1"\n{script}'
    words = (*asked.get("words", ()), "--on", server.launcher, "--hosts", "a:2,b:2")
    return {**asked, "script": script, "words": words}


def carry_out(
    fault: str, transport: str, runs: int, seed: int, job: str, server: SshServer | None
) -> list[Outcome]:
    """So many runs, one after another; what is wrong with one goes to stderr."""
    drawn = random.Random(f"{seed}/{fault}/{transport}")
    found = []
    for number in range(runs):
        with tempfile.TemporaryDirectory() as folder:
            before, asked = Snapshot.take(), {**JOBS[job], **FAULTS[fault](drawn)}
            if server is not None:
                asked = on_hosts(server, asked)
            outcome = run(Path(folder), transport if server is None else "auto", **asked)
            outcome.wrong.extend(f"left behind: {one}" for one in left_behind(before))
            if outcome.code:
                outcome.wrong.append(f"exit code {outcome.code}")
            found.append(outcome)
            if outcome.wrong:
                told = f"{fault}, {transport}, run {number}, {asked['kills']}: {'; '.join(outcome.wrong)}"
                print(told, file=sys.stderr)
    return found


def row(found: list[Outcome]) -> dict[str, float]:
    """The figures of runs with one fault."""
    pauses = [one.pause_s for one in found]
    return {
        "runs": len(found),
        "wrong": sum(bool(one.wrong) for one in found),
        "median_pause_s": round(statistics.median(pauses), 3),
        "worst_pause_s": round(max(pauses), 3),
        "lost": sum(one.output.count(" was lost (") for one in found),
        "left_out": sum(one.output.count(" was left out: ") for one in found),
        "returns": sum(one.output.count(" is back after ") for one in found),
    }


@contextmanager
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
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    faults = asked.faults.split(",")
    if unknown := set(faults) - set(FAULTS):
        parser.error(f"there is no fault {', '.join(sorted(unknown))}; there are {', '.join(FAULTS)}")
    rows: dict[str, dict[str, float]] = {}
    if "hosts" in asked.transports and MISSING:
        parser.error(MISSING)
    if not asked.json:
        print("fault   transport  runs  wrong  pause, median  worst     lost  left out  back")
    for fault in faults:
        for transport in asked.transports.split(","):
            if fault == "machine" and transport != "hosts":
                continue
            with server_for(transport) as server:
                found = carry_out(fault, transport, asked.runs, asked.seed, asked.job, server)
            one = rows[f"{fault} {transport}"] = row(found)
            if not asked.json:
                times = f"{one['median_pause_s']:11.3f} s  {one['worst_pause_s']:6.3f} s"
                counts = f"{one['lost']:4}  {one['left_out']:8}  {one['returns']:4}"
                left = f"{fault:6}  {transport:9}  {one['runs']:4}  {one['wrong']:5}"
                print(f"{left}  {times}  {counts}", flush=True)
    if asked.json:
        print(json.dumps(rows))
    sys.exit(any(one["wrong"] for one in rows.values()))


if __name__ == "__main__":
    main()
