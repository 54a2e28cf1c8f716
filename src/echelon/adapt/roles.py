"""Which loaders does a script train with, and which does it only evaluate with?

A loop over a loader trains if a backward pass runs in it. Roles travel from the parameter of a function to
what the function is called with, and from a variable to the one that it was assigned from.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from echelon.adapt.things import VIEWS, Binding, Things, Variable

Role = Literal["train", "evaluate"]
_TRAIN = ("train", "trn")
_EVALUATE = ("test", "val", "eval", "dev")


@dataclass(frozen=True, slots=True)
class LoaderLoop:
    """A loop over a loader, or the place where a batch is taken from one by hand."""

    node: ast.AST
    variables: tuple[Variable, ...]
    trains: bool

    @property
    def statement(self) -> ast.For | None:
        """The loop, if it is a `for` statement."""
        return self.node if isinstance(self.node, ast.For) else None


class Roles:
    """The loops of a script over its loaders, and what these are for."""

    def __init__(self, things: Things) -> None:
        self.things = things
        self.tree = things.tree

    @cached_property
    def loops(self) -> list[LoaderLoop]:
        """All loops over loaders."""
        found = []
        for node in self.tree.nodes:
            if isinstance(node, ast.For):
                variables = tuple(self._loaders_in(node.iter))
                found.append(LoaderLoop(node, variables, self.tree.trains(node)))
            elif isinstance(node, ast.comprehension):
                variables = tuple(self._loaders_in(node.iter))
                found.append(LoaderLoop(node, variables, False))
            elif isinstance(node, ast.Call) and self.tree.written(node.func) == "next" and node.args:
                variables = tuple(self._loaders_in(node.args[0]))
                around = self.tree.inside(node, ast.For, ast.While)
                if around is not None:
                    found.append(LoaderLoop(node, variables, self.tree.trains(around)))
        return [loop for loop in found if loop.variables]

    def _loaders_in(self, node: ast.expr) -> Iterator[Variable]:
        """The loaders that an expression iterates over: by name, or inside `enumerate`, `zip` and so on."""
        if isinstance(node, (ast.Name, ast.Attribute)):
            variable = self.things.find(node)
            if variable is not None and (variable.kind in ("loader", "view") or self._named_so(variable)):
                yield variable
        elif isinstance(node, ast.Call):
            for one in node.args:
                yield from self._loaders_in(one)

    def _named_so(self, variable: Variable) -> bool:
        """A parameter that is called a loader, if no call says what it is."""
        return variable.parameter and not variable.kind and "loader" in variable.name.lower()

    @cached_property
    def _roles(self) -> dict[Variable, set[Role]]:
        roles: dict[Variable, set[Role]] = {}
        for loop in self.loops:
            for variable in loop.variables:
                roles.setdefault(variable, set()).add("train" if loop.trains else "evaluate")
        edges = [*self.given(), *self.assigned()]
        for _ in range(8):
            for source, view in edges:
                roles.setdefault(source, set()).update(roles.get(view, set()))
        return roles

    def given(self) -> Iterator[tuple[Variable, Variable]]:
        """Each variable that is given to a parameter of a function, and the parameter."""
        for node in self.tree.nodes:
            if not isinstance(node, ast.Call):
                continue
            for function in self.tree.called(node):
                for name, value in self.tree.arguments(node, function).items():
                    parameter = self.things.named(name, function)
                    for variable in self._loaders_in(value):
                        if parameter is not None:
                            yield variable, parameter

    def assigned(self) -> Iterator[tuple[Variable, Variable]]:
        """Each variable that holds a loader, and another one that is assigned from it."""
        for view in self.things.variables:
            for binding in view.bindings:
                if binding.value is not None and self._is_alias(binding):
                    for source in self._loaders_in(binding.value):
                        yield source, view

    def _is_alias(self, binding: Binding) -> bool:
        value = binding.value
        if isinstance(value, ast.Call):
            return self.things.kind(value) == "view"
        return isinstance(value, (ast.Name, ast.Attribute))

    def unknown_data(self) -> ast.For | None:
        """A loop that trains on what something yields that is neither a loader nor a range of numbers."""
        for node in self.tree.nodes:
            if not isinstance(node, ast.For) or not self.tree.trains(node):
                continue
            inner = [one for one in self.tree.run_by(*node.body) if isinstance(one, ast.For)]
            if any(self.tree.trains(one) for one in inner) or list(self._loaders_in(node.iter)):
                continue
            if not self._counts(node.iter):
                return node
        return None

    def _counts(self, node: ast.expr) -> bool:
        """Whether an expression yields numbers: a range, also inside `enumerate` and so on."""
        name = self.tree.callee(node)
        if name in ("range", "itertools.count", "tqdm.trange"):
            return True
        return (
            isinstance(node, ast.Call) and name in VIEWS and all(self._counts(one) for one in node.args[:1])
        )

    def roles(self, variable: Variable) -> set[Role]:
        """What a loader is used for; by its name if no loop over it is found."""
        found = self._roles.get(variable, set())
        if found:
            return found
        name = variable.name.rpartition(".")[2].lower()
        if any(word in name for word in _TRAIN):
            return {"train"}
        return {"evaluate"} if any(word in name for word in _EVALUATE) else set()

    def trains(self, variable: Variable) -> bool:
        """Whether the script trains with a loader."""
        found = self.roles(variable)
        if found:
            return "train" in found
        made = [one for one in self.things.of_kind("loader") if one.bindings]
        return len(made) == 1 and made[0] is variable

    def batch_names(self, loop: LoaderLoop) -> list[str]:
        """The names of the tensors of a batch, as the loop unpacks them."""
        if loop.statement is None:
            return []
        target: ast.expr = loop.statement.target
        if self.tree.callee(loop.statement.iter) == "enumerate" and isinstance(target, ast.Tuple):
            target = target.elts[-1]
        return [node.id for node in ast.walk(target) if isinstance(node, ast.Name)]
