"""Which linear layers of a model send factors instead of their gradients?

Layers are watched for one round. Then the workers exchange how many rows each layer had and how fast they
multiply, and all decide alike, by cost (`reduce/factors.py`), for each layer. The gradient of a large layer
that stays dense is computed directly into the buffer in which it is reduced. Small layers are released.
The decision stays when members change; who joins takes it over.

Every worker multiplies all rows, so the results have the same bits on all workers if their processors are
alike; otherwise `auto` keeps dense gradients.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from echelon.cluster.machine import processor_name
from echelon.comm.group import Group
from echelon.comm.schedule.cost import LinkCost
from echelon.config.choices import FactorRule
from echelon.config.units import show_bytes
from echelon.errors import WorkerError
from echelon.reduce.bucket import Bucket, FactorBucket, LinearBucket
from echelon.reduce.factors import FactorChoice, LinearShape, decide
from echelon.reduce.reducer import Reducer
from echelon.train import linear

_UNFIT = -1  # in place of a number of rows
_LARGE = 1 << 18  # elements: below this, avoiding the copy costs more than the copy


class Factoring:
    """The linear layers of one model."""

    def __init__(
        self,
        layers: dict[str, nn.Linear],
        *,
        rule: FactorRule,
        link: LinkCost | None,
        explain: Callable[[str, str], None],
    ) -> None:
        self._rule = rule
        self._link = link or LinkCost(latency_s=0.0, seconds_per_byte=0.0)
        self._explain = explain
        self._layers = layers
        self._reducer: Reducer | None = None
        self._captures: dict[str, linear.LinearCapture] = {}
        self._decided = False
        self._ways: dict[str, str] = {}  # of each layer's gradient
        self._rows: dict[str, Mapping[int, int]] = {}  # by the slots that workers had first

    def attach(self) -> None:
        """Begin to watch; must come before other hooks on the weights."""
        self._captures = linear.attach(self._layers, scale=self._scale, on_ready=self._on_ready)

    def serve(self, reducer: Reducer) -> None:
        """Send the factors through this reducer."""
        self._reducer = reducer

    def _scale(self) -> float:
        return self._reducer.weight if self._reducer else 1.0

    def _on_ready(self, capture: linear.LinearCapture) -> None:
        """A layer's rows are complete. If gradients stay local for now, turn them into a gradient."""
        assert self._reducer is not None
        if not self._reducer.active:
            capture.fold(self._reducer.unit)

    def consider(self) -> None:
        """Decide once, after the first round; all workers call this at the same point."""
        if self._decided or self._reducer is None or not self._reducer.rounds:
            return
        self._decided = True
        choices = self._choose(self._reducer)
        for name, (choice, rows_of) in choices.items():
            whole = _worth_it(self._captures[name].weight, tuple(rows_of.values()))
            self._ways[name] = "factors" if choice.factors else "whole" if whole else "released"
            self._rows[name] = rows_of
        self._carry_out(self._reducer)
        told = [choice for choice, _ in choices.values()]
        head = _head(told)
        tell = f"factors: {head}" if any(choice.factors for choice in told) else ""
        self._explain("; ".join([head, *(choice.reason for choice in told)]), tell)

    def _carry_out(self, reducer: Reducer, *, joins: bool = False) -> None:
        """Let layers send what was decided from the next round on."""
        made: dict[int, Callable[[], Bucket]] = {}
        for name, way in self._ways.items():
            capture = self._captures[name]
            if way == "factors":
                made[id(capture.weight)] = partial(self._factors, reducer.group, capture, self._rows[name])
            elif way == "whole":
                made[id(capture.weight)] = partial(LinearBucket, capture, reducer.group)
            else:
                linear.release(self._layers[name])
                continue
            capture.use("factors")
        if made:
            reducer.factor(made, joins=joins)

    def _factors(self, group: Group, capture: linear.LinearCapture, rows: Mapping[int, int]) -> Bucket:
        """With room for the rows of each worker; who has joined since begins with as many as the most."""
        most = max(rows.values(), default=0)
        return FactorBucket(capture, group, [rows.get(slot, most) for slot in group.slots])

    def state(self) -> dict[str, Any]:
        """What was decided, for a worker that comes back or joins."""
        rows = {name: dict(rows) for name, rows in self._rows.items()}
        return {"decided": self._decided, "ways": self._ways, "rows": rows, "kind": _kind_of_processor()}

    def adopt(self, state: dict[str, Any]) -> None:
        """Take over what the others have decided."""
        if not state["decided"] or self._reducer is None:
            return
        self._decided, self._ways, self._rows = True, state["ways"], state["rows"]
        alike = state["kind"] == _kind_of_processor() or self._rule == "always"
        if "factors" in self._ways.values() and not alike:
            raise WorkerError(
                "this worker has another processor than the others, so its products of factors would "
                "differ in their last bits",
                where=f"rank {self._reducer.group.rank}",
                fix="start the run with --factors never",
            )
        self._carry_out(self._reducer, joins=True)

    def _choose(self, reducer: Reducer) -> dict[str, tuple[FactorChoice, Mapping[int, int]]]:
        captures = self._captures.values()
        rows = [_UNFIT if capture.obstacle else -(-capture.rows // reducer.rounds) for capture in captures]
        slot = reducer.group.slot
        mine = torch.tensor([slot, _kind_of_processor(), _flops_per_s(), *rows], dtype=torch.float64)
        all_of = torch.stack(reducer.group.all_gather(mine))  # of members that may be lost by now
        slots = [int(one) for one in all_of[:, 0]]
        alike = len(set(all_of[:, 1].tolist())) == 1
        flops_per_s = float(all_of[:, 2].min())
        choices: dict[str, tuple[FactorChoice, Mapping[int, int]]] = {}
        for column, capture in enumerate(captures, start=3):
            rows_of = tuple(int(count) for count in all_of[:, column])
            obstacle = ""
            if _UNFIT in rows_of:
                obstacle = capture.obstacle or f"rank {rows_of.index(_UNFIT)} cannot send factors"
            elif not alike and self._rule == "auto":
                obstacle = "processors differ, so products would differ in their last bits"
            outputs, inputs = capture.weight.shape
            layer = LinearShape(
                name=capture.name,
                rows_of=tuple(max(0, count) for count in rows_of),
                inputs=inputs,
                outputs=outputs,
                item_bytes=capture.weight.element_size(),
            )
            choice = decide(layer, self._link, flops_per_s=flops_per_s, rule=self._rule, obstacle=obstacle)
            known = {} if obstacle else dict(zip(slots, layer.rows_of, strict=True))
            choices[capture.name] = (choice, known)
        return choices


def _worth_it(weight: Tensor, rows_of: tuple[int, ...]) -> bool:
    """Whether rows are much smaller than the gradient, and the gradient is large enough to matter."""
    outputs, inputs = weight.shape
    least = weight.numel() >= _LARGE and any(rows_of)
    return least and 4 * max(rows_of) * (outputs + inputs) <= outputs * inputs


def _head(choices: list[FactorChoice]) -> str:
    """One sentence on all layers."""
    chosen = [choice for choice in choices if choice.factors]
    if not chosen:
        return f"none of {len(choices)} linear layers sends factors"
    sent = sum(choice.factor_bytes for choice in chosen)
    instead = sum(choice.dense_bytes for choice in chosen)
    return (
        f"{len(chosen)} of {len(choices)} linear layers send factors, "
        f"{show_bytes(sent)} a step instead of {show_bytes(instead)}"
    )


def _kind_of_processor() -> float:
    how = f"{torch.backends.cpu.get_cpu_capability()} {torch.get_num_threads()} {torch.__version__}"
    kind = f"{processor_name()} {how}"
    return float(zlib.crc32(kind.encode()))


def _flops_per_s() -> float:
    """How fast this worker multiplies, in operations per second; takes a few milliseconds."""
    rows, width = 64, 1024
    left, right = torch.ones(width, rows), torch.ones(rows, width)
    left @ right
    begun = time.perf_counter()
    for _ in range(3):
        left @ right
    return 3 * 2.0 * rows * width * width / max(1e-9, time.perf_counter() - begun)
