"""A node is throttled to a quarter at run time, then freed: how soon is the run as fast as it can be?

    python benchmarks/throttled.py [--rounds 3] [--after 10]

Four lab nodes of equal speed train; nothing is told. At a step one node's CPU quota falls to a quarter, and
later it comes back. After each change, the samples per second of the steps from `--after` on (10) to 30 are
compared with the best possible: the rate of the same cluster with fixed shares by speed, without a change,
measured in turns in the same run. Equal shares beside it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

_CPU, _SLOW = 0.36, 0.09
_FIRST, _SECOND, _STEPS = 60, 110, 170
_SCRIPT = Path(__file__).with_name("unequal.py")


def lab_of(slow: float, faults: bool) -> str:
    """Four nodes, the third of which has this quota."""
    text = ""
    for at in range(4):
        cpu = slow if at == 2 else _CPU
        text += f'[[node]]\nname = "n{at}"\ncpu = {cpu}\nlink = "1gbit"\n'
    if faults:
        text += f'[[fault]]\nat_step = {_FIRST}\naction = "slow"\nnode = "n2"\ncpu = {_SLOW}\n'
        text += f'[[fault]]\nat_step = {_SECOND}\naction = "slow"\nnode = "n2"\ncpu = {_CPU}\n'
    return text


def run(lab: str, shares: str, batch: int) -> list[dict[str, float]]:
    """The step ends of rank 0 and the faults, in order of time."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "throttled.toml"
        file.write_text(lab)
        command = [sys.executable, "-m", "echelon", "run", "--lab", str(file), "--shares", shares]
        command += ["--runs", f"{folder}/runs", str(_SCRIPT), "--work", "auto", "--batch", str(batch)]
        command += ["--steps", str(_STEPS)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
        if done.returncode:
            raise SystemExit(done.stderr[-2000:])
        (events,) = Path(folder, "runs").glob("*/events")
        found = []
        for name in ("launcher", "rank-0"):
            for line in (events / f"{name}.jsonl").read_text().splitlines():
                event = json.loads(line)
                if event["type"] in ("step", "fault", "fault-injected"):
                    found.append(event)
        return sorted(found, key=lambda event: event["t"])


def rate(ends: list[float], batch: int) -> float:
    """Samples per second between the first and the last of these instants."""
    return batch * (len(ends) - 1) / (ends[-1] - ends[0])


def main() -> None:
    """Run the throttled cluster and its two steady states in turns."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--after", type=int, default=10)
    options.add_argument("--batch", type=int, default=96)
    options.add_argument("--quick", action="store_true")
    asked = options.parse_args()
    fractions: dict[str, list[float]] = {"throttled": [], "freed": [], "throttled, equal shares": []}
    for _ in range(1 if asked.quick else asked.rounds):
        best = {}
        for name, slow in (("throttled", _SLOW), ("freed", _CPU)):
            shares = f"{_CPU},{_CPU},{slow},{_CPU}"
            ends = [event["t"] for event in run(lab_of(slow, False), shares, asked.batch)]
            best[name] = rate(ends[_FIRST:], asked.batch)
        for shares in ("auto", "equal"):
            events = run(lab_of(_CPU, True), shares, asked.batch)
            at = [place for place, event in enumerate(events) if event["type"] != "step"]
            for name, place in zip(("throttled", "freed"), at, strict=True):
                ends = [event["t"] for event in events[place + 1 :] if event["type"] == "step"]
                found = rate(ends[asked.after : 30], asked.batch) / best[name]
                print(
                    f"{shares}, {name}: {found:.2f} of the best possible ({best[name]:.0f} samples/s)",
                    flush=True,
                )
                key = name if shares == "auto" else f"{name}, equal shares"
                fractions.setdefault(key, []).append(found)
    for name, found in fractions.items():
        print(
            f"{name}: median {statistics.median(found):.2f} of the best possible from step {asked.after} on"
        )


if __name__ == "__main__":
    main()
