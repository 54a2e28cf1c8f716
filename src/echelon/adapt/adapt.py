"""Which lines of a training script change for several workers, and why? Text in, findings and text out.

The script is read, never imported or run. Where a rule is not certain it makes no edit and says so: a wrong
edit is worse than none.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, replace

from echelon.adapt.changes import Changes
from echelon.adapt.finding import ScriptFinding
from echelon.adapt.joining import RULE, joining, too_early
from echelon.adapt.reading import JOIN, Reading
from echelon.adapt.rule import RULES
from echelon.adapt.text import ScriptText
from echelon.adapt.tree import ScriptTree
from echelon.errors import ConfigError

# Half an edit would train, and not as it should: without prepare every worker trains the whole job.
_NEEDED = (RULE, "prepare", "own-loop", "divided")
_PARTLY = "the training cannot be prepared by an edit"
_EARLY = "it also runs before the session is there"
_TANGLED = "other code or another edit is on the same line"
_BROKEN = "the edits together would not run"  # never seen; a user must not be the first to see it


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapted:
    """What was found in a script, by line, and its text with all edits made."""

    before: ScriptText
    findings: tuple[ScriptFinding, ...]
    text: str

    @property
    def changed(self) -> bool:
        """Whether there is anything to write."""
        return self.text != self.before.text

    @property
    def needs_a_person(self) -> bool:
        """Whether some finding is not settled by the edits."""
        return any(finding.level == "check" for finding in self.findings)


def adapt(text: ScriptText, *, where: str) -> Adapted:
    """Read a script and edit it. One that is not Python is a ConfigError that names the line."""
    _check(text, where)
    try:
        reading = Reading(text)
        found = [one for name in RULES.names() for one in RULES.get(name)().look(reading)]
    except RecursionError:
        raise _unreadable("its expressions are nested too deeply", where) from None
    found = [_by_hand(one, _EARLY) if too_early(reading, one) else one for one in found]
    changes = Changes(text)
    made = [_made(one, changes) for one in sorted(found, key=lambda one: one.line)]
    made += [_made(one, changes) for one in joining(reading, made)]
    new = changes.text()
    reason = "" if _holds(new, reading.session) else _BROKEN
    if any(one.rule in _NEEDED and one.level == "check" for one in made):
        reason = _PARTLY
    if reason:
        made = [_by_hand(one, reason) if one.level == "change" else one for one in made]
        new = text.text
    findings = tuple(sorted(made, key=lambda one: (one.line, one.rule)))
    return Adapted(before=text, findings=findings, text=new)


def _made(finding: ScriptFinding, changes: Changes) -> ScriptFinding:
    """The finding, with its edit if that can be made together with the others."""
    if changes.add(finding.changes):
        return finding
    return _by_hand(finding, _TANGLED)


def _by_hand(finding: ScriptFinding, reason: str) -> ScriptFinding:
    """The finding without its edit."""
    fix = f"{finding.fix} (not edited: {reason})" if finding.fix else reason
    return replace(finding, level="check", fix=fix, changes=())


def _check(text: ScriptText, where: str) -> None:
    try:
        _ = text.tree
    except SyntaxError as error:
        raise ConfigError(
            f"the script is not valid Python: {error.msg}",
            where=f"{where}, line {error.lineno}",
            fix="correct it first: python -m py_compile shows the place",
        ) from error
    except (ValueError, RecursionError, MemoryError) as error:  # null bytes, nesting beyond the parser
        raise _unreadable(str(error), where) from error


def _unreadable(reason: str, where: str) -> ConfigError:
    return ConfigError(f"the script cannot be read: {reason}", where=where, fix="is it a Python script?")


def _holds(text: str, session: str) -> bool:
    """Whether an edited text is Python, and makes the session before it uses it."""
    try:
        tree = ScriptTree(ScriptText(text))
    except (SyntaxError, ValueError):
        return False
    made = [node for node in tree.nodes if isinstance(node, ast.Assign) and tree.callee(node.value) == JOIN]
    for scope in {tree.scope(node) for node in made}:
        first = min(node.lineno for node in made if tree.scope(node) is scope)
        if any(use.lineno < first for use in tree.uses(session) if tree.scope(use) is scope):
            return False
    return True
