"""One process of a trial on this machine: trains a model in one way, a turn whenever it is asked to.

    python -m echelon.start.worker -m echelon.train.local_worker SOCKET NUMBER

Between turns it waits without computing, so that other ways can be timed. Data is random: only time counts.
"""

from __future__ import annotations

import importlib
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Client, Connection

import torch
from torch import Tensor, nn

from echelon.comm.meet.place import PORT_VARIABLE
from echelon.errors import EchelonError, ModelError
from echelon.train.join import join
from echelon.train.local_messages import (
    BeginTrial,
    EndTrial,
    LocalJob,
    TakeTurn,
    TrialFailed,
    TurnTaken,
    next_asked,
    send,
)
from echelon.train.session import Session

LossFn = Callable[[Tensor, Tensor], Tensor]
_JOIN_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialModel:
    """What a job's maker makes: `samples(n)` gives n inputs and targets."""

    model: nn.Module
    loss_fn: LossFn
    optimizer: torch.optim.Optimizer
    samples: Callable[[int], tuple[Tensor, Tensor]]


def _made(job: LocalJob) -> TrialModel:
    """The job's model. A letter cannot make this process import code of others."""
    module, _, name = job.maker.partition(":")
    if not module.startswith("echelon."):
        raise ModelError(f"{job.maker} is not a maker of models", where="trial on this machine")
    found: TrialModel = getattr(importlib.import_module(module), name)(job)
    return found


class _WayTrainer:
    """Trains in one way. A call of `step` is one step of a batch of all processes together."""

    def __init__(self, begin: BeginTrial) -> None:
        way = begin.way
        self._way, self._rank = way, begin.rank
        if begin.cores:
            os.sched_setaffinity(0, begin.cores)
        made = _made(begin.job)
        self._made, self._model, self._optimizer = made, made.model, made.optimizer
        self._model.train()
        self._session: Session | None = None
        torch.set_num_threads(way.threads_a_process)
        if way.processes > 1 or way.samples or way.replicas > 1:
            self._session = self._join(begin)
            self._model, self._optimizer = self._session.prepare(self._model, self._optimizer)
        torch.set_num_threads(way.threads_a_process)
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}

    def _join(self, begin: BeginTrial) -> Session:
        if begin.way.processes > 1:
            os.environ |= {
                "RANK": str(begin.rank),
                "WORLD_SIZE": str(begin.way.processes),
                "LOCAL_RANK": str(begin.rank),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(begin.port),
                PORT_VARIABLE: str(begin.port),
            }
        os.environ |= {
            name: str(begin.way.threads_a_process) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
        }
        return join(record=False, timeout_s=_JOIN_S, shares="equal", parallel=begin.way.layout)

    def step(self, batch: int) -> None:
        """One step of training."""
        begin, end = (batch * at // self._way.processes for at in (self._rank, self._rank + 1))
        if end - begin not in self._kept:
            self._kept = {end - begin: self._made.samples(end - begin)}
        x, y = self._kept[end - begin]
        self._optimizer.zero_grad()
        self._made.loss_fn(self._model(x), y).backward()
        self._optimizer.step()

    def turn(self, asked: TakeTurn) -> float:
        """Some steps; returns their seconds together."""
        if self._session is not None and self._way.processes > 1:
            self._session.barrier()
        begun = time.perf_counter()
        for _ in range(asked.steps):
            self.step(asked.batch)
        for p in self._model.parameters():
            p.detach()  # updates that were deferred belong to these steps
        return time.perf_counter() - begun


def serve(launcher: Connection) -> None:
    """Do what the launcher asks for, until it ends the trial."""
    trainer: _WayTrainer | None = None
    while True:
        try:
            asked = next_asked(launcher)
        except EOFError:
            return
        if isinstance(asked, EndTrial):
            return
        try:
            if isinstance(asked, BeginTrial):
                trainer = _WayTrainer(asked)
                took_s = 0.0
            else:
                assert trainer is not None
                took_s = trainer.turn(asked)
        except EchelonError as error:
            send(launcher, TrialFailed(why=error.message))
        except (RuntimeError, MemoryError, ValueError) as error:
            send(launcher, TrialFailed(why=f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"))
        else:
            send(launcher, TurnTaken(seconds=took_s))


def main() -> None:
    """Connect to the launcher, say who this is, and serve."""
    with Client(sys.argv[1], family="AF_UNIX") as launcher:
        launcher.send_bytes(sys.argv[2].encode())
        serve(launcher)
    # Sessions of a trial end with it: nobody waits for a way that was left out.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
