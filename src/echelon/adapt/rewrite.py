"""Small edits that several rules make."""

from __future__ import annotations

import ast

from echelon.adapt.changes import Replace
from echelon.adapt.text import ScriptText
from echelon.adapt.tree import ScriptTree


def add_argument(text: ScriptText, call: ast.Call, argument: str) -> Replace:
    """Append an argument to a call."""
    given: list[ast.expr | ast.keyword] = [*call.args, *call.keywords]
    if not given:
        return Replace(call, f"{text.of(call.func)}({argument})")
    last = max(given, key=lambda one: text.span(one)[1])
    return Replace(last, f"{text.of(last)}, {argument}")


def alone(tree: ScriptTree, call: ast.Call) -> ast.Expr | None:
    """The statement that is nothing but this call."""
    statement = tree.statement(call)
    return statement if isinstance(statement, ast.Expr) and statement.value is call else None


def braced(text: ScriptText, node: ast.expr) -> str:
    """The source of an expression, in brackets if a method cannot be called on it as it is."""
    plain = isinstance(node, (ast.Name, ast.Attribute, ast.Call, ast.Subscript))
    return text.of(node) if plain else f"({text.of(node)})"
