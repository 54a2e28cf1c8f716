"""Are runs right from which workers are killed at random moments? As a table.

    python benchmarks/chaos.py [--runs N] [--seed S] [--respawn] [--json]

Each run has four workers, of which one or two are killed, so long after training has begun as the seed
says: during forward or backward passes, rounds, while the others meet again, at the end of a pass. A run is
right if it ends by itself, all survivors have the same weights, and every sample of every pass was used
once. The pause is the longest time between two steps of a survivor around a kill. With `--respawn` lost
workers are started again, the second kill may come while the first worker returns, and a last column counts
the returns.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.losses import WORKERS, Kill, Outcome, run


def kills_of(drawn: random.Random) -> list[Kill]:
    """One kill, or two: at the same time, just after each other, or some time later."""
    slots = drawn.sample(range(WORKERS), drawn.choice([1, 1, 2]))
    first = Kill(slots[0], drawn.uniform(0.0, 0.5))
    return [first, *(Kill(slot, drawn.choice([0.0, 0.003, drawn.uniform(0, 0.3)])) for slot in slots[1:])]


def carry_out(transport: str, runs: int, seed: int, *, respawn: bool) -> list[Outcome]:
    """So many runs, one after another."""
    drawn = random.Random(f"{seed}/{transport}")
    found = []
    for number in range(runs):
        with tempfile.TemporaryDirectory() as folder:
            kills = kills_of(drawn)
            if respawn:
                later = drawn.choice([0.0, drawn.uniform(0, 4.0)])
                kills = [kills[0], *(Kill(kill.slot, later) for kill in kills[1:])]
            outcome = run(Path(folder), transport, kills, respawn=3 if respawn else 0)
            wrong = outcome.wrong or ([f"exit code {outcome.code}"] if outcome.code else [])
            found.append(outcome)
            if wrong:
                print(f"{transport}, run {number}, {kills}: {'; '.join(wrong)}", file=sys.stderr)
    return found


def main() -> None:
    """Print the table, or the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=50, help="how many for each transport")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--respawn", action="store_true", help="start lost workers again")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    rows = {}
    for transport in ("shm", "tcp"):
        found = carry_out(transport, asked.runs, asked.seed, respawn=asked.respawn)
        pauses = [one.pause_s for one in found]
        rows[transport] = {
            "runs": len(found),
            "wrong": sum(bool(one.wrong or one.code) for one in found),
            "median_pause_s": round(statistics.median(pauses), 3),
            "worst_pause_s": round(max(pauses), 3),
            "returns": sum(one.output.count(" is back after ") for one in found),
        }
    if asked.json:
        print(json.dumps(rows))
        return
    print("transport  runs  wrong  pause, median  worst    returns")
    for transport, row in rows.items():
        times = f"{row['median_pause_s']:11.3f} s  {row['worst_pause_s']:.3f} s  {row['returns']:7}"
        print(f"{transport:9}  {row['runs']:4}  {row['wrong']:5}  {times}")
    sys.exit(any(row["wrong"] for row in rows.values()))


if __name__ == "__main__":
    main()
