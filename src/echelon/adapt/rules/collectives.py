"""Lets the session carry out what torch.distributed did: sums, barriers, broadcasts."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from echelon.adapt.changes import Change, Replace
from echelon.adapt.finding import ScriptFinding
from echelon.adapt.reading import Reading
from echelon.adapt.rule import AdaptRule
from echelon.adapt.tree import constant, keyword

_WHY = "there is no process group of torch.distributed any more"
_OPS = {"SUM": "sum", "AVG": "mean", "MAX": "max", "MIN": "min"}
_BY_HAND = {
    "all_gather": "tensors = {session}.all_gather(tensor)",
    "all_gather_object": "{session}.all_gather(tensor), or {session}.gather_for_metrics(...)",
    "all_gather_into_tensor": "torch.cat({session}.all_gather(tensor))",
    "reduce": "{session}.all_reduce(tensor); all workers get the result",
    "gather": "{session}.all_gather(tensor)",
    "reduce_scatter": "{session}.reduce_scatter(tensor)",
    "broadcast_object_list": "compute it on all workers, or {session}.broadcast(tensor)",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Collectives(AdaptRule):
    """Calls of dist.all_reduce, dist.barrier, dist.broadcast and dist.all_gather."""

    name: ClassVar[str] = "collectives"

    def look(self, reading: Reading) -> Iterator[ScriptFinding]:
        """One finding per call."""
        for node in reading.tree.nodes:
            name = reading.tree.callee(node)
            if isinstance(node, ast.Call) and name.startswith("torch.distributed."):
                yield from self._call(reading, node, name.rpartition(".")[2])

    def _call(self, reading: Reading, call: ast.Call, last: str) -> Iterator[ScriptFinding]:
        session = reading.session
        what = f"{reading.source(call)} uses torch.distributed"
        new = _rewritten(reading, call, last)
        if new:
            changes: tuple[Change, ...] = (Replace(call, new),)
            yield reading.say(self.name, call, "change", what, _WHY, new, changes)
        elif last in _BY_HAND or last in ("all_reduce", "broadcast"):
            fix = _BY_HAND.get(last, f"{session}.{last}(tensor)").format(session=session)
            yield reading.say(self.name, call, "check", what, _WHY, fix)


def _rewritten(reading: Reading, call: ast.Call, last: str) -> str:
    """The same call of the session; empty if it is not certain."""
    session, known = reading.session, {"op", "src"}
    if last == "barrier":
        return f"{session}.barrier()"
    waits = [one for one in call.keywords if one.arg == "async_op" and constant(one.value) is False]
    if not call.args or any(one.arg not in known and one not in waits for one in call.keywords):
        return ""
    tensor = reading.text.of(call.args[0])
    if last == "all_reduce":
        given = keyword(call, "op")
        op = given.value if given is not None else call.args[1] if len(call.args) > 1 else None
        if op is None:
            return f"{session}.all_reduce({tensor})"
        word = _OPS.get(reading.tree.written(op).rpartition(".")[2], "")
        return f'{session}.all_reduce({tensor}, "{word}")' if word else ""
    if last == "broadcast":
        given = keyword(call, "src")
        source = given.value if given is not None else call.args[1] if len(call.args) > 1 else None
        if isinstance(constant(source), int) and source is not None:
            return f"{session}.broadcast({tensor}, source={reading.text.of(source)})"
    return ""
