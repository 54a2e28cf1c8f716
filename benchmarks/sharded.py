"""Divided states: memory and processor time of a step, beside torch's DDP and FSDP2.

    python benchmarks/sharded.py

Two workers of this machine, one thread each, started anew for each row. The model is an MLP of 25
layers of 1024 (105 MB), AdamW, 8 samples each. Memory is the resident memory above that before workers
join and make the model, with all libraries loaded, after the backward pass and after the step; the most
of the last three steps. Processor time is the median of the steps. torch's rows run on Gloo. All rows
return large freed memory to the system (MALLOC_MMAP_THRESHOLD_). The row with files keeps optimizer
states in --folder.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import resource
import socket
import statistics
import subprocess
import sys
from pathlib import Path

import torch
from torch import nn

WIDTH, LAYERS, BATCH, STEPS = 1024, 25, 8, 8
ROWS = ("data", "sharded(level=1)", "sharded(level=2)", "sharded(level=3)", "DDP", "FSDP2")


def resident_mb() -> float:
    """Memory of this process in MB."""
    pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def spent_s() -> float:
    """Processor time of this process, all threads."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def layers() -> nn.Sequential:
    """The model, the same on every worker."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(LAYERS)))


def load_libraries(row: str) -> None:
    """Import what the row uses; torch._dynamo is loaded by the first optimizer of any row."""
    names = ["torch._dynamo", "torch.distributed.fsdp" if row in ("DDP", "FSDP2") else "echelon.train.join"]
    for name in names:
        importlib.import_module(name)


def prepared(row: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model and its optimizer as one of the rows has them."""
    if row in ("DDP", "FSDP2"):
        import torch.distributed as dist
        from torch.distributed.fsdp import fully_shard

        dist.init_process_group("gloo")
        model: nn.Module = layers()
        if row == "DDP":
            model = nn.parallel.DistributedDataParallel(model)
        else:
            for layer in model.children():
                fully_shard(layer)
            fully_shard(model)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-3)
    import echelon

    session = echelon.join(record=False, shares="equal", factors="never")
    model = layers()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    options = {"parallel": row} if row != "data" else {}
    session.prepare(model, optimizer, **options)  # type: ignore[arg-type]
    return model, optimizer


def work(row: str) -> None:
    """One worker: print the figures of a row."""
    torch.set_num_threads(1)
    load_libraries(row)
    before = resident_mb()
    model, optimizer = prepared(row)
    x = torch.randn(BATCH, WIDTH)
    after_backward, after_step, seconds = [], [], []
    for _ in range(STEPS):
        begun = spent_s()
        optimizer.zero_grad()
        model(x).square().mean().backward()
        after_backward.append(resident_mb() - before)
        optimizer.step()
        after_step.append(resident_mb() - before)
        seconds.append(spent_s() - begun)
    told = max(after_backward[-3:]), max(after_step[-3:]), statistics.median(seconds[2:])
    print("figures", json.dumps(told), flush=True)


def measured(row: str) -> tuple[float, float, float]:
    """The largest figures of both workers."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    shared |= {"MALLOC_MMAP_THRESHOLD_": "262144", "OMP_NUM_THREADS": "1"}
    workers = [
        subprocess.Popen(
            [sys.executable, __file__, "--row", row],
            env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    found = []
    for worker in workers:
        text, _ = worker.communicate(timeout=300)
        line = next(line for line in text.splitlines() if line.startswith("figures"))
        found.append(json.loads(line.removeprefix("figures")))
    return tuple(max(column) for column in zip(*found, strict=True))  # type: ignore[return-value]


def main() -> None:
    """Print a row for each way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--row", default="", help="be one worker of this row")
    parser.add_argument("--rows", nargs="*", default=ROWS, help="only these rows")
    parser.add_argument("--folder", default="", help="a folder on disk, for a row with files")
    asked = parser.parse_args()
    row = asked.row
    if row:
        work(row)
        return
    print("| way | MB after backward | MB after step | processor time of a step | of FSDP2's |")
    print("|---|---|---|---|---|")
    rows = list(asked.rows)
    if asked.folder:
        rows.insert(-2, f'sharded(level=3, offload="{asked.folder}")')
    found = {row: measured(row) for row in rows}
    for row, (backward, step, seconds) in found.items():
        ratio = seconds / found["FSDP2"][2] if "FSDP2" in found else float("nan")
        print(f"| {row} | {backward:.0f} | {step:.0f} | {1e3 * seconds:.0f} ms | {ratio:.2f} |")


if __name__ == "__main__":
    main()
