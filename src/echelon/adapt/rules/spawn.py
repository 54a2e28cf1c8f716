"""Calls the training function directly instead of starting processes for it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from echelon.adapt.changes import Replace
from echelon.adapt.finding import ScriptFinding
from echelon.adapt.reading import Reading
from echelon.adapt.rule import AdaptRule
from echelon.adapt.tree import keyword

_WHY = "echelon run, torchrun and other launchers start the workers; each runs the whole script"


@dataclass(frozen=True, slots=True, kw_only=True)
class Spawn(AdaptRule):
    """A call of torch.multiprocessing.spawn(main, args=..., nprocs=...)."""

    name: ClassVar[str] = "spawn"

    def look(self, reading: Reading) -> Iterator[ScriptFinding]:
        """One finding per call."""
        for call in reading.tree.calls("torch.multiprocessing.spawn"):
            function = call.args[0] if call.args else keyword(call, "fn")
            named = keyword(call, "args") or (call.args[1] if len(call.args) > 1 else None)
            tuple_ = named.value if isinstance(named, ast.keyword) else named
            what = f"{reading.source(call.func)} starts processes"
            if not isinstance(function, ast.expr) or not isinstance(tuple_, (ast.Tuple, type(None))):
                fix = "call the function itself, with the rank int(os.environ.get('RANK', '0'))"
                yield reading.say(self.name, call, "check", what, _WHY, fix)
                continue
            local = _is_local(reading, function)
            rank = f'int(os.environ.get("{"LOCAL_RANK" if local else "RANK"}", "0"))'
            given = tuple_.elts if tuple_ is not None else []
            rest = [reading.text.of(one) if local else self._argument(reading, call, one) for one in given]
            new = f"{reading.text.of(function)}({', '.join([rank, *rest])})"
            changes = (Replace(call, new), *reading.importing("os"))
            yield reading.say(self.name, call, "change", what, _WHY, new, changes)

    def _argument(self, reading: Reading, call: ast.Call, node: ast.expr) -> str:
        """An argument as it is written; the number of processes becomes that of the environment."""
        number = keyword(call, "nprocs")
        count = number.value if number is not None else call.args[2] if len(call.args) > 2 else None
        if count is not None and ast.dump(count) == ast.dump(node):
            return 'int(os.environ.get("WORLD_SIZE", "1"))'
        return reading.text.of(node)


def _is_local(reading: Reading, function: ast.expr) -> bool:
    """Whether the function takes the number of a device, not of a worker."""
    for one in reading.tree.functions.get(reading.tree.written(function), []):
        first = one.args.args[0].arg.lower() if one.args.args else ""
        return any(word in first for word in ("gpu", "local", "device"))
    return False
