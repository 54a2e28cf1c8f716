"""The sides of `echelon bench step` that know nothing of Echelon: training alone, and with DDP.

    python -m echelon.bench.step_plain REQUEST

Each worker starts one such process, so that what `echelon.join` sets up in a process, such as what becomes
of freed memory, does not count for DDP. It trains when the worker says so, one line in and one line out,
and ends when the worker does.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator, Sequence

import msgspec
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from echelon.bench.step_notes import Side, TimedStep
from echelon.bench.step_trainer import StepTrainer
from echelon.bench.workloads import workload
from echelon.errors import LaunchError


class PlainRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Which sides to train, on what, and where the processes of all workers meet."""

    model: str
    sides: tuple[Side, ...]
    threads: int
    meeting: str  # of Gloo
    rank: int
    world_size: int


class PlainTurn(msgspec.Struct, frozen=True, kw_only=True):
    """Train one side for so many steps."""

    side: Side
    steps: int


class PlainSides:
    """The process with the plain sides, as its worker sees it."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    def turn(self, side: Side, steps: int) -> list[TimedStep]:
        """Let it train; all workers do so at the same time."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(msgspec.json.encode(PlainTurn(side=side, steps=steps)) + b"\n")
            self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise LaunchError(
                f"the process that trains the side {side} ended with exit code {self._process.wait()}",
                where="echelon bench step",
                fix="see its error above",
            )
        return msgspec.json.decode(answer, type=list[TimedStep])


@contextlib.contextmanager
def plain_sides(request: PlainRequest) -> Iterator[PlainSides]:
    """Start the process; it ends with the block."""
    command = [sys.executable, "-m", "echelon.bench.step_plain", msgspec.json.encode(request).decode()]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            yield PlainSides(process)
        except BaseException:
            process.kill()
            raise
        assert process.stdin is not None
        process.stdin.close()


def _serve(request: PlainRequest) -> None:
    """Train when the worker says so, until it closes the pipe."""
    torch.set_num_threads(request.threads)
    dist.init_process_group(
        "gloo", init_method=request.meeting, rank=request.rank, world_size=request.world_size
    )
    job = workload(request.model)
    trainers = {side: StepTrainer(job, _WAYS[side], dist.barrier) for side in request.sides}
    for line in sys.stdin.buffer:
        asked = msgspec.json.decode(line, type=PlainTurn)
        found: Sequence[TimedStep] = trainers[asked.side].turn(asked.steps)
        sys.stdout.buffer.write(msgspec.json.encode(found) + b"\n")
        sys.stdout.buffer.flush()
    dist.barrier()  # the first worker has the store, without which the others would not end
    dist.destroy_process_group()


def _alone(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[nn.Module, torch.optim.Optimizer]:
    return model, optimizer


def _ddp(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[nn.Module, torch.optim.Optimizer]:
    return DistributedDataParallel(model), optimizer


_WAYS = {"alone": _alone, "ddp": _ddp}
PLAIN: tuple[Side, ...] = ("alone", "ddp")


if __name__ == "__main__":
    _serve(msgspec.json.decode(sys.argv[1], type=PlainRequest))
