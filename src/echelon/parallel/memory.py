"""How much memory does a layout need on each worker, and does it fit? Pure.

What is known before the first step: parameters, gradients, and states of optimizers. Activations are known
when layers are measured; the cuts of a pipeline take them into account (`cut.py`).

    data        all three
    sharded     a worker's part f of what its level divides; level 3 also the largest layer that computes
    pipeline    a stage has a part of all three; the cut decides which, so a replica's workers are judged
                together. Gradients of its micro-batches add up whole, also with shards
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from echelon.config.units import show_memory
from echelon.errors import EchelonError
from echelon.parallel.layout import Layout, lines, mesh_of, parse_layout
from echelon.parallel.strategies.pipeline import Pipeline
from echelon.parallel.strategies.sharded import Sharded


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelBytes:
    """What one process needs for a model: with buffers; what is trained of it; optimizer states."""

    parameters: float
    trained: float
    states: float
    largest: float  # the largest parameter

    @property
    def total(self) -> float:
        """Parameters, gradients and states."""
        return self.parameters + self.trained + self.states


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryNeed:
    """What one worker needs, in bytes."""

    parameters: float
    gradients: float
    states: float
    activations: float = 0.0

    @property
    def total(self) -> float:
        """All of it."""
        return self.parameters + self.gradients + self.states + self.activations

    def __str__(self) -> str:
        parts = {
            "parameters": self.parameters,
            "gradients": self.gradients,
            "optimizer states": self.states,
            "activations": self.activations,
        }
        said = ", ".join(f"{name} {show_memory(size)}" for name, size in parts.items() if size)
        return f"{show_memory(self.total)} ({said})"


@dataclass(frozen=True, slots=True, kw_only=True)
class MissingMemory:
    """The workers that have too little memory for a layout: those of a replica, or one."""

    ranks: tuple[int, ...]
    need: float
    room: float

    @property
    def size(self) -> float:
        """How much is missing."""
        return self.need - self.room


def memory_needs(layout: Layout, workers: int, model: ModelBytes) -> list[MemoryNeed]:
    """What each worker needs; stages of a pipeline as if they were equal."""
    parts, sharded = _parts(layout, workers), layout.find(Sharded)
    pipeline = layout.find(Pipeline)
    stages = mesh_of(layout, workers).stages if pipeline is not None else 1
    level = sharded.level if sharded is not None else 0
    found = []
    for part in parts:
        fixed = model.parameters - model.trained
        states = 0.0 if sharded is not None and sharded.offload else model.states
        found.append(
            MemoryNeed(
                parameters=(fixed + model.trained * (part if level == 3 else 1.0)) / stages
                + (model.largest if level == 3 else 0.0),
                gradients=model.trained * (part if level >= 2 and pipeline is None else 1.0) / stages,
                states=states * (part if level >= 1 else 1.0) / stages,
            )
        )
    return found


def _parts(layout: Layout, workers: int) -> list[float]:
    """Each worker's part of what is divided among shards."""
    sharded = layout.find(Sharded)
    found = [1.0] * workers
    for ranks in lines(layout, workers, Sharded) if sharded is not None else []:
        weights = (sharded.weights if sharded is not None else ()) or (1.0,) * len(ranks)
        for rank, weight in zip(ranks, weights, strict=True):
            found[rank] = weight / sum(weights)
    return found


def missing_memory(layout: Layout, model: ModelBytes, rooms: Sequence[float]) -> MissingMemory | None:
    """Where most memory is missing; None if the layout fits. `rooms` is what each worker may use."""
    workers = len(rooms)
    needs = memory_needs(layout, workers, model)
    together: Iterable[tuple[int, ...]] = (
        mesh_of(layout, workers).ranks
        if layout.find(Pipeline) is not None
        else [(rank,) for rank in range(workers)]
    )
    found = [
        MissingMemory(
            ranks=ranks,
            need=sum(needs[rank].total for rank in ranks),
            room=sum(rooms[rank] for rank in ranks),
        )
        for ranks in together
    ]
    worst = max(found, key=lambda one: one.size)
    return worst if worst.size > 0 else None


def nearest_layout(
    texts: Sequence[str], model: ModelBytes, rooms: Sequence[float]
) -> tuple[str, MissingMemory | None]:
    """The first of these layouts that fits; otherwise the one to which least is missing."""
    best: tuple[str, MissingMemory | None] = "", None
    for text in texts:
        try:
            missing = missing_memory(parse_layout(text), model, rooms)
        except EchelonError:
            continue  # not for so many workers
        if missing is None:
            return text, None
        if not best[0] or (best[1] is not None and missing.size < best[1].size):
            best = text, missing
    return best


def workers_that_fit(model: ModelBytes, rooms: Sequence[float]) -> int:
    """How many workers like the smallest of these divide all states among them; 0: no number is enough."""
    room = min(rooms) - model.largest - (model.parameters - model.trained)
    divided = 2 * model.trained + model.states
    return math.ceil(divided / room) if room > 0 else 0
