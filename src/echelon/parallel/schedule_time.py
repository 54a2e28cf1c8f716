"""How long does a schedule take on unequal workers and links? By letting the action lists run. Pure.

Each worker computes its list in order (`schedule.py`). An action begins when the worker is free and what it
needs has arrived; while it would wait, the worker computes weights that come later in its list, as stages
do. A link carries one message after another, in each direction by itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from echelon.parallel.schedule import StageAction, schedule
from echelon.parallel.strategies.pipeline import Pipeline

_FORWARD, _INPUT, _WEIGHTS = 1 / 3, 1 / 3, 1 / 3  # of a stage's time for a micro-batch


@dataclass(slots=True)
class _Worker:
    """One worker's list, and where it is in it."""

    actions: list[StageAction]
    splits: bool
    next: int = 0
    free_s: float = 0.0
    owed: int = 0  # backward passes whose weights are to be computed
    weighed: int = 0


class _Links:
    """When messages between neighbouring parts arrive."""

    def __init__(self, wires_s: Sequence[float]) -> None:
        self._wires_s = wires_s
        self._free_s: dict[tuple[str, int], float] = {}
        self._come_s: dict[tuple[str, int, int], float] = {}

    def send(self, kind: str, link: int, micro: int, now_s: float) -> None:
        """A message leaves when the link is free."""
        begin_s = max(now_s, self._free_s.get((kind, link), 0.0))
        self._free_s[kind, link] = self._come_s[kind, link, micro] = begin_s + self._wires_s[link]

    def come_s(self, kind: str, link: int, micro: int) -> float:
        """When a message arrives; infinite if it has not left."""
        return self._come_s.get((kind, link, micro), math.inf)


def schedule_s(options: Pipeline, micro: int, parts_s: Sequence[float], wires_s: Sequence[float]) -> float:
    """How long a batch of so many micro-batches takes.

    parts_s  forward and backward pass of a micro-batch, of each run of layers; with several chunks they go
             over the workers in turn
    wires_s  what each hands over, on its way to the next
    """
    chunks = options.parts
    stages, splits = len(parts_s) // chunks, options.schedule == "filled"
    workers = [
        _Worker(schedule(options.schedule, at, stages, micro, options.ahead, chunks), splits)
        for at in range(stages)
    ]
    links, now_s = _Links(wires_s), 0.0
    while any(one.next < len(one.actions) for one in workers):
        for at, one in enumerate(workers):
            while one.free_s <= now_s and _begin(one, at, now_s, stages, parts_s, links):
                pass
        later = [one.free_s for one in workers if one.free_s > now_s]
        for at, one in enumerate(workers):
            ready_s = _ready_s(one, at, stages, len(parts_s), links)
            if now_s < ready_s < math.inf:
                later.append(ready_s)
        now_s = min(later, default=now_s)
        if not later:
            break
    return max(one.free_s for one in workers)


def _ready_s(one: _Worker, at: int, stages: int, parts: int, links: _Links) -> float:
    """When what the next action needs is there."""
    if one.next >= len(one.actions):
        return math.inf
    action = one.actions[one.next]
    part = action.chunk * stages + at
    if action.kind == "forward" and part:
        return links.come_s("forward", part - 1, action.micro)
    if action.kind == "backward" and part < parts - 1:
        return links.come_s("backward", part, action.micro)
    return 0.0


def _begin(
    one: _Worker, at: int, now_s: float, stages: int, parts_s: Sequence[float], links: _Links
) -> bool:
    """Begin the next action, or weights meanwhile; returns whether the worker may begin another at once."""
    if one.next >= len(one.actions):
        return False
    action = one.actions[one.next]
    part = action.chunk * stages + at
    took_s = parts_s[part]
    if action.kind == "weights":
        one.next += 1
        if one.weighed > action.micro:
            return True  # computed while the worker would have waited
    elif _ready_s(one, at, stages, len(parts_s), links) > now_s:
        if not one.owed:
            return False
    else:
        one.next += 1
        whole = _INPUT if one.splits else _INPUT + _WEIGHTS
        one.free_s = now_s + took_s * (_FORWARD if action.kind == "forward" else whole)
        if action.kind == "forward" and part < len(parts_s) - 1:
            links.send("forward", part, action.micro, one.free_s)
        elif action.kind == "backward":
            one.owed += one.splits
            if part:
                links.send("backward", part - 1, action.micro, one.free_s)
        return False
    one.owed -= 1
    one.weighed += 1
    one.free_s = now_s + took_s * _WEIGHTS
    return False
