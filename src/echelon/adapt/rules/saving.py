"""Lets one worker write what all workers would write to the same file."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from echelon.adapt.changes import Enclose, Insert
from echelon.adapt.finding import ScriptFinding
from echelon.adapt.ranks import only_guarded
from echelon.adapt.reading import Reading
from echelon.adapt.rewrite import alone
from echelon.adapt.rule import AdaptRule


@dataclass(frozen=True, slots=True, kw_only=True)
class Saving(AdaptRule):
    """torch.save by all workers to one path, and torch.load of what one of them wrote."""

    name: ClassVar[str] = "saving"

    def look(self, reading: Reading) -> Iterator[ScriptFinding]:
        """One finding per call."""
        if not reading.trains:
            return
        saves = list(reading.tree.calls("torch.save"))
        above: set[ast.stmt] = set()
        for call in saves:
            if not only_guarded(reading.tree, call):
                yield self._saved(reading, call, above)
        paths = {_path(reading, call, 1) for call in saves} - {""}
        for call in reading.tree.calls("torch.load"):
            written = [one for one in saves if one.lineno < call.lineno]
            if written and _path(reading, call, 0) in paths and not _resumes(reading, call):
                yield from self._loaded(reading, call)

    def _saved(self, reading: Reading, call: ast.Call, above: set[ast.stmt]) -> ScriptFinding:
        """The finding; `above` are the statements that have moved under a condition already."""
        what = "all workers write the same file"
        why = "one can be written while another worker reads or writes it"
        header = f"if {reading.session}.is_leader:"
        statement: ast.stmt | None = alone(reading.tree, call)
        opened = _opened(reading, call)
        if opened is not None and [alone(reading.tree, call)] == opened.body:
            statement = opened
        elif opened is not None:
            statement = None
        fix = (
            f"{header} torch.save(...); {reading.session}.save(folder) also keeps the position in the data"
        )
        if statement is None:
            return reading.say(self.name, call, "check", what, why, fix)
        block = reading.tree.block(statement)
        follows = block.index(statement) > 0 and block[block.index(statement) - 1] in above
        near = follows and not _apart(reading, block[block.index(statement) - 1], statement)
        above.add(statement)
        move = Enclose(statement, "" if near else header)
        return reading.say(self.name, call, "change", what, why, fix, (move,))

    def _loaded(self, reading: Reading, call: ast.Call) -> Iterator[ScriptFinding]:
        statement = reading.tree.statement(_opened(reading, call) or call)
        line = f"{reading.session}.barrier()"
        block = reading.tree.block(statement)
        above = block[block.index(statement) - 1] if block.index(statement) else None
        if above is not None and reading.text.of(above) == line:
            return
        what = "a file is read that the leader has just written"
        why = "the other workers may come here before it is complete"
        fix = f"{line} before it"
        home = reading.home
        if home is not None and statement in home.block:
            wait = Insert(statement, line, "before")
            yield reading.say(self.name, call, "change", what, why, fix, (wait,))
        else:
            yield reading.say(self.name, call, "check", what, why, fix)


def _apart(reading: Reading, above: ast.stmt, statement: ast.stmt) -> bool:
    """Whether comments or empty lines are between two statements."""
    return reading.text.first_line(statement) != (above.end_lineno or 0) + 1


def _opened(reading: Reading, call: ast.Call) -> ast.With | None:
    """The `with open(...) as file` whose file a call reads or writes."""
    for given in call.args[:2]:
        if isinstance(given, ast.Name):
            for outer in reading.tree.parents(call):
                if isinstance(outer, ast.With) and any(
                    isinstance(item.optional_vars, ast.Name) and item.optional_vars.id == given.id
                    for item in outer.items
                ):
                    return outer
    return None


def _path(reading: Reading, call: ast.Call, place: int) -> str:
    """The path that is read or written, as it is written in the script; also that of an opened file."""
    opened = _opened(reading, call)
    if opened is not None:
        made = opened.items[0].context_expr
        return ast.dump(made.args[0]) if isinstance(made, ast.Call) and made.args else ""
    return ast.dump(call.args[place]) if len(call.args) > place else ""


def _resumes(reading: Reading, call: ast.Call) -> bool:
    """Whether a file of an earlier run is read: under a condition."""
    return reading.tree.inside(call, ast.If) is not None
