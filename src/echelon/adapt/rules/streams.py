"""Looks at iterable data sets: every worker must read the same stream."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from echelon.adapt.finding import ScriptFinding
from echelon.adapt.ranks import names_rank
from echelon.adapt.reading import Reading
from echelon.adapt.rule import AdaptRule

_STREAMS = {"torch.utils.data.IterableDataset", "torch.utils.data.dataset.IterableDataset"}
_WHY = "each worker reads the whole stream, and keeps its part of every batch"


@dataclass(frozen=True, slots=True, kw_only=True)
class Streams(AdaptRule):
    """IterableDataset: the same stream on all workers, not divided by rank."""

    name: ClassVar[str] = "streams"

    def look(self, reading: Reading) -> Iterator[ScriptFinding]:
        """One finding per class."""
        for node in reading.tree.nodes:
            if not isinstance(node, ast.ClassDef):
                continue
            if not {reading.tree.name(base) for base in node.bases} & _STREAMS:
                continue
            if any(names_rank(one) or self._asks(reading, one) for one in node.body):
                what = f"{node.name} divides its stream by rank"
                fix = "yield all samples on every worker; the prepared loader divides them"
                yield reading.say(self.name, node, "check", what, _WHY, fix)
            else:
                what = f"{node.name} is a stream"
                fix = "it must yield the same samples in the same order on all workers"
                yield reading.say(self.name, node, "note", what, _WHY, fix)

    def _asks(self, reading: Reading, node: ast.AST) -> bool:
        return any(reading.tree.callee(one).startswith("torch.distributed.") for one in ast.walk(node))
