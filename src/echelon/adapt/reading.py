"""What is known about a script when the rules look at it?

Which libraries it uses to train on several workers, what it trains and where, under which name the session
is or will be known, and where that name can be seen.
"""

from __future__ import annotations

import ast
from functools import cached_property
from typing import Literal

from echelon.adapt.changes import Change, Insert
from echelon.adapt.finding import FindingLevel, ScriptFinding
from echelon.adapt.home import Home, find_home
from echelon.adapt.losses import LossTerm, LossTerms
from echelon.adapt.roles import LoaderLoop, Roles
from echelon.adapt.text import ScriptText
from echelon.adapt.things import DISTRIBUTED, SAMPLERS, Things, Variable
from echelon.adapt.tree import Scope, ScriptTree, is_backward

Flavour = Literal["plain", "ddp", "accelerate", "fabric", "echelon"]

JOIN = "echelon.join"
ACCELERATORS = {"accelerate.Accelerator", "accelerate.accelerator.Accelerator"}
FABRICS = {"lightning.Fabric", "lightning.fabric.Fabric", "lightning_fabric.Fabric"}
_SPAWN = {"torch.multiprocessing.spawn"}


class Reading:
    """A script as the rules see it."""

    def __init__(self, text: ScriptText) -> None:
        self.text = text
        self.tree = ScriptTree(text)
        self.things = Things(self.tree)
        self.roles = Roles(self.things)

    # What kind of script -------------------------------------------------------------------------

    @cached_property
    def flavour(self) -> Flavour:
        """What the script uses to train on several workers."""
        called = {self.tree.callee(node) for node in self.tree.nodes}
        if JOIN in called:
            return "echelon"
        if called & ACCELERATORS:
            return "accelerate"
        if called & FABRICS:
            return "fabric"
        distributed = any(name.startswith("torch.distributed.") for name in called)
        return "ddp" if distributed or called & (DISTRIBUTED | SAMPLERS | _SPAWN) else "plain"

    @cached_property
    def trains(self) -> bool:
        """Whether there is a backward pass in the script."""
        return any(is_backward(node) for node in self.tree.nodes)

    @cached_property
    def home(self) -> Home | None:
        """Where model, optimizer and loader are made; None if they cannot be found."""
        return find_home(self.things, self.roles)

    @cached_property
    def losses(self) -> list[LossTerm]:
        """The parts of the losses that the script trains with."""
        return LossTerms(self.things).all()

    @cached_property
    def sums(self) -> bool:
        """Whether the loss is a sum over the samples of a share."""
        return {term.reduction for term in self.losses} == {"sum"} and bool(self.prepared_loaders)

    @cached_property
    def prepared_loaders(self) -> list[Variable]:
        """The loaders that give each worker its share: prepared by the script, or by the edit."""
        given = [
            variable
            for call in self.prepare_calls
            for one in call.args
            if (variable := self.things.find(one)) is not None and variable.kind == "loader"
        ]
        if given or self.flavour in ("accelerate", "fabric", "echelon") or self.home is None:
            return given
        return [*self.home.loaders, *self.home.strangers]

    @cached_property
    def prepare_calls(self) -> list[ast.Call]:
        """The calls in which the script prepares its things, for Echelon or another library."""
        names = (
            "prepare",
            "setup",
            "setup_dataloaders",
            "setup_module",
            "setup_optimizers",
            "prepare_data_loader",
        )
        return [
            node
            for node in self.tree.nodes
            if isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in names
            and self.is_session(node.func.value)
        ]

    @cached_property
    def loops(self) -> list[LoaderLoop]:
        """The loops over loaders that give each worker its share."""
        shared = self._views(self.prepared_loaders)
        return [loop for loop in self.roles.loops if any(one in shared for one in loop.variables)]

    def _views(self, loaders: list[Variable]) -> set[Variable]:
        """The variables that hold one of these loaders: parameters of functions, attributes, iterators."""
        found = set(loaders)
        edges = [*self.roles.given(), *self.roles.assigned()]
        for _ in range(8):
            found |= {view for source, view in edges if source in found}
        return found

    # The session ---------------------------------------------------------------------------------

    @cached_property
    def session_variable(self) -> Variable | None:
        """The variable that holds the session, or what the edit turns into it."""
        makers = {"echelon": {JOIN}, "accelerate": ACCELERATORS, "fabric": FABRICS}.get(self.flavour, set())
        for variable in self.things.variables:
            for binding in variable.bindings:
                if binding.value is not None and self.tree.callee(binding.value) in makers:
                    return variable
        return None

    @cached_property
    def session(self) -> str:
        """The name of the session: the script's own, or one that is free."""
        if self.session_variable is not None:
            return self.session_variable.name
        taken = {node.id for node in self.tree.nodes if isinstance(node, ast.Name)} | set(self.tree.imports)
        taken |= {node.arg for node in self.tree.nodes if isinstance(node, ast.arg)}
        owner = self.tree.method(self.home.scope) if self.home is not None else ""
        if owner and self.home is not None:
            held = self.things.named(f"{owner}.session", self.home.scope) is not None
            return f"{owner}.echelon_session" if held else f"{owner}.session"
        return "session" if "session" not in taken else "echelon_session"

    def is_session(self, node: ast.AST) -> bool:
        """Whether an expression is the session, also where it is a parameter or has another name."""
        if self.session_variable is None:
            return False
        found = self.things.find(node)
        named = found is not None and found.parameter and found.name == self.session
        return named or found in self._sessions

    @cached_property
    def _sessions(self) -> set[Variable]:
        """The variables that hold the session: where it is made, parameters that get it, and others."""
        found = {self.session_variable} if self.session_variable is not None else set()
        edges: list[tuple[Variable | None, Variable]] = []
        for node in self.tree.nodes:
            for function in self.tree.called(node) if isinstance(node, ast.Call) else ():
                assert isinstance(node, ast.Call)
                for name, value in self.tree.arguments(node, function).items():
                    parameter = self.things.named(name, function)
                    if parameter is not None:
                        edges.append((self.things.find(value), parameter))
        for variable in self.things.variables:
            values = [binding.value for binding in variable.bindings if binding.index is None]
            edges += [(self.things.find(value), variable) for value in values if value is not None]
        for _ in range(6):
            found |= {held for source, held in edges if source in found}
        return found

    def visible(self, node: ast.AST) -> bool:
        """Whether the name of the session can be used where a node is."""
        if self.session_variable is not None:
            found = self.things.named(self.session, node)
            return found is self.session_variable or (found is not None and found.parameter)
        home = self.home
        if home is None or home.problem or self.tree.defines(node):
            return False
        scope = self.tree.scope(node)
        if scope is home.scope:
            return self.tree.within(node, home.block) is not None
        if isinstance(home.scope, ast.Module):
            return True
        owner = self.tree.method(home.scope)
        if owner:
            same = self.tree.class_around(scope) is self.tree.class_around(home.scope)
            return same and self.tree.method(scope) == owner and self._runs_later(scope)
        return home.scope in self.tree.scopes(node)

    def _runs_later(self, scope: Scope) -> bool:
        """Whether a method runs after the one that joins: that is the first of all, or calls it."""
        home = self.home
        assert home is not None
        if isinstance(home.scope, ast.Module) or home.scope.name == "__init__":
            return True
        calls = [node for node in self.tree.run_by(*home.block) if isinstance(node, ast.Call)]
        return any(scope in self.tree.called(call) for call in calls)

    # Saying it -----------------------------------------------------------------------------------

    def source(self, node: ast.AST) -> str:
        """A node's source on one line."""
        return " ".join(self.text.of(node).split())

    def say(
        self,
        rule: str,
        node: ast.AST,
        level: FindingLevel,
        what: str,
        why: str,
        fix: str = "",
        changes: tuple[Change, ...] = (),
    ) -> ScriptFinding:
        """A finding at a node's line. An edit that needs the session where it is not seen is not made."""
        line = getattr(node, "lineno", 1)
        if changes and self.needs_session(changes) and not self.visible(node):
            where = self.tree.scope(node)
            name = f"{where.name}()" if not isinstance(where, ast.Module) else "this line"
            changes, level = (), "check"
            fix = f"{fix}; {name} does not see {self.session} yet: give it as an argument"
        return ScriptFinding(
            line=line, rule=rule, level=level, what=what, why=why, fix=fix, changes=changes
        )

    def needs_session(self, changes: tuple[Change, ...]) -> bool:
        """Whether an edit uses the session."""
        return any(
            f"{self.session}." in getattr(change, "text", "") + getattr(change, "header", "")
            for change in changes
        )

    @cached_property
    def last_import(self) -> ast.stmt | None:
        """The last of the imports that the script begins with and that has a line of its own."""
        last: ast.stmt | None = None
        for statement in self.tree.module.body:
            text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
            if isinstance(statement, (ast.Import, ast.ImportFrom)):
                last = statement if self.text.alone(statement) else last
            elif not text:
                break
        return last

    def importing(self, module: str) -> tuple[Change, ...]:
        """The edit that imports a module, if the script does not."""
        if self.tree.imports.get(module) == module:
            return ()
        if self.last_import is not None:
            return (Insert(self.last_import, f"import {module}", "after"),)
        first = self.tree.module.body[0]
        text = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
        return (Insert(first, f"import {module}", "after" if text else "before"),)
