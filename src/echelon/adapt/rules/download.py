"""Looks at data sets that are downloaded when the script starts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from echelon.adapt.finding import ScriptFinding
from echelon.adapt.ranks import only_guarded
from echelon.adapt.reading import Reading
from echelon.adapt.rule import AdaptRule
from echelon.adapt.tree import constant, keyword


@dataclass(frozen=True, slots=True, kw_only=True)
class Downloads(AdaptRule):
    """With download=True all workers would download to the same folder."""

    name: ClassVar[str] = "download"

    def look(self, reading: Reading) -> Iterator[ScriptFinding]:
        """One note for all of them."""
        for name in list(dict.fromkeys(reading.tree.callee(node) for node in reading.tree.nodes)):
            for call in reading.tree.calls(name) if name else ():
                given = keyword(call, "download")
                if (
                    given is not None
                    and constant(given.value) is True
                    and not only_guarded(reading.tree, call)
                ):
                    what = "every worker downloads the data, at the same time"
                    why = "the first run may find half a file"
                    fix = "run the script once alone first: python train.py"
                    yield reading.say(self.name, call, "note", what, why, fix)
                    return
