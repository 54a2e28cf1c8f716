"""Which variables of a script hold models, optimizers, schedulers and loaders, and where are they made?

A variable's kind follows from what is assigned to it: a call of a class of torch, of a class or function of
the script, or another variable. What cannot be followed is known by its use: whatever gives its
`parameters()` to an optimizer is a model. A variable is a name in a function or module, or an attribute of
an object in its class, such as `self.model`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from echelon.adapt.tree import Function, Scope, ScriptTree

Kind = Literal["", "model", "optimizer", "scheduler", "loader", "view", "sampler"]

LOADERS = {"torch.utils.data.DataLoader", "torch.utils.data.dataloader.DataLoader"}
SAMPLERS = {
    "torch.utils.data.DistributedSampler",
    "torch.utils.data.distributed.DistributedSampler",
}
DISTRIBUTED = {
    "torch.nn.parallel.DistributedDataParallel",
    "torch.nn.parallel.distributed.DistributedDataParallel",
}
WRAPPERS = {*DISTRIBUTED, "torch.nn.DataParallel", "torch.nn.parallel.DataParallel"}
CONVERTERS = {"torch.nn.SyncBatchNorm.convert_sync_batchnorm"}
VIEWS = {
    "iter", "enumerate", "zip", "reversed", "itertools.cycle", "itertools.islice", "itertools.chain",
    "tqdm.tqdm", "tqdm.auto.tqdm", "tqdm.notebook.tqdm", "rich.progress.track",
}  # fmt: skip
_SAME_MODEL = {"to", "cuda", "cpu", "double", "float", "half", "train", "eval", "apply", "requires_grad_"}
_NO_MODELS = ("functional", "init", "utils", "parallel", "Parameter", "Module", "ModuleList", "ModuleDict")
_NO_OPTIMIZERS = ("clip_grad", "lr_scheduler", "swa_utils")


@dataclass(frozen=True, slots=True)
class Binding:
    """A statement that gives a variable its value; `index` is the place in a value that is unpacked."""

    statement: ast.stmt
    value: ast.expr | None
    index: int | None = None


@dataclass(eq=False)
class Variable:
    """A name in a function or module, or an attribute of an object."""

    name: str
    owner: ast.AST
    parameter: bool = False
    kind: Kind = ""
    bindings: list[Binding] = field(default_factory=list)


class Things:
    """The variables of a script and their kinds."""

    def __init__(self, tree: ScriptTree) -> None:
        self.tree = tree
        self._table: dict[tuple[ast.AST, str], Variable] = {}
        self._asked: list[Function] = []
        self._collect()
        for _ in range(6):  # kinds follow from kinds: far more often than scripts need
            if not self._infer():
                break

    @property
    def variables(self) -> list[Variable]:
        """All variables."""
        return list(self._table.values())

    def of_kind(self, kind: Kind) -> list[Variable]:
        """The variables of a kind."""
        return [one for one in self._table.values() if one.kind == kind]

    def find(self, node: ast.AST) -> Variable | None:
        """The variable that an expression names."""
        written = self.tree.written(node)
        return self.named(written, node) if written else None

    def named(self, written: str, node: ast.AST) -> Variable | None:
        """The variable that a name stands for where a node is."""
        root, dot, _ = written.partition(".")
        scopes = self.tree.scopes(node)
        if isinstance(node, (ast.Module, ast.FunctionDef, ast.AsyncFunctionDef)):
            scopes = [node, *scopes]
        if dot:
            for scope in scopes:
                if self.tree.method(scope) == root:
                    around = self.tree.class_around(scope)
                    return self._table.get((around, written)) if around is not None else None
            return None
        return next((self._table[s, written] for s in scopes if (s, written) in self._table), None)

    # Collecting ----------------------------------------------------------------------------------

    def _collect(self) -> None:
        for node in self.tree.nodes:
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                for argument in arguments:
                    self._table[node, argument.arg] = Variable(argument.arg, node, parameter=True)
        for node in self.tree.nodes:
            if isinstance(node, ast.Assign):
                for target in node.targets:
                    self._bind(target, node, node.value)
            elif isinstance(node, ast.AnnAssign) and node.value is not None:
                self._bind(node.target, node, node.value)
            elif isinstance(node, (ast.For, ast.AsyncFor)):
                self._bind(node.target, node, None)
            elif isinstance(node, (ast.With, ast.AsyncWith)):
                for item in node.items:
                    if item.optional_vars is not None:
                        self._bind(item.optional_vars, node, item.context_expr)

    def _bind(
        self, target: ast.expr, statement: ast.stmt, value: ast.expr | None, index: int | None = None
    ) -> None:
        if isinstance(target, (ast.Tuple, ast.List)):
            pairs = isinstance(value, (ast.Tuple, ast.List)) and len(value.elts) == len(target.elts)
            for place, one in enumerate(target.elts):
                if pairs and isinstance(value, (ast.Tuple, ast.List)):
                    self._bind(one, statement, value.elts[place])
                else:
                    self._bind(one, statement, value, place)
            return
        owner = self._owner(target)
        if owner is None:
            return
        name = self.tree.written(target)
        variable = self._table.setdefault((owner, name), Variable(name, owner))
        variable.bindings.append(Binding(statement, value, index))

    def _owner(self, target: ast.expr) -> ast.AST | None:
        """The scope of a name, or the class of an attribute of `self`."""
        scope = self.tree.scope(target)
        if isinstance(target, ast.Name):
            return self.tree.module if target.id in declared_global(scope) else scope
        root = self.tree.written(target).partition(".")[0]
        if isinstance(target, ast.Attribute) and root and root == self.tree.method(scope):
            return self.tree.class_around(target)
        return None

    # Kinds ---------------------------------------------------------------------------------------

    def _infer(self) -> bool:
        """Derive kinds once more; whether any is new."""
        known = sum(bool(one.kind) for one in self.variables)
        for variable in self.variables:
            if variable.kind:
                continue
            for binding in variable.bindings:
                variable.kind = (
                    variable.kind or self.bound_kind(binding) or self._named_loader(variable, binding)
                )
        for function in [one for same in self.tree.functions.values() for one in same] + self._methods:
            self._from_callers(function)
        self._from_use()
        return sum(bool(one.kind) for one in self.variables) > known

    def _named_loader(self, variable: Variable, binding: Binding) -> Kind:
        """What a function of another file returns is a loader if it is called so."""
        value = binding.value
        if not isinstance(value, ast.Call) or "loader" not in variable.name.lower():
            return ""
        own = self.tree.written(value.func)
        return "" if own in self.tree.functions or own in self.tree.classes else "loader"

    @cached_property
    def _methods(self) -> list[Function]:
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
        classes = [one for name, one in self.tree.classes.items() if name not in self.tree.modules]
        return [one for around in classes for one in around.body if isinstance(one, kinds)]

    def _from_callers(self, function: Function) -> None:
        for call in self.tree.callers(function):
            for name, value in self.tree.arguments(call, function).items():
                variable = self._table.get((function, name))
                if variable is not None and not variable.kind:
                    variable.kind = self.kind(value)

    def _from_use(self) -> None:
        for model, call in self.linked():
            model.kind = model.kind or "model"
            statement = self.tree.statement(call)
            if (
                isinstance(statement, ast.Assign)
                and statement.value is call
                and len(statement.targets) == 1
            ):
                made = self.find(statement.targets[0])
                if made is not None and not made.kind and self._steps(made):
                    made.kind = "optimizer"

    def _steps(self, variable: Variable) -> bool:
        """Whether `step` of a variable is called."""
        return any(
            isinstance(node, ast.Attribute) and node.attr == "step" and self.find(node.value) is variable
            for node in self.tree.nodes
        )

    def linked(self) -> Iterator[tuple[Variable, ast.Call]]:
        """Each variable that gives its parameters to a call that makes an optimizer, and the call."""
        for node in self.tree.nodes:
            if not isinstance(node, ast.Call):
                continue
            if isinstance(node.func, ast.Attribute) and node.func.attr == "configure_optimizers":
                model = self.find(node.func.value)
                if model is not None:
                    yield model, node
            name = self.tree.name(node.func)
            last = name.rpartition(".")[2]
            if last in self.tree.functions or any(word in name.lower() for word in _NO_OPTIMIZERS):
                continue
            if not (last[:1].isupper() or not name):  # a class, or what an expression returns
                continue
            for given in [*node.args, *(one.value for one in node.keywords)]:
                yield from ((model, node) for model in self._parameters_in(given))

    def unresolved(self, call: ast.Call) -> bool:
        """Whether an optimizer gets parameters of something that is not a plain variable."""
        given = [*call.args, *(one.value for one in call.keywords)]
        asked = [
            node
            for one in given
            for node in ast.walk(one)
            if isinstance(node, ast.Attribute) and node.attr in ("parameters", "named_parameters")
        ]
        return any(not list(self._parameters_in(node)) for node in asked)

    def _parameters_in(self, node: ast.expr, depth: int = 0) -> Iterator[Variable]:
        """The variables whose `parameters()` an expression has."""
        for inner in ast.walk(node):
            if isinstance(inner, ast.Attribute) and inner.attr in ("parameters", "named_parameters"):
                base = inner.value
                while isinstance(base, (ast.Attribute, ast.Call)):
                    variable = self.find(base)
                    if variable is not None and variable.bindings:
                        break
                    base = base.func if isinstance(base, ast.Call) else base.value
                variable = self.find(base)
                if variable is not None and self._can_be_a_model(variable):
                    yield variable
            elif isinstance(inner, ast.Name) and depth < 2:
                variable = self.find(inner)
                for binding in variable.bindings if variable is not None else []:
                    if binding.value is not None and binding.index is None:
                        yield from self._parameters_in(binding.value, depth + 1)

    def _can_be_a_model(self, variable: Variable) -> bool:
        """Not `self` itself, nor a layer of a module of the script."""
        around = variable.owner if isinstance(variable.owner, ast.ClassDef) else None
        scope = (
            variable.owner if isinstance(variable.owner, (ast.FunctionDef, ast.AsyncFunctionDef)) else None
        )
        own = scope is not None and self.tree.method(scope) == variable.name
        return variable.kind in ("", "model") and not own and not self._is_layer(around)

    def _is_layer(self, around: ast.AST | None) -> bool:
        return isinstance(around, ast.ClassDef) and around.name in self.tree.modules

    def bound_kind(self, binding: Binding) -> Kind:
        """The kind of what a statement assigns to a variable."""
        if binding.value is None:
            return ""
        if binding.index is None:
            return self.kind(binding.value)
        kinds = self._kinds_in(binding.value)
        return kinds[binding.index] if binding.index < len(kinds) else ""

    def _kinds_in(self, node: ast.expr) -> list[Kind]:
        """The kinds of the parts of a value that is unpacked."""
        if isinstance(node, ast.Tuple):
            return [self.kind(one) for one in node.elts]
        if not isinstance(node, ast.Call):
            return []
        if isinstance(node.func, ast.Attribute) and node.func.attr.startswith(("prepare", "setup")):
            return [self.kind(one) for one in node.args]
        found = [
            self._returned(function)
            for function in self.tree.functions.get(self.tree.written(node.func), [])
        ]
        return found[0] if len(found) == 1 else []

    def _returned(self, function: Function) -> list[Kind]:
        """The kinds of what a function returns."""
        if function in self._asked:  # it calls itself
            return []
        self._asked.append(function)
        try:
            for node in self.tree.body(function):
                if isinstance(node, ast.Return) and node.value is not None:
                    parts = node.value.elts if isinstance(node.value, ast.Tuple) else [node.value]
                    return [self.kind(one) for one in parts]
            return []
        finally:
            self._asked.pop()

    def kind(self, node: ast.expr) -> Kind:
        """The kind of an expression's value."""
        if isinstance(node, (ast.Name, ast.Attribute)):
            variable = self.find(node)
            return variable.kind if variable is not None else ""
        if isinstance(node, ast.IfExp):
            return self.kind(node.body) or self.kind(node.orelse)
        return self._kind_of_call(node) if isinstance(node, ast.Call) else ""

    def _kind_of_call(self, node: ast.Call) -> Kind:
        name = self.tree.name(node.func)
        simple = _kind_by_name(name)
        if simple:
            return simple
        if name in WRAPPERS | CONVERTERS | {"torch.compile"}:
            return self.kind(node.args[0]) if node.args else ""
        if name in VIEWS:
            return "view" if any(self.kind(one) in ("loader", "view") for one in node.args) else ""
        if self.tree.written(node.func) in self.tree.modules:
            return "model"
        if self.tree.written(node.func) in self.tree.functions:
            kinds = self._kinds_in(node)
            return kinds[0] if len(kinds) == 1 else ""
        if isinstance(node.func, ast.Attribute):
            if node.func.attr == "configure_optimizers":
                return "optimizer"
            if node.func.attr.startswith(("prepare", "setup")) and len(node.args) == 1:
                return self.kind(node.args[0])
            if node.func.attr in _SAME_MODEL and self.kind(node.func.value) == "model":
                return "model"
        return ""


def _kind_by_name(name: str) -> Kind:
    """The kind of what a function or class of a known package makes."""
    last = name.rpartition(".")[2]
    if name in LOADERS or name.endswith(".DataLoader"):
        return "loader"
    if name in SAMPLERS:
        return "sampler"
    if name.startswith("torch.optim.lr_scheduler."):
        return "scheduler"
    if name.startswith("torch.optim.") and last[:1].isupper() and "swa_utils" not in name:
        return "optimizer"
    if name.startswith("torch.nn.") and last[:1].isupper() and not last.endswith("Loss"):
        return "" if any(word in name.split(".") for word in _NO_MODELS) else "model"
    if name.startswith("torchvision.models.") or name == "timm.create_model":
        return "model"
    return ""


def declared_global(scope: Scope) -> set[str]:
    """The names that a function declares global."""
    if isinstance(scope, ast.Module):
        return set()
    return {name for node in ast.walk(scope) if isinstance(node, ast.Global) for name in node.names}
