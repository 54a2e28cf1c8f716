"""What does a script call, where does a name come from, and what runs when a statement runs?

The script is only read. Names are resolved through its imports; calls are followed into the functions and
classes that it defines itself.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from functools import cached_property

from echelon.adapt.text import ScriptText

Function = ast.FunctionDef | ast.AsyncFunctionDef
Scope = ast.Module | ast.FunctionDef | ast.AsyncFunctionDef
_STARRED = {
    "torch.utils.data": {"DataLoader": "torch.utils.data.DataLoader"},
    "torch.optim": {name: f"torch.optim.{name}" for name in ("SGD", "Adam", "AdamW", "LBFGS")},
}
_BLOCKS = ("body", "orelse", "finalbody")


class ScriptTree:
    """A script's syntax tree with the questions that rules ask of it."""

    def __init__(self, text: ScriptText) -> None:
        self.text = text
        self.module = text.tree
        self._parents: dict[ast.AST, ast.AST] = {}
        self._called: dict[ast.Call, list[Function]] = {}
        self._trains: dict[ast.AST, bool] = {}
        self.nodes: list[ast.AST] = []
        for node in ast.walk(self.module):
            self.nodes.append(node)
            for child in ast.iter_child_nodes(node):
                self._parents[child] = node

    # Where a node is -----------------------------------------------------------------------------

    def parents(self, node: ast.AST) -> Iterator[ast.AST]:
        """The nodes around a node, from the inside out."""
        while node in self._parents:
            node = self._parents[node]
            yield node

    def statement(self, node: ast.AST) -> ast.stmt:
        """The innermost statement that holds a node."""
        if isinstance(node, ast.stmt):
            return node
        return next(one for one in self.parents(node) if isinstance(one, ast.stmt))

    def scope(self, node: ast.AST) -> Scope:
        """The function in whose body a node is, or the module."""
        return next(
            one
            for one in self.parents(node)
            if isinstance(one, (ast.Module, ast.FunctionDef, ast.AsyncFunctionDef))
        )

    def scopes(self, node: ast.AST) -> list[Scope]:
        """The functions around a node, from the inside out, and the module."""
        kinds = (ast.Module, ast.FunctionDef, ast.AsyncFunctionDef)
        return [one for one in self.parents(node) if isinstance(one, kinds)]

    def defines(self, node: ast.AST) -> bool:
        """Whether a node runs when a class or function is defined: an attribute, a default, a decorator."""
        inner = node
        for outer in self.parents(node):
            if isinstance(outer, ast.ClassDef):
                return True
            if isinstance(outer, (ast.FunctionDef, ast.AsyncFunctionDef)):
                return inner not in outer.body
            inner = outer
        return False

    def class_around(self, node: ast.AST) -> ast.ClassDef | None:
        """The class in whose body a node is."""
        return next((one for one in self.parents(node) if isinstance(one, ast.ClassDef)), None)

    def method(self, scope: Scope) -> str:
        """The name of the object if a function is a method: usually `self`."""
        if isinstance(scope, ast.Module) or not isinstance(self._parents[scope], ast.ClassDef):
            return ""
        if any(self.name(one) in ("staticmethod", "classmethod") for one in scope.decorator_list):
            return ""
        return scope.args.args[0].arg if scope.args.args else ""

    def block(self, statement: ast.stmt) -> list[ast.stmt]:
        """The list of statements that a statement is in."""
        parent = self._parents[statement]
        for field in _BLOCKS:
            block = getattr(parent, field, None)
            if isinstance(block, list) and statement in block:
                return block
        return [statement]  # the body of a lambda, a case of a match: never edited

    def within(self, node: ast.AST, block: list[ast.stmt]) -> ast.stmt | None:
        """The statement of a block that a node is, or is in."""
        for one in (node, *self.parents(node)):
            if isinstance(one, ast.stmt) and one in block:
                return one
        return None

    def inside(self, node: ast.AST, *kinds: type[ast.AST]) -> ast.AST | None:
        """The innermost node of these kinds around a node, in the same function."""
        for one in self.parents(node):
            if isinstance(one, kinds):
                return one
            if isinstance(one, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
                return None
        return None

    # What it is called ---------------------------------------------------------------------------

    @cached_property
    def imports(self) -> dict[str, str]:
        """What each imported name stands for: `F` for `torch.nn.functional`."""
        found = {}
        for node in self.nodes:
            if isinstance(node, ast.Import):
                for alias in node.names:
                    root = alias.name.partition(".")[0]
                    found[alias.asname or root] = alias.name if alias.asname else root
            elif isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    whole = f"{'.' * node.level}{node.module or ''}.{alias.name}"
                    found[alias.asname or alias.name] = whole
                    if alias.name == "*":
                        found |= _STARRED.get(node.module or "", {})
        return found

    def written(self, node: ast.AST) -> str:
        """A name with dots as it is written, `self.model`; empty for other expressions."""
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""

    def name(self, node: ast.AST) -> str:
        """What a name with dots stands for: `torch.optim.SGD` for `optim.SGD`."""
        root, dot, rest = self.written(node).partition(".")
        return f"{self.imports.get(root, root)}{dot}{rest}"

    def callee(self, node: ast.AST) -> str:
        """What a call calls, by its full name; empty if the node is no call of a name."""
        return self.name(node.func) if isinstance(node, ast.Call) else ""

    def calls(self, *names: str) -> Iterator[ast.Call]:
        """All calls of functions with these full names."""
        for node in self.nodes:
            if isinstance(node, ast.Call) and self.name(node.func) in names:
                yield node

    def uses(self, name: str, where: Iterable[ast.AST] | None = None) -> Iterator[ast.expr]:
        """Where a name with dots is read."""
        for node in self.nodes if where is None else where:
            if isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Load):
                outer = self._parents.get(node)
                whole = not (isinstance(node, ast.Name) and "." in name)
                if whole and self.written(node) == name and outer is not None:
                    yield node

    # What it runs --------------------------------------------------------------------------------

    @cached_property
    def functions(self) -> dict[str, list[Function]]:
        """The functions of the script that are not methods, by name."""
        found: dict[str, list[Function]] = {}
        for node in self.nodes:
            if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                continue
            if not isinstance(self._parents[node], ast.ClassDef):
                found.setdefault(node.name, []).append(node)
        return found

    @cached_property
    def classes(self) -> dict[str, ast.ClassDef]:
        """The classes of the script, by name."""
        return {node.name: node for node in self.nodes if isinstance(node, ast.ClassDef)}

    @cached_property
    def modules(self) -> set[str]:
        """The classes of the script that are torch modules."""
        found: set[str] = set()
        for _ in range(4):  # classes that derive from each other
            for name, node in self.classes.items():
                bases = {self.name(base) for base in node.bases}
                if bases & (found | {"torch.nn.Module", "torch.nn.Sequential"}):
                    found.add(name)
        return found

    @cached_property
    def _instances(self) -> dict[str, ast.ClassDef]:
        """Which class of the script a variable is an object of, by the variable's name."""
        found = {}
        for node in self.nodes:
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
                made = self._class_of(node.value)
                for target in node.targets:
                    if made is not None and self.written(target):
                        found[self.written(target)] = made
        return found

    def _class_of(self, call: ast.Call) -> ast.ClassDef | None:
        """The class whose object a call makes, also in `Net().to(device)`."""
        func: ast.expr = call
        while isinstance(func, ast.Call) or (isinstance(func, ast.Attribute) and not self.written(func)):
            func = func.func if isinstance(func, ast.Call) else func.value
        return self.classes.get(self.written(func))

    def methods(self, node: ast.ClassDef, name: str) -> list[Function]:
        """The method of that name."""
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
        return [one for one in node.body if isinstance(one, kinds) and one.name == name]

    def called(self, call: ast.Call) -> list[Function]:
        """The functions of the script that a call runs, also if they are given to it as arguments."""
        if call not in self._called:
            self._called[call] = self._find_called(call)
        return self._called[call]

    def _find_called(self, call: ast.Call) -> list[Function]:
        found: list[Function] = []
        for argument in [*call.args, *(one.value for one in call.keywords)]:
            if isinstance(argument, ast.Name):
                found += self.functions.get(argument.id, [])
        written = self.written(call.func)
        if written in self.functions:
            return found + self.functions[written]
        if written in self.classes:
            return found + self.methods(self.classes[written], "__init__")
        if written in self._instances:
            return found + self.methods(self._instances[written], "forward")
        if isinstance(call.func, ast.Attribute):
            owner = self._owner(call.func.value)
            if owner is not None:
                found += self.methods(owner, call.func.attr)
        return found

    def _owner(self, node: ast.expr) -> ast.ClassDef | None:
        if isinstance(node, ast.Call):
            return self._class_of(node)
        written = self.written(node)
        scope = self.scope(node)
        if written and written == self.method(scope):
            return self.class_around(node)
        return self._instances.get(written)

    def executed(self, node: ast.AST) -> Iterator[ast.AST]:
        """The nodes that run when a node runs: not the bodies of functions and classes defined in it."""
        inner = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)
        waiting = [node]
        while waiting:
            one = waiting.pop()
            yield one
            if not isinstance(one, inner):
                waiting += reversed(list(ast.iter_child_nodes(one)))

    def body(self, function: Function) -> Iterator[ast.AST]:
        """The nodes that run when a function is called."""
        for statement in function.body:
            yield from self.executed(statement)

    def run_by(self, *starts: ast.AST) -> Iterator[ast.AST]:
        """The nodes that run when these nodes run, also in functions of the script that they call."""
        seen: set[ast.AST] = set()
        waiting = [list(self.executed(start)) for start in starts]
        while waiting:
            for node in waiting.pop():
                yield node
                if isinstance(node, ast.Call):
                    for function in self.called(node):
                        if function not in seen:
                            seen.add(function)
                            waiting.append(list(self.body(function)))

    def trains(self, start: ast.AST) -> bool:
        """Whether a backward pass runs when a node runs."""
        if start not in self._trains:
            self._trains[start] = any(is_backward(node) for node in self.run_by(start))
        return self._trains[start]

    def callers(self, function: Function) -> list[ast.Call]:
        """The calls that run a function by its name."""
        return self._callers.get(function, [])

    @cached_property
    def _callers(self) -> dict[Function, list[ast.Call]]:
        found: dict[Function, list[ast.Call]] = {}
        for node in self.nodes:
            for function in self.called(node) if isinstance(node, ast.Call) else ():
                if isinstance(node, ast.Call) and not self._is_given(node, function):
                    found.setdefault(function, []).append(node)
        return found

    def _is_given(self, call: ast.Call, function: Function) -> bool:
        """Whether the call only gets the function as an argument."""
        return self.written(call.func).rpartition(".")[2] not in (function.name, self._made_by(function))

    def _made_by(self, function: Function) -> str:
        around = self.class_around(function)
        return around.name if around is not None and function.name == "__init__" else function.name

    def arguments(self, call: ast.Call, function: Function) -> dict[str, ast.expr]:
        """Which expression each parameter of a function gets in a call of it."""
        names = [one.arg for one in [*function.args.posonlyargs, *function.args.args]]
        if self.method(function):
            names = names[1:]
        plain = [one for one in call.args if not isinstance(one, ast.Starred)]
        given = dict(zip(names, plain, strict=False)) if len(plain) == len(call.args) else {}
        return given | {one.arg: one.value for one in call.keywords if one.arg is not None}


def is_backward(node: ast.AST) -> bool:
    """Whether a node is a call of `backward`."""
    return (
        isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "backward"
    )


def keyword(call: ast.Call, name: str) -> ast.keyword | None:
    """A call's argument of that name."""
    return next((one for one in call.keywords if one.arg == name), None)


def constant(node: ast.AST | None) -> object:
    """The value of a constant; None for all else."""
    return node.value if isinstance(node, ast.Constant) else None
