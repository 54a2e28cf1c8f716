"""In which order does a stage compute? Lists of actions, one for each stage. Pure.

    gpipe  all micro-batches forward, then all backward (Huang et al., 2019)
    1f1b   a stage begins with the backward passes as early as it can, and then alternates: at most as
           many micro-batches are kept as there are stages after it, and its own (Narayanan et al., 2019)
           With `ahead`, so many more are in flight per hop, so that a stage need not wait for the wire

A stage computes its list in order; it waits for what an action needs, and sends what it yields without
waiting. Forward of m needs forward of m on the stage before; backward of m needs forward of m here and
backward of m on the stage after. With several micro-batches backward passes come in ascending order, so
that gradients are added up in the same order in all schedules.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["forward", "backward"]


@dataclass(frozen=True, slots=True)
class StageAction:
    """One pass of one micro-batch through a stage."""

    kind: Kind
    micro: int


def gpipe(micro: int) -> list[StageAction]:
    """All forward, then all backward; the same for all stages."""
    forward = [StageAction("forward", m) for m in range(micro)]
    return forward + [StageAction("backward", m) for m in range(micro)]


def one_forward_one_backward(stage: int, stages: int, micro: int, *, ahead: int = 0) -> list[StageAction]:
    """As few micro-batches in flight as keep all stages busy; `ahead` more for each hop that follows."""
    hops = stages - 1 - stage
    first = min(micro, (1 + ahead) * hops + 1)  # forward passes before the first backward pass
    actions = [StageAction("forward", m) for m in range(first)]
    for m in range(micro):
        actions.append(StageAction("backward", m))
        if first + m < micro:
            actions.append(StageAction("forward", first + m))
    return actions


def schedule(name: str, stage: int, stages: int, micro: int, ahead: int = 0) -> list[StageAction]:
    """The actions of one stage, in the order in which it computes them."""
    if name == "gpipe":
        return gpipe(micro)
    return one_forward_one_backward(stage, stages, micro, ahead=ahead)


def most_kept(actions: list[StageAction]) -> int:
    """How many micro-batches' activations a stage keeps at most."""
    kept = most = 0
    for action in actions:
        kept += 1 if action.kind == "forward" else -1
        most = max(most, kept)
    return most
