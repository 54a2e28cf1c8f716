"""Tells `prepare` that a loss is a sum over samples, not a mean."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from echelon.adapt.changes import Change
from echelon.adapt.finding import ScriptFinding
from echelon.adapt.reading import Reading
from echelon.adapt.rewrite import add_argument
from echelon.adapt.rule import AdaptRule
from echelon.adapt.tree import constant, keyword

_WHY = "gradients of means are averaged over workers, gradients of sums are added up"


@dataclass(frozen=True, slots=True, kw_only=True)
class SumLoss(AdaptRule):
    """Losses that are sums over the samples of a batch (reduction='sum')."""

    name: ClassVar[str] = "sum-loss"

    def look(self, reading: Reading) -> Iterator[ScriptFinding]:
        """At most one finding."""
        sums = [term.node for term in reading.losses if term.reduction == "sum"]
        if not sums or not reading.prepared_loaders:
            return
        written = reading.source(sums[0])
        what = f"the loss is a sum over samples: {written if len(written) < 60 else written[:57] + '...'}"
        if any(term.reduction == "mean" for term in reading.losses):
            what = f"line {sums[0].lineno} sums over samples, and another part of the loss is a mean"
            fix = 'make both parts means, or both sums with prepare(..., loss="sum")'
            yield reading.say(self.name, sums[0], "check", what, _WHY, fix)
        elif reading.flavour in ("ddp", "accelerate", "fabric") or self._per_worker(reading):
            fix = (
                "it works as it is with equal shares: workers' sums are averaged, as before; "
                'prepare(..., loss="sum") adds them up, and needs a smaller learning rate'
            )
            yield reading.say(self.name, sums[0], "note", what, _WHY, fix)
        elif reading.flavour == "echelon":
            for call in reading.prepare_calls:
                if keyword(call, "loss") is None and self._has_model(reading, call):
                    changes: tuple[Change, ...] = (add_argument(reading.text, call, 'loss="sum"'),)
                    fix = 'prepare(..., loss="sum")'
                    yield reading.say(self.name, call, "change", what, _WHY, fix, changes)
        else:
            yield reading.say(self.name, sums[0], "change", what, _WHY, 'prepare(..., loss="sum")')

    def _per_worker(self, reading: Reading) -> bool:
        """Whether the script keeps the batch of each worker, as other libraries do."""
        given = [keyword(call, "batch") for call in reading.prepare_calls]
        return any(one is not None and constant(one.value) == "per-worker" for one in given)

    def _has_model(self, reading: Reading, call: ast.Call) -> bool:
        return any(reading.things.kind(one) == "model" for one in call.args)
