"""Says when there is no training loop that the session could take part in."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from echelon.adapt.finding import ScriptFinding
from echelon.adapt.reading import Reading
from echelon.adapt.rule import AdaptRule

_TRAINERS = {
    "lightning.Trainer", "lightning.pytorch.Trainer", "pytorch_lightning.Trainer", "transformers.Trainer",
    "transformers.Seq2SeqTrainer", "ignite.engine.Engine",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnLoop(AdaptRule):
    """Scripts whose loop is in another library, or that have none."""

    name: ClassVar[str] = "own-loop"

    def look(self, reading: Reading) -> Iterator[ScriptFinding]:
        """At most one finding."""
        for call in reading.tree.calls(*_TRAINERS):
            what = f"{reading.source(call.func)} runs the training loop"
            why = "Echelon takes part in a loop that the script writes itself"
            yield reading.say(
                self.name, call, "check", what, why, "write the loop: for epoch in session.epochs(n): ..."
            )
            return
        if not reading.trains:
            what = "no training loop was found: nothing calls backward()"
            why = "the loop may be in another file"
            yield reading.say(
                self.name, reading.tree.module, "check", what, why, "run echelon adapt on that file"
            )
