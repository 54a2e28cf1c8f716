"""One worker of `echelon bench step`: trains a model both ways in turns, and notes the times.

    python -m echelon.start.worker -m echelon.bench.step_worker FOLDER

All sides compute the same, in the same processes, on the same batch. `alone` trains without any
communication, on all workers at once: what a step would take if communication were free.
"""

from __future__ import annotations

import math
import os
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import echelon
from echelon.bench.step_notes import (
    Side,
    SideNote,
    TimedStep,
    WorkerNote,
    read_request,
    write_note,
    write_progress,
)
from echelon.bench.workloads import Workload, loss_of, workload
from echelon.train.session import Session

_TURN_S = 0.25
_LEAST_STEPS = 2
_LEAST_TURNS = 3
_WARM_STEPS = 3


class _Trainer:
    """A model with a batch and an optimizer; each call is one step."""

    def __init__(self, side: Side, job: Workload, session: Session) -> None:
        self.side = side
        model, self._x, self._y = job.make()
        self._parameters = list(model.parameters())
        self._computed = 0.0
        _last_computed(model, self._x, self._y).register_post_accumulate_grad_hook(self._note)
        optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        if side == "ddp":
            model = DistributedDataParallel(model)
        elif side == "echelon":
            model, optimizer = session.prepare(model, optimizer)
        elif side == "local":
            model, optimizer = session.prepare(model, optimizer, batchnorm="local")
        self._model = model
        self._optimizer = optimizer

    def _note(self, _: Tensor) -> None:
        self._computed = time.perf_counter()

    def step(self) -> TimedStep:
        """One step of training."""
        begun = time.perf_counter()
        self._optimizer.zero_grad()
        loss_of(self._model, self._x, self._y).backward()
        reduced = time.perf_counter()
        self._optimizer.step()
        return TimedStep(begun=begun, computed=self._computed, reduced=reduced, ended=time.perf_counter())

    def turn(self, steps: int) -> list[TimedStep]:
        """Some steps, which all workers begin together."""
        dist.barrier()
        found = [self.step() for _ in range(steps)]
        for p in self._parameters:
            p.detach()  # updates that were deferred belong to these steps
        return found


def _last_computed(model: nn.Module, x: Tensor, y: Tensor) -> nn.Parameter:
    """The parameter whose gradient backward computes last."""
    order: list[Tensor] = []
    handles = [p.register_post_accumulate_grad_hook(order.append) for p in model.parameters()]
    loss_of(model, x, y).backward()
    for handle in handles:
        handle.remove()
    model.zero_grad()
    return next(p for p in model.parameters() if p is order[-1])


def measure(folder: Path) -> None:
    """Take turns until the time is over."""
    request = read_request(folder)
    job = workload(request.model)
    session = echelon.join()
    _join_gloo(session)
    trainers = [_Trainer(side, job, session) for side in request.sides]
    steps, turns = _agreed(session, [_seconds(trainer.turn) for trainer in trainers], request.seconds)
    found: dict[Side, list[list[TimedStep]]] = {trainer.side: [] for trainer in trainers}
    for turn in range(turns):
        for trainer in trainers[:: 1 if turn % 2 else -1]:
            found[trainer.side].append(trainer.turn(steps))
        if session.is_leader:
            write_progress(folder, (turn + 1) / turns)
    sides = [SideNote(side=side, turns=times) for side, times in found.items()]
    write_note(
        folder,
        WorkerNote(rank=session.rank, batch=job.batch, threads=torch.get_num_threads(), sides=sides),
    )
    dist.barrier()
    dist.destroy_process_group()
    session.close()


def _join_gloo(session: Session) -> None:
    """Open the process group of DDP, at a port that the leader has found free."""
    address = os.environ["MASTER_ADDR"]
    port = 0
    if session.is_leader:
        with socket.socket() as probe:
            probe.bind((address, 0))
            port = int(probe.getsockname()[1])
    port = int(session.broadcast(torch.tensor([port])))
    dist.init_process_group(
        "gloo", init_method=f"tcp://{address}:{port}", rank=session.rank, world_size=session.world_size
    )


def _seconds(turn: Callable[[int], list[TimedStep]]) -> float:
    """How long a step takes, roughly: the first steps also make buffers."""
    turn(_WARM_STEPS)
    times = turn(_LEAST_STEPS)
    return (times[-1].ended - times[0].begun) / _LEAST_STEPS


def _agreed(session: Session, step_s: list[float], seconds: float) -> tuple[int, int]:
    """How many steps a turn has, and how many turns there are; as the leader says."""
    steps = max(_LEAST_STEPS, math.ceil(_TURN_S / max(step_s)))
    turns = max(_LEAST_TURNS, round(seconds / (steps * sum(step_s))))
    decided = session.broadcast(torch.tensor([steps, turns]))
    return int(decided[0]), int(decided[1])


if __name__ == "__main__":
    measure(Path(sys.argv[1]))
