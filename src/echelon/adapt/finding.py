"""What was found in a script: where, why it matters, and what to do.

change  an edit is made; if another line holds it, `fix` says which
check   a person must look: what is right depends on what the script means
note    nothing has to be done
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from echelon.adapt.changes import Change

FindingLevel = Literal["change", "check", "note"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptFinding:
    """One thing in a script that a run with several workers touches.

    what     what the script does, in a few words
    why      what that means with several workers
    fix      what to write instead, or what the edit does
    changes  the edit; empty if a person must make it, or if none is needed
    """

    line: int
    rule: str
    level: FindingLevel
    what: str
    why: str
    fix: str = ""
    changes: tuple[Change, ...] = ()
