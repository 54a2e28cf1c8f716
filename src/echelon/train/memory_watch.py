"""What memory does this worker's part of the models need, and how much does it take?

In `prepare` a layout that does not fit is refused (`fitting_memory.py`). With a model in parts, what was
predicted is among the plan's reasons, and at the end each worker records what it took.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from torch import nn
from torch.optim import Optimizer

from echelon.comm.group import Group
from echelon.config.units import show_memory
from echelon.observe.events import Event, MemoryUsed
from echelon.parallel.memory import MemoryNeed
from echelon.train.fitting_memory import bytes_of, check_memory, resident_bytes, room_bytes

_MOST_SAID = 8  # workers, in the plan
_LOOKS = 200  # steps after which memory is looked at: it has grown by then


class MemoryWatch:
    """Looks after one worker's memory. `stated` is what the plan says that it may use, as text."""

    def __init__(
        self,
        group: Group,
        nodes: Sequence[str],
        stated: str,
        emit: Callable[[Event], None],
        explain: Callable[[str, str, str], None],
    ) -> None:
        self._group = group
        self._nodes = nodes
        self._stated = stated
        self._emit = emit
        self._explain = explain
        self._need: MemoryNeed | None = None
        self._room = self._before = self._most = 0.0
        self._looks = 0

    def prepared(
        self,
        models: Sequence[nn.Module],
        optimizers: Sequence[Optimizer],
        layout: str,
        *,
        parts: bool,
        order: tuple[int, ...] = (),
    ) -> None:
        """All workers call it in `prepare`, before models are divided; PlanError if they do not fit.

        parts  workers have parts of the models, so what is predicted and measured is recorded
        order  the workers, neighbours beside each other; empty: by rank
        """
        if not models or any(p.device.type != "cpu" for model in models for p in model.parameters()):
            return
        model = bytes_of(models, optimizers)
        here = self._nodes.count(self._nodes[self._group.rank])
        room = room_bytes(here, self._stated, model.parameters)
        needs = check_memory(self._group, layout, model, room, self._nodes, order)
        if not parts:
            return
        self._need, self._room = needs[self._group.rank], room
        self._before = resident_bytes() - model.parameters
        said = [f"rank {rank} needs {need}" for rank, need in enumerate(needs[:_MOST_SAID])]
        more = f"; {len(needs) - _MOST_SAID} more" if len(needs) > _MOST_SAID else ""
        self._explain(
            "memory",
            f"predicted for {layout}, without activations: {'; '.join(said)}{more}; rank 0 may use "
            f"{show_memory(room)}",
            "",
        )

    def stepped(self) -> None:
        """A step is over."""
        if self._need is not None and self._looks < _LOOKS:
            self._looks += 1
            self._most = max(self._most, resident_bytes() - self._before)

    def end(self, rank: int) -> None:
        """Record what was predicted and what was measured."""
        need = self._need
        if need is None or not self._looks:
            return
        self._need = None
        self._emit(
            MemoryUsed(
                t=time.time(),
                rank=rank,
                parameters_bytes=int(need.parameters),
                gradients_bytes=int(need.gradients),
                states_bytes=int(need.states),
                room_bytes=int(self._room),
                measured_bytes=int(max(0.0, self._most)),
            )
        )
