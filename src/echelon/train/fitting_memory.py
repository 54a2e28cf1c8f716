"""Do the prepared models fit into the workers' memory? Asked in `prepare`, before any step.

What a worker may use is what is free on its machine, in equal parts for the machine's workers, and what
its models take already; less if the plan states it. On a device other than the processor nothing is known,
and nothing is refused.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn, optim
from torch.optim import Optimizer

from echelon.cluster.allowance import allowance
from echelon.comm.group import Group
from echelon.config.units import show_memory, size_bytes
from echelon.errors import PlanError
from echelon.parallel.candidates import candidate_layouts
from echelon.parallel.layout import parse_layout
from echelon.parallel.memory import (
    MemoryNeed,
    MissingMemory,
    ModelBytes,
    memory_needs,
    missing_memory,
    nearest_layout,
    workers_that_fit,
)

_STATES: dict[type[Optimizer], int] = {  # for each element, of the parameter's size
    optim.SGD: 0,
    optim.Adam: 2,
    optim.AdamW: 2,
    optim.Adamax: 2,
    optim.Adagrad: 1,
    optim.Adadelta: 2,
    optim.ASGD: 1,
    optim.NAdam: 2,
    optim.RAdam: 2,
    optim.RMSprop: 1,
    optim.Rprop: 2,
}
_ONE_MORE = ("momentum", "amsgrad", "centered")  # options that add a state


def bytes_of(models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> ModelBytes:
    """What one process needs for these models and their optimizers."""
    parameters = {id(p): p for model in models for p in model.parameters()}
    buffers = {id(b): b for model in models for b in model.buffers()}
    return ModelBytes(
        parameters=sum(_bytes(one) for one in (*parameters.values(), *buffers.values())),
        trained=sum(_bytes(p) for p in parameters.values() if p.requires_grad),
        states=sum(_states(one, set(parameters)) for one in optimizers),
        largest=max((_bytes(p) for p in parameters.values() if p.requires_grad), default=0),
    )


def _states(optimizer: Optimizer, known: set[int]) -> float:
    """The bytes of all states after a step; of an unknown optimizer, those that it has."""
    copies = _STATES.get(type(optimizer))
    if copies is None:
        return sum(_bytes(value) for value in _there(optimizer))
    found = 0.0
    for group in optimizer.param_groups:
        size = sum(_bytes(p) for p in group["params"] if id(p) in known and p.requires_grad)
        found += size * (copies + sum(bool(group.get(name)) for name in _ONE_MORE))
    return found


def _there(optimizer: Optimizer) -> Iterator[Tensor]:
    for state in optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, Tensor))


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def resident_bytes() -> float:
    """The memory of this process; 0 if unknown."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except (OSError, ValueError, IndexError):
        return 0.0
    return float(pages * os.sysconf("SC_PAGE_SIZE"))


def room_bytes(workers_here: int, stated: str, taken: float) -> float:
    """What this worker may use for its models, which have `taken` already; `stated` is the plan's limit."""
    free = allowance(workers_here).memory_bytes + taken
    if not stated:
        return free
    return min(free, size_bytes(stated) - max(0.0, resident_bytes() - taken))


def check_memory(
    group: Group,
    layout: str,
    model: ModelBytes,
    room: float,
    nodes: Sequence[str],
    order: tuple[int, ...] = (),
) -> list[MemoryNeed]:
    """What each worker needs. All workers raise PlanError if a layout needs more than there is.

    order  the workers, neighbours beside each other; empty: by rank
    """
    told = group.all_gather(torch.tensor([room], dtype=torch.float64))
    rooms = [float(one) for one in told]
    parsed = replace(parse_layout(layout), order=order)
    missing = missing_memory(parsed, model, rooms)
    if missing is None:
        return memory_needs(parsed, group.size, model)
    raise _misfit(layout, missing, model, rooms, nodes)


def _misfit(
    layout: str, missing: MissingMemory, model: ModelBytes, rooms: Sequence[float], nodes: Sequence[str]
) -> PlanError:
    one = missing.ranks[0]
    who = (
        f"rank {one} on {nodes[one]} needs"
        if len(missing.ranks) == 1
        else f"the {len(missing.ranks)} workers of a replica, from rank {one} on {nodes[one]}, need"
    )
    return PlanError(
        f"{who} {show_memory(missing.need)} for parameters, gradients and optimizer states, and may use "
        f"{show_memory(max(0.0, missing.room))}: {show_memory(missing.size)} are missing",
        where=f"prepare, parallel {layout}",
        fix=_way_out(layout, model, rooms),
    )


def _way_out(layout: str, model: ModelBytes, rooms: Sequence[float]) -> str:
    texts = [text for text in candidate_layouts(len(rooms)) if text != layout]
    text, missing = nearest_layout(texts, model, rooms)
    if text and missing is None:
        return f"use parallel {text!r}, which fits"
    enough = workers_that_fit(model, rooms)
    more = f", or start {enough} workers with sharded(level=3)" if enough > len(rooms) else ""
    near = f"; to {text} {show_memory(missing.size)} are missing" if missing is not None else ""
    return f"no layout of {len(rooms)} workers fits{near}: use workers with more memory{more}"
