"""Says what happens to data that does not come from a DataLoader."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from echelon.adapt.finding import ScriptFinding
from echelon.adapt.reading import Reading
from echelon.adapt.rule import AdaptRule
from echelon.adapt.tree import is_backward

_RANDOM = ("rand", "sample", "choice", "permutation", "step")


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnData(AdaptRule):
    """Training on batches that the script makes itself, without a loader."""

    name: ClassVar[str] = "own-data"

    def look(self, reading: Reading) -> Iterator[ScriptFinding]:
        """At most one finding."""
        home = reading.home
        if home is None or home.problem or not reading.trains or reading.prepared_loaders:
            return
        if reading.flavour not in ("plain", "ddp"):
            return
        node = next((one for one in reading.tree.nodes if is_backward(one)), reading.tree.module)
        if self._draws(reading):
            what = "each worker draws its own batches: training reads from no DataLoader"
            why = "gradients are averaged over workers: a step has the samples of all, N times the batch"
            fix = (
                f"to keep the batch, divide its size by {reading.session}.world_size; "
                f"{reading.session}.weigh(len(x)) if sizes differ"
            )
        else:
            what = "every worker trains on all of the data: training reads from no DataLoader"
            why = "the result is that of one process, and no worker does less than alone"
            fix = "to share the work, train from a DataLoader(TensorDataset(x, y), batch_size=...)"
        yield reading.say(self.name, node, "note", what, why, fix)

    def _draws(self, reading: Reading) -> bool:
        """Whether random numbers are drawn in what trains, outside of modules."""
        loops = [
            one
            for one in reading.tree.nodes
            if isinstance(one, (ast.For, ast.While)) and reading.tree.trains(one)
        ]
        for node in reading.tree.run_by(*loops):
            around = reading.tree.class_around(node)
            if around is not None and around.name in reading.tree.modules:
                continue
            last = reading.tree.callee(node).rpartition(".")[2]
            owner = reading.tree.callee(node).partition(".")[0]
            if any(last.startswith(word) for word in _RANDOM[:-1]) or (last == "step" and owner == "env"):
                return True
        return False
