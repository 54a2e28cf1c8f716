"""Where in a script are model, optimizer and loader made, and where must they be prepared?

The home is the block of statements in which all of them are made: of the module, of its `__main__` part, of
a function. They are prepared after the last statement that makes or changes one of them, and before the
first that trains. Where this is not certain, `problem` says why, and nothing is edited.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from echelon.adapt.roles import Roles
from echelon.adapt.things import Binding, Things, Variable, declared_global
from echelon.adapt.tree import Function, Scope, ScriptTree, constant, keyword

_LEAVES = {"sys.exit", "exit", "quit", "os._exit"}


@dataclass(frozen=True, slots=True)
class PrepareCall:
    """Variables that one call of `prepare` takes, and the statement that it goes before or after."""

    names: tuple[str, ...]
    anchor: ast.stmt
    where: Literal["before", "after"] = "after"


@dataclass(slots=True)
class Home:
    """What a script trains, where it is made, and where it is to be prepared.

    strangers  loaders of training that are made elsewhere
    training   the first statement of the block that trains
    """

    scope: Scope
    block: list[ast.stmt]
    models: list[Variable] = field(default_factory=list)
    optimizers: list[Variable] = field(default_factory=list)
    loaders: list[Variable] = field(default_factory=list)
    strangers: list[Variable] = field(default_factory=list)
    training: ast.stmt | None = None
    calls: list[PrepareCall] = field(default_factory=list)
    problem: str = ""

    @property
    def variables(self) -> list[Variable]:
        """All that is prepared here, in the order of the call."""
        return [*self.models, *self.optimizers, *self.loaders]

    @property
    def first(self) -> ast.stmt:
        """The first statement of the block that is not its docstring."""
        begins = self.block[0]
        text = isinstance(begins, ast.Expr) and isinstance(constant(begins.value), str)
        return self.block[1] if text and len(self.block) > 1 else begins


def find_home(things: Things, roles: Roles) -> Home | None:
    """The home of what the script trains; None if it trains nothing that can be seen."""
    tree = things.tree
    makers = _made(things, things.of_kind("optimizer")) or [
        (variable, binding)
        for variable, binding in _made(things, things.of_kind("model"))
        if not _is_layer(tree, variable)
    ]
    scopes = list(dict.fromkeys(tree.scope(binding.statement) for _, binding in makers))
    if not scopes:
        return None
    home = Home(scope=scopes[0], block=scopes[0].body)
    if len(scopes) > 1:
        lines = ", ".join(str(binding.statement.lineno) for _, binding in makers)
        home.problem = f"models or optimizers are made in several functions (lines {lines})"
        return home
    home.optimizers = _unique(one for one, _ in makers if one.kind == "optimizer")
    home.models = _models(things, home.scope)
    home.loaders = _loaders(things, roles, home.scope)
    home.strangers = list(_strangers(things, roles, home))
    home.problem = _uncertain(things, roles, home, [binding for _, binding in makers])
    if not home.problem:
        _place(things, home)
    return home


def _uncertain(things: Things, roles: Roles, home: Home, makers: list[Binding]) -> str:
    """Why it is not certain what is trained; empty if it is."""
    if not home.models:
        return "no variable is certain to be the model"
    for binding in makers:
        if isinstance(binding.value, ast.Call) and things.unresolved(binding.value):
            line = binding.statement.lineno
            return f"line {line} optimizes parameters of something that is not a plain variable"
    if not home.loaders and not home.strangers:
        unknown = roles.unknown_data()
        if unknown is not None:
            line = unknown.lineno
            return f"line {line} trains on data that is not known to come from a loader in a variable"
    return ""


def _made(things: Things, variables: Iterable[Variable]) -> list[tuple[Variable, Binding]]:
    """The variables that get a new thing of their kind, not handed back to a caller in the script."""
    found = []
    for variable in variables:
        scope = variable.owner
        if isinstance(scope, (ast.FunctionDef, ast.AsyncFunctionDef)) and _hands_back(
            things, scope, variable
        ):
            continue
        for binding in variable.bindings:
            fresh = isinstance(binding.value, ast.Call) and things.bound_kind(binding) == variable.kind
            if fresh:
                found.append((variable, binding))
    return found


def _hands_back(things: Things, function: Function, variable: Variable) -> bool:
    tree = things.tree
    returned = any(
        isinstance(node, ast.Return) and node.value is not None and variable.name in _names(node.value)
        for node in tree.body(function)
    )
    return returned and bool(tree.callers(function))


def _names(node: ast.AST) -> set[str]:
    return {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}


def _is_layer(tree: ScriptTree, variable: Variable) -> bool:
    around = variable.owner if isinstance(variable.owner, ast.ClassDef) else None
    return around is not None and around.name in tree.modules


def _unique(variables: Iterable[Variable]) -> list[Variable]:
    return list(dict.fromkeys(variables))


def _belongs(things: Things, variable: Variable, scope: Scope) -> bool:
    """Whether a variable can be assigned in a scope without another declaration."""
    tree = things.tree
    if variable.owner is scope:
        return True
    if isinstance(variable.owner, ast.Module) and variable.name in declared_global(scope):
        return any(tree.scope(binding.statement) is scope for binding in variable.bindings)
    own = isinstance(variable.owner, ast.ClassDef) and bool(tree.method(scope))
    return own and tree.class_around(scope) is variable.owner


def _models(things: Things, scope: Scope) -> list[Variable]:
    """The models that optimizers of this scope update; without a link, the models that are here."""
    here = [one for one in things.of_kind("model") if _belongs(things, one, scope)]
    here = [one for one in here if not _is_layer(things.tree, one)]
    linked = _unique(model for model, _ in things.linked() if model in here)
    if linked:
        return linked
    received = [
        one
        for one in here
        if any(binding.index is not None or isinstance(binding.value, ast.Call) for binding in one.bindings)
    ]
    return received if len(received) == 1 or all(_unpacked(one) for one in received) else []


def _unpacked(variable: Variable) -> bool:
    return any(binding.index is not None for binding in variable.bindings)


def _loaders(things: Things, roles: Roles, scope: Scope) -> list[Variable]:
    """The loaders of this scope that the script trains with, or that were shared out by a sampler."""
    here = [
        one
        for one in things.variables
        if _belongs(things, one, scope)
        and (one.kind == "loader" or (one.parameter and not one.kind and "loader" in one.name.lower()))
    ]
    wanted = [one for one in here if roles.trains(one) or is_sampled(things, one)]
    sources = {
        things.find(binding.value)
        for one in wanted
        for binding in one.bindings
        if isinstance(binding.value, (ast.Name, ast.Attribute))
    }
    return [one for one in wanted if one not in sources]


def is_sampled(things: Things, variable: Variable) -> bool:
    """Whether a loader has a DistributedSampler."""
    for binding in variable.bindings:
        for call in ast.walk(binding.value) if binding.value is not None else ():
            if isinstance(call, ast.Call) and things.kind(call) == "loader":
                sampler = keyword(call, "sampler")
                if sampler is not None and things.kind(sampler.value) == "sampler":
                    return True
    return False


def _strangers(things: Things, roles: Roles, home: Home) -> Iterator[Variable]:
    """Loaders of training that are made elsewhere, and do not come to the home by a call."""
    if any(one.parameter or not _fresh(one) for one in home.loaders):
        return
    for variable, _ in _made(things, things.of_kind("loader")):
        if variable not in home.loaders and roles.trains(variable):
            yield variable


def _fresh(variable: Variable) -> bool:
    return any(isinstance(binding.value, ast.Call) for binding in variable.bindings)


# Placing -----------------------------------------------------------------------------------------


def _place(things: Things, home: Home) -> None:
    """Find the block, the statement that trains, and where `prepare` goes."""
    tree = things.tree
    statements = [
        binding.statement
        for variable in home.variables
        for binding in variable.bindings
        if tree.scope(binding.statement) is home.scope
    ]
    home.block = _common_block(tree, statements) if statements else home.scope.body
    home.problem = _repeated(tree, home)
    bound = {
        variable: [home.block.index(at) for at in _in_block(tree, home, variable)]
        for variable in home.variables
    }
    begun = max((min(places) for places in bound.values() if places), default=0)
    definitions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    trains = [
        index
        for index, one in enumerate(home.block)
        if index >= begun and not isinstance(one, definitions) and tree.trains(one)
    ]
    end = trains[0] if trains else len(home.block)
    home.training = home.block[end] if trains else None
    if any(end in places for places in bound.values()):
        home.problem = home.problem or "what is trained is made in the same statement as it is trained"
    last = max((at for places in bound.values() for at in places if at < end), default=-1)
    if not home.problem:
        home.calls = list(_calls(things, home, bound, last, end))


def _in_block(tree: ScriptTree, home: Home, variable: Variable) -> list[ast.stmt]:
    found = [tree.within(binding.statement, home.block) for binding in variable.bindings]
    return [one for one in found if one is not None]


def _common_block(tree: ScriptTree, statements: list[ast.stmt]) -> list[ast.stmt]:
    """The innermost block that holds all of these statements."""
    chains = []
    for statement in statements:
        outer = [one for one in tree.parents(statement) if isinstance(one, ast.stmt)]
        scope = tree.scope(statement)
        inner = [statement, *outer[: outer.index(scope) if isinstance(scope, ast.stmt) else None]]
        chains.append([tree.block(one) for one in reversed(inner)])
    common = chains[0][0]
    for level in zip(*chains, strict=False):
        if any(block is not level[0] for block in level):
            break
        common = level[0]
    return common


def _repeated(tree: ScriptTree, home: Home) -> str:
    """Why the block may run more than once; empty if it does not."""
    loop = tree.inside(home.block[0], ast.For, ast.While)
    if loop is not None:
        return f"model and optimizer are made inside the loop of line {loop.lineno}"  # type: ignore[attr-defined]
    if isinstance(home.scope, ast.Module):
        return ""
    calls = tree.callers(home.scope)
    if len(calls) > 1 or any(tree.inside(call, ast.For, ast.While) for call in calls):
        return f"{home.scope.name}() is called more than once"
    return ""


def _calls(
    things: Things, home: Home, bound: dict[Variable, list[int]], last: int, end: int
) -> Iterator[PrepareCall]:
    together, apart = [], []
    for variable in home.variables:
        places = [at for at in bound[variable] if at < end]
        if _depends(things, home, variable, places):
            apart += [
                PrepareCall((variable.name,), binding.statement)
                for binding in variable.bindings
                if things.bound_kind(binding) == variable.kind
            ]
        elif variable.kind == "loader" and places and _used_early(things, home, variable, places[-1], last):
            apart.append(PrepareCall((variable.name,), home.block[places[-1]]))
        else:
            together.append(variable.name)
    if together and last >= 0:
        yield PrepareCall(tuple(together), home.block[last])
    elif together:
        yield PrepareCall(tuple(together), home.first, "before")
    yield from apart


def _used_early(things: Things, home: Home, variable: Variable, made: int, last: int) -> bool:
    """Whether something keeps the loader before `prepare` has replaced it; `next(iter(x))` does not."""
    tree = things.tree
    for statement in home.block[made + 1 : last + 1]:
        for use in tree.uses(variable.name, tree.executed(statement)):
            outer = list(tree.parents(use))[:2]
            # Without its DistributedSampler a loader is longer until it is prepared.
            counted = tree.callee(outer[0]) == "len" and not is_sampled(things, variable)
            if isinstance(outer[0], ast.Attribute) or counted:
                continue
            if tree.callee(outer[0]) == "iter" and tree.callee(outer[1]) == "next":
                continue
            return True
    return False


def _depends(things: Things, home: Home, variable: Variable, places: list[int]) -> bool:
    """Whether a variable is made, and used, under a condition only."""
    tree = things.tree
    if not places or any(_always(things, home.block[at], variable) for at in places):
        return False
    tests = {_test(tree, binding.statement) for binding in variable.bindings}
    reads = [
        use
        for use in tree.uses(variable.name)
        if things.find(use) is variable and tree.within(use, [home.block[at] for at in places]) is None
    ]
    return len(tests) == 1 and all(_test(tree, use) in tests for use in reads)


def _test(tree: ScriptTree, node: ast.AST) -> str:
    """The condition under which a node runs, as it is written."""
    around = tree.inside(node, ast.If)
    return ast.dump(around.test) if isinstance(around, ast.If) else ""


def _always(things: Things, statement: ast.stmt, variable: Variable) -> bool:
    """Whether a statement binds a variable whichever way it goes."""
    if any(binding.statement is statement for binding in variable.bindings):
        return True
    if isinstance(statement, ast.If):
        ways = [statement.body, statement.orelse]
        return all(_leaves(things.tree, way) or _binds(things, way, variable) for way in ways)
    if isinstance(statement, (ast.With, ast.Try)):
        return _binds(things, statement.body, variable)
    return False


def _binds(things: Things, block: list[ast.stmt], variable: Variable) -> bool:
    return any(_always(things, one, variable) for one in block)


def _leaves(tree: ScriptTree, block: list[ast.stmt]) -> bool:
    """Whether a block ends the function or the script."""
    if not block:
        return False
    end = block[-1]
    call = end.value if isinstance(end, ast.Expr) else None
    return isinstance(end, (ast.Raise, ast.Return)) or (call is not None and tree.callee(call) in _LEAVES)
