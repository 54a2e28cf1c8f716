"""Which linear layers of a model send factors instead of their gradients?

Layers are watched for one round. Then the workers exchange how many rows each layer had and how fast they
multiply, and all decide alike, by cost (`reduce/factors.py`), for each layer. The gradient of a large layer
that stays dense is computed directly into the buffer in which it is reduced. Small layers are released.

Every worker multiplies all rows, so the results have the same bits on all workers if their processors are
alike; otherwise `auto` keeps dense gradients.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from echelon.cluster.machine import processor_name
from echelon.comm.schedule.cost import LinkCost
from echelon.config.choices import FactorRule
from echelon.config.units import show_bytes
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
        group = self._reducer.group
        choices = self._choose(self._reducer)
        made: dict[int, Callable[[], Bucket]] = {}
        for name, (choice, rows_of) in choices.items():
            capture = self._captures[name]
            if choice.factors:
                made[id(capture.weight)] = partial(FactorBucket, capture, group, rows_of)
            elif _worth_it(capture.weight, rows_of):
                made[id(capture.weight)] = partial(LinearBucket, capture, group)
            else:
                linear.release(self._layers[name])
                continue
            capture.use("factors")
        if made:
            self._reducer.factor(made)
        told = [choice for choice, _ in choices.values()]
        head = _head(told)
        tell = f"factors: {head}" if any(choice.factors for choice in told) else ""
        self._explain("; ".join([head, *(choice.reason for choice in told)]), tell)

    def _choose(self, reducer: Reducer) -> dict[str, tuple[FactorChoice, tuple[int, ...]]]:
        captures = self._captures.values()
        rows = [_UNFIT if capture.obstacle else -(-capture.rows // reducer.rounds) for capture in captures]
        mine = torch.tensor([_kind_of_processor(), _flops_per_s(), *rows], dtype=torch.float64)
        all_of = torch.stack(reducer.group.all_gather(mine))
        alike = len(set(all_of[:, 0].tolist())) == 1
        flops_per_s = float(all_of[:, 1].min())
        choices = {}
        for column, capture in enumerate(captures, start=2):
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
            choices[capture.name] = (choice, () if obstacle else layer.rows_of)
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
