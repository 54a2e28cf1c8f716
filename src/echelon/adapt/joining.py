"""Where does a script join the run?

Before the first statement that makes something to prepare, seeds, or uses the session, also in a function
that it calls; directly after the options of the command line are read, if they are read before that.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

from echelon.adapt.changes import Change, Cut, Insert, Replace
from echelon.adapt.finding import ScriptFinding
from echelon.adapt.home import Home
from echelon.adapt.reading import Reading
from echelon.adapt.rules.seeds import SEEDS

RULE = "join"
_WHY = "the script becomes a worker of the run in which it is started, or a run of one worker"


def joining(reading: Reading, others: Iterable[ScriptFinding]) -> Iterator[ScriptFinding]:
    """The findings that import Echelon and join the run, if the others make or need a session."""
    made = [change for finding in others for change in finding.changes]
    if reading.session_variable is not None:
        if "echelon" not in reading.tree.imports and made:
            node = reading.last_import or reading.tree.module
            imported = reading.importing("echelon")
            yield reading.say(
                RULE, node, "change", "echelon is not imported", _WHY, "import echelon", imported
            )
        return
    if reading.home is None or not reading.needs_session(tuple(made)):
        return
    line = f"{reading.session} = echelon.join()"
    anchor = join_before(reading, reading.home, made)
    joins = Insert(anchor, line, "before")
    parsed = options_read(reading, reading.home, anchor)
    if parsed is not None:
        joins = Insert(parsed, line, "after")
    changes: tuple[Change, ...] = (*reading.importing("echelon"), joins)
    what = "the script is not part of a run"
    yield reading.say(RULE, parsed or anchor, "change", what, _WHY, f"import echelon, and {line}", changes)


def join_before(reading: Reading, home: Home, changes: Iterable[Change]) -> ast.stmt:
    """The statement of the home before which the script joins."""
    using = {node_of(change) for change in changes if reading.needs_session((change,))}
    makes = {binding.statement for variable in home.variables for binding in variable.bindings}
    for statement in home.block:
        if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            continue
        for node in reading.tree.run_by(statement):
            seeds = reading.tree.callee(node) in SEEDS
            if node in using or node in makes or seeds:
                return statement
    return home.first


def options_read(reading: Reading, home: Home, anchor: ast.stmt) -> ast.stmt | None:
    """The last statement of the home before another that parses the command line."""
    found = None
    for statement in home.block[: home.block.index(anchor)]:
        for node in reading.tree.executed(statement):
            method = (
                node.func.attr
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
                else ""
            )
            if method in ("parse_args", "parse_known_args"):
                found = statement
    return found


def too_early(reading: Reading, finding: ScriptFinding) -> bool:
    """Whether an edit uses the session in a function that also runs outside of the home, perhaps before."""
    home = reading.home
    if reading.session_variable is not None or home is None or not reading.needs_session(finding.changes):
        return False
    nodes = {node_of(change) for change in finding.changes if reading.needs_session((change,))}
    if not isinstance(home.scope, ast.Module) or all(
        reading.tree.scope(one) is home.scope for one in nodes
    ):
        return False
    for statement in reading.tree.module.body:
        definitions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        holds = any(one in home.block for one in ast.walk(statement))
        if isinstance(statement, definitions) or holds:
            continue
        if any(node in nodes for node in reading.tree.run_by(statement)):
            return True
    return False


def node_of(change: Change) -> ast.AST:
    """The node that a change is about."""
    if isinstance(change, Replace):
        return change.node
    return change.call if isinstance(change, Cut) else change.statement
