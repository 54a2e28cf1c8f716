"""Finds scripts whose model is divided among workers, or trained by another engine."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from echelon.adapt.finding import ScriptFinding
from echelon.adapt.reading import Reading
from echelon.adapt.rule import AdaptRule

_ENGINES = (
    "torch.distributed.fsdp", "torch.distributed._composable", "torch.distributed.tensor",
    "torch.distributed.rpc", "torch.distributed.pipelining", "torch.distributed.pipeline",
    "torch.distributed.optim", "deepspeed", "horovod", "colossalai", "torch_xla", "ray.train",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Divided(AdaptRule):
    """FSDP, tensor and pipeline parallelism, RPC, and engines such as DeepSpeed and Horovod."""

    name: ClassVar[str] = "divided"

    def look(self, reading: Reading) -> Iterator[ScriptFinding]:
        """At most one finding, at the import."""
        for node in reading.tree.nodes:
            if not isinstance(node, (ast.Import, ast.ImportFrom)):
                continue
            module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
            names = [f"{module}.{alias.name}".strip(".") for alias in node.names]
            used = [name for name in names if any(f"{name}.".startswith(f"{one}.") for one in _ENGINES)]
            if used:
                yield reading.say(
                    self.name,
                    node,
                    "check",
                    f"the script uses {used[0]}",
                    "Echelon trains whole models on shares of the data, and with its own engine",
                    "begin with a version of the script that trains in one process",
                )
                return
