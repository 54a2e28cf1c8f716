"""Takes the rank from the session, and finds calls of all workers that only one worker makes."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from echelon.adapt.changes import Replace
from echelon.adapt.finding import ScriptFinding
from echelon.adapt.ranks import rank_guard
from echelon.adapt.reading import Reading
from echelon.adapt.rule import AdaptRule

_ASKED = {
    "torch.distributed.get_rank": "rank",
    "torch.distributed.get_world_size": "world_size",
}
_ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
_TOGETHER = {
    "prepare", "save", "load", "save_state", "load_state", "all_reduce", "all_gather", "reduce_scatter",
    "broadcast", "barrier", "wait_for_everyone", "mean", "gather", "gather_for_metrics", "on_leader",
    "weigh",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class RankZero(AdaptRule):
    """Rank-0 habits: get_rank(), os.environ["RANK"], calls of all workers under `if rank == 0`."""

    name: ClassVar[str] = "rank"

    def look(self, reading: Reading) -> Iterator[ScriptFinding]:
        """One finding per place."""
        for call in reading.tree.calls(*_ASKED):
            new = f"{reading.session}.{_ASKED[reading.tree.callee(call)]}"
            what = f"{reading.source(call)} asks torch.distributed"
            why = "there is no process group of torch.distributed any more"
            yield reading.say(self.name, call, "change", what, why, new, (Replace(call, new),))
        for node in reading.tree.nodes:
            if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
                yield from self._environment(reading, node)
        yield from self._guarded(reading)

    def _environment(self, reading: Reading, node: ast.Subscript) -> Iterator[ScriptFinding]:
        key = node.slice.value if isinstance(node.slice, ast.Constant) else None
        if reading.tree.name(node.value) == "os.environ" and key in _ALONE:
            new = f'{reading.text.of(node.value)}.get("{key}", "{_ALONE[key]}")'
            what = f"{reading.source(node)} is read"
            why = "launchers set it; without a launcher it is missing, and the script ends"
            yield reading.say(self.name, node, "change", what, why, new, (Replace(node, new),))

    def _guarded(self, reading: Reading) -> Iterator[ScriptFinding]:
        """Calls that all workers must make, and loops over shared data, under a condition on the rank."""
        fix = "move it out of the condition: all workers call it, and the leader writes or prints"
        for node in reading.tree.nodes:
            call = isinstance(node, ast.Attribute) and node.attr in _TOGETHER
            if not call or not isinstance(node, ast.Attribute) or not reading.is_session(node.value):
                continue
            guard = rank_guard(reading.tree, node)
            if guard is not None:
                what = f"{reading.source(node)}() is called under `if {reading.source(guard.test)}`"
                why = "all workers must call it: those that do not make the others wait"
                yield reading.say(self.name, node, "check", what, why, fix)
        for loop in reading.loops:
            guard = rank_guard(reading.tree, loop.node)
            if guard is not None:
                what = f"a prepared loader is read under `if {reading.source(guard.test)}`"
                why = "each worker draws its share only, and all workers must begin a pass together"
                fix = "evaluate on all workers, or with a loader that is not prepared"
                yield reading.say(self.name, guard, "check", what, why, fix)
