"""How far each worker is: its script runs, it joins, it trains, it has left. The launcher asks.

A worker says it by an empty file in the run's `ready/`, which exists only while a launcher on its machine
asks: elsewhere nothing is written. It does not depend on the record, so it works with `record=False`, and
for scripts that never join.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from enum import IntEnum
from pathlib import Path

from echelon.observe.run_folder import RunFolder


class WorkerPhase(IntEnum):
    """How far a worker is; a later phase has a larger number."""

    RUNNING = 1
    JOINING = 2
    JOINED = 3
    TRAINING = 4
    LEFT = 5


def tell(phase: WorkerPhase, environment: Mapping[str, str] = os.environ) -> None:
    """Say that this worker has come so far, if a launcher asks. Never fails: training goes on."""
    run, rank = environment.get("ECHELON_RUN"), environment.get("RANK")
    if run and rank:
        with suppress(OSError):  # most often there is no such folder: nobody asks
            (RunFolder(Path(run)).ready / f"{rank}.{phase.name.lower()}").touch()


def ask(folder: RunFolder) -> None:
    """Let workers say how far they are; the launcher calls it before it starts them."""
    folder.ready.mkdir(exist_ok=True)


def told(folder: RunFolder) -> dict[int, WorkerPhase]:
    """How far each worker is, by rank; a worker that has said nothing is missing."""
    found: dict[int, WorkerPhase] = {}
    with suppress(OSError):
        for file in folder.ready.iterdir():
            rank, _, phase = file.name.partition(".")
            if phase.upper() not in WorkerPhase.__members__:
                continue  # a stack: see stacks.py
            number = int(rank)
            found[number] = max(WorkerPhase[phase.upper()], found.get(number, WorkerPhase.RUNNING))
    return found


def forget(folder: RunFolder) -> None:
    """Ask no more, and remove what was told."""
    shutil.rmtree(folder.ready, ignore_errors=True)
