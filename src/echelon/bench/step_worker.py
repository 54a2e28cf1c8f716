"""One worker of `echelon bench step`: trains a model both ways in turns, and notes the times.

    python -m echelon.start.worker -m echelon.bench.step_worker FOLDER

All sides compute the same on the same batch. Those with Echelon are in this process; training alone and DDP
have a process of their own beside it (`bench/step_plain.py`), and take turns with them. `alone` trains
without any communication, on all workers at once: a step of torch if communication were free.
"""

from __future__ import annotations

import math
import os
import socket
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Literal

import torch

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
from echelon.bench.step_plain import PLAIN, PlainRequest, PlainSides, plain_sides
from echelon.bench.step_trainer import StepTrainer
from echelon.bench.workloads import Workload, workload
from echelon.train.session import Session

_TURN_S = 0.25
_LEAST_STEPS = 2
_LEAST_TURNS = 3
_WARM_STEPS = 3

Turn = Callable[[int], list[TimedStep]]


def measure(folder: Path) -> None:
    """Take turns until the time is over."""
    request = read_request(folder)
    job = workload(request.model)
    session = echelon.join()
    asked = PlainRequest(
        model=request.model,
        sides=tuple(side for side in request.sides if side in PLAIN),
        threads=torch.get_num_threads(),
        meeting=_meeting(session),
        rank=session.rank,
        world_size=session.world_size,
    )
    with plain_sides(asked) as plain:
        sides: dict[Side, Turn] = {side: _turn(side, job, session, plain) for side in request.sides}
        steps, turns = _agreed(session, [_seconds(turn) for turn in sides.values()], request.seconds)
        found: dict[Side, list[list[TimedStep]]] = {side: [] for side in sides}
        for number in range(turns):
            for side in [*sides][:: 1 if number % 2 else -1]:
                session.barrier()  # nobody trains another side any more
                found[side].append(sides[side](steps))
            if session.is_leader:
                write_progress(folder, (number + 1) / turns)
    notes = [SideNote(side=side, turns=times) for side, times in found.items()]
    write_note(
        folder,
        WorkerNote(rank=session.rank, batch=job.batch, threads=torch.get_num_threads(), sides=notes),
    )
    session.close()


def _turn(side: Side, job: Workload, session: Session, plain: PlainSides) -> Turn:
    """What trains a side for some steps."""
    if side in PLAIN:
        return partial(plain.turn, side)
    rule: Literal["local", "global"] = "local" if side == "local" else "global"
    prepare = partial(session.prepare, batchnorm=rule)
    return StepTrainer(job, lambda model, optimizer: prepare(model, optimizer), session.barrier).turn


def _meeting(session: Session) -> str:
    """Where the processes with DDP meet: a port that the leader has found free."""
    address = os.environ["MASTER_ADDR"]
    port = 0
    if session.is_leader:
        with socket.socket() as probe:
            probe.bind((address, 0))
            port = int(probe.getsockname()[1])
    return f"tcp://{address}:{int(session.broadcast(torch.tensor([port])))}"


def _seconds(turn: Turn) -> float:
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
