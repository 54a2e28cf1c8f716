"""In which order does a stage compute? Lists of actions, one for each stage. Pure.

    gpipe   all micro-batches forward, then all backward (Huang et al., 2019)
    1f1b    a stage begins with the backward passes as early as it can, and then alternates: at most as
            many micro-batches are kept as there are stages after it, and its own (Narayanan et al., 2019)
            With `ahead`, so many more are in flight per hop, so that a stage need not wait for the wire
    interleaved  the same for workers that have several chunks of layers each
    stale   forward passes, and between them backward passes of earlier batches that can begin (`late.py`)
    filled  the same order, with backward passes in two parts (Qi et al., 2023): gradients of a stage's
            input are sent at once, those of its weights come as late as memory allows. No stage keeps
            more micro-batches than the first one does with 1f1b

A stage computes its list in order; it waits for what an action needs, and sends what it yields without
waiting. Where it would wait, it computes weights that come later in its list. Forward of m needs forward
of m on the stage before; backward of m needs forward of m here and backward of m on the stage after;
weights of m need backward of m here. With several micro-batches backward passes come in ascending order,
and so do weights, so that gradients are added up in the same order in all schedules.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

Kind = Literal["forward", "backward", "weights"]


@dataclass(frozen=True, slots=True)
class StageAction:
    """A pass of one micro-batch through one of a worker's chunks of layers.

    In a list without `weights`, `backward` includes them.
    """

    kind: Kind
    micro: int
    chunk: int = 0


def gpipe(micro: int) -> list[StageAction]:
    """All forward, then all backward; the same for all stages."""
    forward = [StageAction("forward", m) for m in range(micro)]
    return forward + [StageAction("backward", m) for m in range(micro)]


def one_forward_one_backward(stage: int, stages: int, micro: int, *, ahead: int = 0) -> list[StageAction]:
    """As few micro-batches in flight as keep all stages busy; `ahead` more for each hop that follows."""
    first = _before_backward(stage, stages, micro, ahead)
    actions = [StageAction("forward", m) for m in range(first)]
    for m in range(micro):
        actions.append(StageAction("backward", m))
        if first + m < micro:
            actions.append(StageAction("forward", first + m))
    return actions


def filled(stage: int, stages: int, micro: int, *, ahead: int = 0) -> list[StageAction]:
    """1F1B with weights put off until the next forward pass needs their memory."""
    most = _before_backward(0, stages, micro, ahead)
    actions: list[StageAction] = []
    forwards = done = 0
    for action in one_forward_one_backward(stage, stages, micro, ahead=ahead):
        if action.kind == "forward":
            while forwards + 1 - done > most:
                actions.append(StageAction("weights", done))
                done += 1
            forwards += 1
        actions.append(action)
    return actions + [StageAction("weights", m) for m in range(done, micro)]


def _before_backward(stage: int, stages: int, micro: int, ahead: int) -> int:
    """How many forward passes of 1F1B come before the first backward pass."""
    return min(micro, (1 + ahead) * (stages - 1 - stage) + 1)


def interleaved(stages: int, micro: int, chunks: int, *, ahead: int = 0) -> list[list[StageAction]]:
    """1F1B for workers with several chunks each; the lists of all of them (Narayanan et al., 2021).

    A model has stages * chunks chunks, which go over the workers in turn. As many micro-batches as there
    are workers go through the first chunks, then through the second ones, and so on; backward passes go
    the other way. How both alternate is found by letting equal workers compute, with a backward pass twice
    as long as a forward pass. A worker keeps at most

        2 (1 + ahead) (workers after it) + (chunks - 1) stages + 1

    passes, or one more if all would wait for each other. So the lists can always be computed.
    """
    groups = [range(first, min(first + stages, micro)) for first in range(0, micro, stages)]
    down = [StageAction("forward", m, c) for group in groups for c in range(chunks) for m in group]
    up = [StageAction("backward", m, c) for group in groups for c in reversed(range(chunks)) for m in group]
    limits = [2 * (1 + ahead) * (stages - 1 - w) + (chunks - 1) * stages + 1 for w in range(stages)]
    lists: list[list[StageAction]] = [[] for _ in range(stages)]
    forwards, backwards, free = [0] * stages, [0] * stages, [0] * stages
    ended: dict[tuple[Kind, int, int], int] = {}  # when a pass of a micro-batch through a chunk ends
    time = 0

    def can(worker: int, action: StageAction) -> bool:
        """Whether what a pass needs is there."""
        at = action.chunk * stages + worker
        if action.kind == "forward":
            return at == 0 or ended.get(("forward", at - 1, action.micro), time + 1) <= time
        if ended.get(("forward", at, action.micro), time + 1) > time:
            return False
        last = at == stages * chunks - 1
        return last or ended.get(("backward", at + 1, action.micro), time + 1) <= time

    while any(count < len(up) for count in backwards):
        for worker in range(stages):
            if free[worker] > time:
                continue
            kept = forwards[worker] - backwards[worker]
            if (
                forwards[worker] < len(down)
                and kept < limits[worker]
                and can(worker, down[forwards[worker]])
            ):
                action = down[forwards[worker]]
                forwards[worker] += 1
            elif backwards[worker] < len(up) and can(worker, up[backwards[worker]]):
                action = up[backwards[worker]]
                backwards[worker] += 1
            else:
                continue
            free[worker] = time + (1 if action.kind == "forward" else 2)
            ended[action.kind, action.chunk * stages + worker, action.micro] = free[worker]
            lists[worker].append(action)
        later = [one for one in free if one > time]
        if not later:
            limits = [limit + 1 for limit in limits]
        time = min(later, default=time)
    return lists


_interleaved = lru_cache(maxsize=16)(interleaved)


def schedule(
    name: str, stage: int, stages: int, micro: int, ahead: int = 0, chunks: int = 1
) -> list[StageAction]:
    """The actions of one stage, in the order in which it computes them."""
    if name in ("gpipe", "stale"):  # `late.py` computes the backward passes of earlier batches
        return gpipe(micro)
    if name == "filled":
        return filled(stage, stages, micro, ahead=ahead)
    if name == "interleaved":
        return list(_interleaved(stages, micro, chunks, ahead=ahead)[stage])
    return one_forward_one_backward(stage, stages, micro, ahead=ahead)


def forward_only(actions: list[StageAction]) -> list[StageAction]:
    """The forward passes of a list, which may go first."""
    return [action for action in actions if action.kind == "forward"]


def backward_only(actions: list[StageAction]) -> list[StageAction]:
    """The actions after all forward passes, if those went first: backward passes, then weights."""
    later = [action for action in actions if action.kind != "forward"]
    return sorted(later, key=lambda action: action.kind == "weights")


def most_kept(actions: list[StageAction]) -> int:
    """How many micro-batches' activations a stage keeps at most."""
    ends = "weights" if any(action.kind == "weights" for action in actions) else "backward"
    kept = most = 0
    for action in actions:
        kept += (action.kind == "forward") - (action.kind == ends)
        most = max(most, kept)
    return most
