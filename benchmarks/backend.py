"""torch's own DDP, FSDP2 and 1F1B pipeline on Echelon's backend, against the same on Gloo.

    python benchmarks/backend.py                 # all three
    python benchmarks/backend.py --only pipeline

Two workers of this machine, one thread each. Both backends are in the same processes and take turns, a few
steps each, so that both see the same machine; the ratio is that of the medians. The model is an MLP of
eight layers of 1024 (8.4 million parameters), batch 32 each; the pipeline cuts it in two and moves 8
micro-batches.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

WORKERS = 2
WIDTH, LAYERS, BATCH, MICRO = 1024, 8, 32, 8
Step = Callable[[], None]


def layers(count: int = LAYERS) -> nn.Sequential:
    """The model, the same on every worker."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(count)))


def ddp(group: dist.ProcessGroup) -> Step:
    """A step of data-parallel training."""
    model = nn.parallel.DistributedDataParallel(layers(), process_group=group)
    return training(model)


def fsdp(group: dist.ProcessGroup) -> Step:
    """A step with sharded parameters, layer by layer."""
    model = layers()
    mesh = DeviceMesh.from_group(group, "cpu")
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return training(model)


def training(model: nn.Module) -> Step:
    """Forward, backward, update."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    batch = torch.randn(BATCH, WIDTH)

    def step() -> None:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()

    return step


def pipeline(group: dist.ProcessGroup) -> Step:
    """A step of a pipeline of two stages, one forward and one backward in turn."""
    rank = dist.get_rank()
    half = LAYERS // WORKERS
    part = layers()[rank * half : (rank + 1) * half]
    stage = PipelineStage(part, rank, WORKERS, torch.device("cpu"), group=group)
    schedule = Schedule1F1B(stage, MICRO, loss_fn=lambda out, target: (out - target).square().mean())
    optimizer = torch.optim.SGD(part.parameters(), lr=1e-3)
    batch = torch.randn(MICRO * BATCH, WIDTH)

    def step() -> None:
        optimizer.zero_grad()
        if rank == 0:
            schedule.step(batch)
        else:
            schedule.step(target=batch, losses=[])
        optimizer.step()

    return step


CASES = {"ddp": ddp, "fsdp": fsdp, "pipeline": pipeline}


def worker(rank: int, port: int, chosen: list[str], turns: int, steps: int) -> None:
    """Time both backends in turns; rank 0 prints."""
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(WORKERS)
    )
    import echelon.backend  # noqa: F401 - registers the name

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    groups = {name: dist.new_group(backend=name) for name in ("gloo", "echelon")}
    for case in chosen:
        stepping = {name: CASES[case](group) for name, group in groups.items()}
        seconds: dict[str, list[float]] = {name: [] for name in groups}
        for step in stepping.values():
            step()
        for _ in range(turns):
            for name, step in stepping.items():
                dist.barrier()
                begun = time.perf_counter()
                for _ in range(steps):
                    step()
                dist.barrier()
                seconds[name].append((time.perf_counter() - begun) / steps)
        medians = {name: statistics.median(times) for name, times in seconds.items()}
        theirs, ours = medians["gloo"], medians["echelon"]
        if rank == 0:
            times = f"gloo {theirs * 1e3:6.1f} ms, echelon {ours * 1e3:6.1f} ms"
            print(f"{case:8}  {times}, ratio {ours / theirs:.2f}", flush=True)
    dist.destroy_process_group()


def main() -> None:
    """Start two workers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=tuple(CASES))
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--steps", type=int, default=5)
    options = parser.parse_args()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    chosen = [options.only] if options.only else list(CASES)
    torch.multiprocessing.spawn(worker, (port, chosen, options.turns, options.steps), nprocs=WORKERS)


if __name__ == "__main__":
    main()
