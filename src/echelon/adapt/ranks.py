"""Does a part of a script run on one worker only?"""

from __future__ import annotations

import ast

from echelon.adapt.tree import ScriptTree

RANKS = {
    "rank",
    "local_rank",
    "global_rank",
    "ddp_rank",
    "ddp_local_rank",
    "process_index",
    "get_rank",
    "gpu_id",
}
LEADERS = {
    "is_leader", "is_main_process", "is_local_main_process", "is_global_zero", "master_process",
    "main_process", "is_master", "is_rank_zero", "is_main",
}  # fmt: skip


def names_rank(node: ast.AST) -> bool:
    """Whether an expression depends on which worker this is."""
    for one in ast.walk(node):
        last = one.attr if isinstance(one, ast.Attribute) else one.id if isinstance(one, ast.Name) else ""
        if last in RANKS | LEADERS:
            return True
        if isinstance(one, ast.Constant) and one.value in ("RANK", "LOCAL_RANK"):
            return True
    return False


def rank_guard(tree: ScriptTree, node: ast.AST) -> ast.If | None:
    """The `if` on the rank around a node, in the same function."""
    inner = node
    for outer in tree.parents(node):
        if isinstance(outer, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            return None
        if isinstance(outer, ast.If) and inner is not outer.test and names_rank(outer.test):
            return outer
        inner = outer
    return None


def only_guarded(tree: ScriptTree, node: ast.AST) -> bool:
    """Whether a node runs under an `if` on the rank, here or wherever its function is called."""
    if rank_guard(tree, node) is not None:
        return True
    scope = tree.scope(node)
    if isinstance(scope, ast.Module):
        return False
    calls = tree.callers(scope)
    return bool(calls) and all(rank_guard(tree, call) is not None for call in calls)
