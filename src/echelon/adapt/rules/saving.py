"""Lets one worker write what all workers would write to the same file."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from echelon.adapt.changes import Enclose, Insert
from echelon.adapt.finding import FindingLevel, ScriptFinding
from echelon.adapt.ranks import only_guarded
from echelon.adapt.reading import Reading
from echelon.adapt.rewrite import alone
from echelon.adapt.rule import AdaptRule


@dataclass(frozen=True, slots=True, kw_only=True)
class Saving(AdaptRule):
    """A torch.save by all workers to one path, and a torch.load of what one of them wrote."""

    name: ClassVar[str] = "saving"

    def look(self, reading: Reading) -> Iterator[ScriptFinding]:
        """One finding per call."""
        if not reading.trains:
            return
        saves = list(reading.tree.calls("torch.save"))
        open_ = [call for call in saves if not only_guarded(reading.tree, call)]
        for run in _runs(reading, open_):
            yield self._saved(reading, run)
        paths = {_path(reading, call, 1) for call in saves} - {""}
        for call in reading.tree.calls("torch.load"):
            written = [one for one in saves if one.lineno < call.lineno]
            if written and _path(reading, call, 0) in paths and not _resumes(reading, call):
                yield from self._loaded(reading, call)

    def _saved(self, reading: Reading, run: list[ast.Call]) -> ScriptFinding:
        """Calls on neighbouring lines get one condition."""
        what = "all workers write the same file"
        why = "one can be written while another worker reads or writes it"
        header = f"if {reading.session}.is_leader:"
        fix = (
            f"{header} torch.save(...); {reading.session}.save(folder) also keeps the position in the data"
        )
        statements = [_statement(reading, call) for call in run]
        moves = [
            Enclose(statement, "" if at else header)
            for at, statement in enumerate(statements)
            if statement is not None
        ]
        level: FindingLevel = "change" if moves else "check"
        return reading.say(self.name, run[0], level, what, why, fix, tuple(moves))

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


def _runs(reading: Reading, calls: list[ast.Call]) -> list[list[ast.Call]]:
    """The calls, with those on neighbouring lines together."""
    runs: list[list[ast.Call]] = []
    above: ast.stmt | None = None
    for call in sorted(calls, key=lambda one: one.lineno):
        statement = _statement(reading, call)
        near = (
            above is not None
            and statement is not None
            and reading.tree.block(statement) is reading.tree.block(above)
            and statement.lineno == (above.end_lineno or 0) + 1
        )
        runs = [*runs[:-1], [*runs[-1], call]] if near else [*runs, [call]]
        above = statement
    return runs


def _statement(reading: Reading, call: ast.Call) -> ast.stmt | None:
    """The statement to put under a condition: the call, or the opening of the file that it writes."""
    opened = _opened(reading, call)
    if opened is None:
        return alone(reading.tree, call)
    return opened if [alone(reading.tree, call)] == opened.body else None


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
