"""In which order does a stage compute? Lists of actions, one for each stage. Pure.

    gpipe   all micro-batches forward, then all backward (Huang et al., 2019)
    1f1b    a stage begins with the backward passes as early as it can, and then alternates: at most as
            many micro-batches are kept as there are stages after it, and its own (Narayanan et al., 2019)
            With `ahead`, so many more are in flight per hop, so that a stage need not wait for the wire
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
from typing import Literal

Kind = Literal["forward", "backward", "weights"]


@dataclass(frozen=True, slots=True)
class StageAction:
    """A pass of one micro-batch through a stage. In a list without `weights`, `backward` includes them."""

    kind: Kind
    micro: int


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


def schedule(name: str, stage: int, stages: int, micro: int, ahead: int = 0) -> list[StageAction]:
    """The actions of one stage, in the order in which it computes them."""
    if name == "gpipe":
        return gpipe(micro)
    if name == "filled":
        return filled(stage, stages, micro, ahead=ahead)
    return one_forward_one_backward(stage, stages, micro, ahead=ahead)


def backward_only(name: str, micro: int) -> list[StageAction]:
    """The actions after all forward passes, if those went first; the same for all stages."""
    actions = [StageAction("backward", m) for m in range(micro)]
    return actions + [StageAction("weights", m) for m in range(micro) if name == "filled"]


def most_kept(actions: list[StageAction]) -> int:
    """How many micro-batches' activations a stage keeps at most."""
    ends = "weights" if any(action.kind == "weights" for action in actions) else "backward"
    kept = most = 0
    for action in actions:
        kept += (action.kind == "forward") - (action.kind == ends)
        most = max(most, kept)
    return most
