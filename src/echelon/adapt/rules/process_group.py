"""Takes out what starts and ends a process group of torch.distributed, since the session does it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from echelon.adapt.changes import Change, Remove
from echelon.adapt.finding import ScriptFinding
from echelon.adapt.reading import Reading
from echelon.adapt.rewrite import alone
from echelon.adapt.rule import AdaptRule

_CALLS = {
    "torch.distributed.init_process_group": "echelon.join() meets the other workers",
    "torch.distributed.destroy_process_group": "the session closes itself when the script ends",
    "torch.cuda.set_device": "prepare moves models to session.device, and the loader moves batches there",
}
_ADDRESSES = ("MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessGroup(AdaptRule):
    """Calls of init_process_group, destroy_process_group, MASTER_ADDR and torch.cuda.set_device."""

    name: ClassVar[str] = "process-group"

    def look(self, reading: Reading) -> Iterator[ScriptFinding]:
        """One finding per statement."""
        if reading.flavour != "ddp":
            return
        for call in reading.tree.calls(*_CALLS):
            statement = alone(reading.tree, call)
            changes: tuple[Change, ...] = (Remove(statement),) if statement is not None else ()
            yield reading.say(
                self.name,
                call,
                "change" if changes else "check",
                f"{reading.source(call.func)}() is not needed",
                _CALLS[reading.tree.callee(call)],
                "left out",
                changes,
            )
        for node in reading.tree.nodes:
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Subscript):
                target = node.targets[0]
                key = target.slice.value if isinstance(target.slice, ast.Constant) else None
                if reading.tree.name(target.value) == "os.environ" and key in _ADDRESSES:
                    what = f"{key} is set by the script"
                    why = "the launcher sets it; another value leads workers to different places"
                    yield reading.say(self.name, node, "change", what, why, "left out", (Remove(node),))
        for call in reading.tree.calls(
            "torch.distributed.is_initialized", "torch.distributed.is_available"
        ):
            what = f"{reading.source(call)} decides what runs"
            why = "there is no process group of torch.distributed any more, so it is false"
            fix = f"{reading.session}.world_size > 1"
            yield reading.say(self.name, call, "check", what, why, fix)
