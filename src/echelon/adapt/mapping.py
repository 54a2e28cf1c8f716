"""How is a script of another library turned into one of the session?

The session keeps the name that the script has for the other library's object, `accelerator` or `fabric`, so
that functions that get it as an argument need no change. Each attribute of that object has an entry: it is
the same for the session, has another name there, is written in another way, or is for a person to decide.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from echelon.adapt.changes import Change, Remove, Replace
from echelon.adapt.finding import ScriptFinding
from echelon.adapt.reading import Reading
from echelon.adapt.rewrite import add_argument, alone
from echelon.adapt.tree import keyword

_NOTHING = "leave it out, or write it without the library"
Rewrite = Callable[[Reading, ast.Call], str]  # the new text of a call; empty if a person must do it


@dataclass(frozen=True, slots=True, kw_only=True)
class Equivalent:
    """What the session has instead of an attribute of another library's object.

    name     another name for it; empty if it has the same
    rewrite  writes a call of it in another way
    gone     the statement is not needed
    hand     what a person should write; with `rewrite`, if that gives up
    """

    name: str = ""
    rewrite: Rewrite | None = None
    gone: bool = False
    hand: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Library:
    """Another library: what makes its object, its attributes, and the options that mean something else."""

    rule: str
    title: str
    makers: frozenset[str]
    attributes: Mapping[str, Equivalent]
    options: Mapping[str, str]
    loaders: frozenset[str]


def mapped(reading: Reading, library: Library) -> Iterator[ScriptFinding]:
    """The findings that turn a script of this library into one of the session."""
    for call in reading.tree.calls(*library.makers):
        yield from _made(reading, library, call)
    for node in reading.tree.nodes:
        if isinstance(node, ast.Attribute) and reading.is_session(node.value):
            yield from _attribute(reading, library, node)
    yield from _imports(reading, library)


def _made(reading: Reading, library: Library, call: ast.Call) -> Iterator[ScriptFinding]:
    what = f"{reading.source(call.func)}() makes the workers known to {library.title}"
    why = f"the session takes its place, and keeps the name {reading.session}"
    fix = f"{reading.session} = echelon.join()"
    changes: tuple[Change, ...] = (Replace(call, "echelon.join()"),)
    if reading.session_variable is None:
        yield reading.say(library.rule, call, "check", what, why, "assign it to a variable")
        return
    yield reading.say(library.rule, call, "change", what, why, fix, changes)
    for one in call.keywords:
        off = isinstance(one.value, ast.Constant) and one.value.value in (None, "no", "32-true", 1, False)
        hand = library.options.get(one.arg or "", "").format(session=reading.session)
        if hand and not off:
            said = f"{reading.source(one)} is an option of {library.title}"
            yield reading.say(library.rule, call, "check", said, "the session has no such option", hand)


def _attribute(reading: Reading, library: Library, node: ast.Attribute) -> Iterator[ScriptFinding]:
    entry = library.attributes.get(node.attr)
    outer = next(reading.tree.parents(node))
    call = outer if isinstance(outer, ast.Call) and outer.func is node else None
    what = f"{reading.source(node)} is of {library.title}"
    if entry is None or (entry.rewrite is not None and call is None):
        hand = entry.hand.format(session=reading.session) if entry is not None else _NOTHING
        yield reading.say(library.rule, node, "check", what, "the session has no such attribute", hand)
        return
    why = f"the session has this instead of {library.title}'s"
    changes, fix = _changes(reading, library, entry, node, call)
    if changes:
        yield reading.say(library.rule, node, "change", what, why, fix, changes)
    elif entry.hand and (entry.rewrite is not None or not entry.name):
        yield reading.say(
            library.rule, node, "check", what, why, entry.hand.format(session=reading.session)
        )


def _changes(
    reading: Reading, library: Library, entry: Equivalent, node: ast.Attribute, call: ast.Call | None
) -> tuple[tuple[Change, ...], str]:
    base = reading.text.of(node.value)
    if entry.gone:
        statement = alone(reading.tree, call) if call is not None else None
        return ((Remove(statement),), "left out") if statement is not None else ((), "")
    if entry.rewrite is not None and call is not None:
        new = entry.rewrite(reading, call)
        if not new or new == reading.text.of(call):
            return (), ""
        return (Replace(call, new),), new
    changes: list[Change] = []
    if entry.name and entry.name != node.attr:
        changes.append(Replace(node, f"{base}.{entry.name}"))
    if call is not None and node.attr in library.loaders and _has_loader(reading, call):
        changes.append(add_argument(reading.text, call, 'batch="per-worker"'))
    fix = f"{base}.{entry.name or node.attr}"
    return tuple(changes), fix + ('(..., batch="per-worker")' if len(changes) > bool(entry.name) else "")


def _has_loader(reading: Reading, call: ast.Call) -> bool:
    if keyword(call, "batch") is not None:
        return False
    names = [reading.tree.written(one).lower() for one in call.args]
    kinds = [reading.things.kind(one) for one in call.args]
    return "loader" in kinds or any("loader" in name for name in names)


def _imports(reading: Reading, library: Library) -> Iterator[ScriptFinding]:
    """Takes the maker's name out of the imports, if nothing else uses it."""
    used = [node.id for node in reading.tree.nodes if isinstance(node, ast.Name)]
    made = [
        reading.tree.written(call.func).partition(".")[0] for call in reading.tree.calls(*library.makers)
    ]
    for statement in reading.tree.nodes:
        if not isinstance(statement, (ast.Import, ast.ImportFrom)):
            continue
        names = [alias.asname or alias.name.partition(".")[0] for alias in statement.names]
        gone = [name for name in names if name in made and used.count(name) == made.count(name)]
        if not gone:
            continue
        left = [alias for alias, name in zip(statement.names, names, strict=True) if name not in gone]
        words = ", ".join(f"{one.name} as {one.asname}" if one.asname else one.name for one in left)
        begins = f"from {statement.module} import" if isinstance(statement, ast.ImportFrom) else "import"
        change: Change = Replace(statement, f"{begins} {words}") if left else Remove(statement)
        what = f"{gone[0]} is imported"
        why = "nothing uses it any more"
        yield reading.say(library.rule, statement, "change", what, why, "left out", (change,))
