"""Looks at devices: the session chooses one for each worker."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from echelon.adapt.changes import Replace
from echelon.adapt.finding import ScriptFinding
from echelon.adapt.ranks import names_rank
from echelon.adapt.reading import Reading
from echelon.adapt.rule import AdaptRule
from echelon.adapt.tree import constant

_OPTIONS = {
    "--gpu", "--gpus", "--gpu-id", "--gpu_id", "--ngpu", "--local_rank", "--local-rank", "--rank",
    "--world-size", "--world_size", "--dist-url", "--dist-backend",
}  # fmt: skip
_WHY = "session.device is each worker's device, and prepare moves models and batches there"


@dataclass(frozen=True, slots=True, kw_only=True)
class Devices(AdaptRule):
    """Options such as --gpu and --local_rank, and devices that are written into the script."""

    name: ClassVar[str] = "devices"

    def look(self, reading: Reading) -> Iterator[ScriptFinding]:
        """One finding per device that is chosen by the rank, one note for options, one for CUDA."""
        if not reading.trains or reading.flavour == "echelon":
            return
        yield from self._by_rank(reading)
        yield from self._if_available(reading)
        options, moved = [], []
        for node in reading.tree.nodes:
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            if node.func.attr == "add_argument" and any(constant(one) in _OPTIONS for one in node.args):
                options.append(node)
            elif node.func.attr == "cuda" or any(
                str(constant(one)).startswith("cuda") for one in node.args
            ):
                moved.append(node)
        if options:
            names = ", ".join(
                str(constant(one)) for node in options for one in node.args if constant(one) in _OPTIONS
            )
            what = f"the script takes {names}"
            fix = "options can stay; echelon run needs none of them"
            yield reading.say(self.name, options[0], "note", what, _WHY, fix)
        if moved:
            lines = ", ".join(str(node.lineno) for node in moved)
            what = f"tensors or models are moved to CUDA (line {lines})"
            fix = f".to({reading.session}.device), on a machine with several GPUs or none"
            yield reading.say(self.name, moved[0], "note", what, _WHY, fix)

    def _by_rank(self, reading: Reading) -> Iterator[ScriptFinding]:
        """`x.to(rank)` and `torch.device(f"cuda:{rank}")`."""
        for node in reading.tree.nodes:
            if not isinstance(node, ast.Call) or not node.args or not names_rank(node.args[0]):
                continue
            method = node.func.attr if isinstance(node.func, ast.Attribute) else ""
            new = f"{reading.session}.device"
            if reading.tree.callee(node) == "torch.device":
                changes = (Replace(node, new),)
            elif method == "to":
                changes = (Replace(node.args[0], new),)
            elif method == "cuda" and isinstance(node.func, ast.Attribute):
                changes = (Replace(node, f"{reading.text.of(node.func.value)}.to({new})"),)
            else:
                continue
            what = f"{reading.source(node)} chooses a GPU by the rank"
            yield reading.say(self.name, node, "change", what, _WHY, new, changes)

    def _if_available(self, reading: Reading) -> Iterator[ScriptFinding]:
        """`device = torch.device("cuda" if torch.cuda.is_available() else "cpu")`."""
        for node in reading.tree.nodes:
            if not isinstance(node, ast.Assign) or not _is_choice(reading, node.value):
                continue
            new = f"{reading.session}.device"
            what = f"{reading.source(node)} is the first GPU of the machine, or the CPU"
            if all(_is_given(reading, target) for target in node.targets) and reading.visible(node):
                changes = (Replace(node.value, new),)
                yield reading.say(self.name, node, "change", what, _WHY, new, changes)
            else:
                fix = f"with several GPUs: {new}; with one or none it works as it is"
                yield reading.say(self.name, node, "note", what, _WHY, fix)


def _is_choice(reading: Reading, node: ast.expr) -> bool:
    """Whether an expression is a GPU if there is one, else the CPU."""
    if reading.tree.callee(node) == "torch.device" and isinstance(node, ast.Call) and len(node.args) == 1:
        node = node.args[0]
    return (
        isinstance(node, ast.IfExp)
        and reading.tree.callee(node.test) == "torch.cuda.is_available"
        and constant(node.body) in ("cuda", "cuda:0")
        and constant(node.orelse) == "cpu"
    )


def _is_given(reading: Reading, target: ast.expr) -> bool:
    """Whether a device is only given to functions and methods, never compared or taken apart."""
    name = reading.tree.written(target)
    outer = [next(reading.tree.parents(use)) for use in reading.tree.uses(name)]
    return bool(name) and all(isinstance(one, (ast.Call, ast.keyword)) for one in outer)
