"""How long does training stand still for a checkpoint, and when is it on disk? Beside torch's async_save.

    python benchmarks/checkpoint.py [--quick] [--json] [--width 2048] [--workers 2]

Both save the same model with the state of AdamW from the same training loop, taking turns in one run:
`session.save(wait=False)`, and `torch.distributed.checkpoint.async_save` with its default writer. Both
divide the state among the workers, and force files to disk.

pause   how long the training thread stands still: the call, and for session.save the wait of the next
        optimizer step for the end of the copy; the slower worker's, as part of a usual step
step    the first step after the call, against a usual step: also what the copy in the background takes away
steps   the same for all steps until the checkpoint is on disk
total   from the call until the checkpoint is complete on disk
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

_STEPS = 8  # after a save, and before it


def work(folder: Path, width: int, turns: int) -> None:
    """One worker's part; rank 0 prints what all measured."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed import checkpoint as dcp

    import echelon

    session = echelon.join(record=False, shares="equal")
    torch.set_num_threads(1)
    port = int(os.environ["MASTER_PORT"]) + 1
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=session.rank, world_size=session.world_size
    )
    model = nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(width, width), nn.ReLU())])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    model, optimizer = session.prepare(model, optimizer)
    x = torch.randn(64, width)

    def step() -> float:
        begun = time.perf_counter()
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        return time.perf_counter() - begun

    def ours(root: Path) -> dict[str, Any]:
        begun = time.perf_counter()
        session.save(root, wait=False)
        call_s = time.perf_counter() - begun
        job = session._writer._now
        took = [step() for _ in range(_STEPS)]
        job.done.wait()
        assert job.error is None, job.error
        pause_s = max(call_s, job.pause_s)
        return {"pause_s": pause_s, "first_s": call_s + took[0], "steps": took, "total_s": job.seconds}

    def torchs(root: Path) -> dict[str, Any]:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        begun = time.perf_counter()
        ended: list[float] = []
        future = dcp.async_save(state, checkpoint_id=str(root))
        call_s = time.perf_counter() - begun
        future.add_done_callback(lambda _: ended.append(time.perf_counter()))
        took = [step() for _ in range(_STEPS)]
        future.result()
        while not ended:
            time.sleep(0.001)
        return {
            "pause_s": call_s,
            "first_s": call_s + took[0],
            "steps": took,
            "total_s": ended[0] - begun,
        }

    rows: dict[str, list[dict[str, Any]]] = {"ours": [], "torch": []}
    for _ in range(3):
        step()
    for turn in range(turns + 1):
        for kind, save in (("ours", ours), ("torch", torchs)):
            usual_s = statistics.median(step() for _ in range(_STEPS))
            root = folder / kind / ("same" if kind == "ours" else str(turn))
            dist.barrier()
            found = save(root)
            dist.barrier()
            if kind == "torch" and session.rank == 0:
                shutil.rmtree(root)
            last_s = found["total_s"]
            inside = [took for at, took in enumerate(found["steps"]) if at * usual_s < last_s]
            slower = sum(inside) / len(inside) / usual_s
            mine = torch.tensor(
                [found["pause_s"], found["first_s"] / usual_s, slower, last_s, usual_s], dtype=torch.float64
            )
            dist.all_reduce(mine, dist.ReduceOp.MAX)
            if turn:  # the first turn touches new memory
                rows[kind].append(
                    dict(
                        zip(("pause_s", "first", "steps", "total_s", "usual_s"), mine.tolist(), strict=True)
                    )
                )
    if session.rank == 0:
        state_bytes = 12 * sum(p.numel() for p in model.parameters())
        print(json.dumps({"rows": rows, "state_bytes": state_bytes}), flush=True)
    dist.destroy_process_group()
    session.close()


def run(width: int, workers: int, turns: int) -> dict[str, Any]:
    """Start the workers; returns what they measured."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory(dir=Path.cwd(), prefix=".checkpoint-bench-") as folder:
        place = {"WORLD_SIZE": str(workers), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        command = [sys.executable, __file__, "--work", folder, "--width", str(width), "--turns", str(turns)]
        started = [
            subprocess.Popen(
                command,
                env={**os.environ, **place, "RANK": str(rank), "OMP_NUM_THREADS": "1"},
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(workers)
        ]
        try:
            told = [process.communicate(timeout=110)[0] for process in started]
        finally:
            for process in started:
                process.kill()
                process.wait()
    found: dict[str, Any] = json.loads(told[0].splitlines()[-1])
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="fewer turns")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--turns", type=int, default=0)
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    turns = asked.turns or (3 if asked.quick else 7)
    if asked.work is not None:
        work(asked.work, asked.width, turns)
        return
    found = run(asked.width, asked.workers, turns)
    of = {
        kind: {name: statistics.median(row[name] for row in rows) for name in rows[0]}
        for kind, rows in found["rows"].items()
    }
    if asked.json:
        print(json.dumps({"medians": of, **found}))
        return
    print(
        f"{asked.workers} workers, a state of {found['state_bytes'] / 1e6:.0f} MB, medians of {turns} turns"
    )
    for kind, name in (("ours", "session.save(wait=False)"), ("torch", "torch async_save")):
        one = of[kind]
        part = 100 * one["pause_s"] / one["usual_s"]
        print(
            f"{name:25} pause {1e3 * one['pause_s']:7.1f} ms ({part:.1f} % of a step of "
            f"{1e3 * one['usual_s']:.0f} ms), first step {one['first']:.2f} x, steps {one['steps']:.2f} x, "
            f"total {one['total_s']:.2f} s"
        )
    ours, torchs = of["ours"], of["torch"]
    pause, total = (torchs[name] / ours[name] for name in ("pause_s", "total_s"))
    print(f"torch / ours: pause {pause:.1f} x, total {total:.2f} x")


if __name__ == "__main__":
    main()
