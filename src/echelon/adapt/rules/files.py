"""Looks at folders and files that all workers make at the same time."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from echelon.adapt.changes import Replace
from echelon.adapt.finding import ScriptFinding
from echelon.adapt.ranks import only_guarded
from echelon.adapt.reading import Reading
from echelon.adapt.rewrite import add_argument
from echelon.adapt.rule import AdaptRule
from echelon.adapt.tree import constant, keyword

_LOGS = {
    "wandb.init",
    "torch.utils.tensorboard.SummaryWriter",
    "tensorboardX.SummaryWriter",
    "mlflow.start_run",
}
_PICTURES = {"savefig", "save_image", "imsave"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Files(AdaptRule):
    """Folders, logs and pictures that every worker would make."""

    name: ClassVar[str] = "files"

    def look(self, reading: Reading) -> Iterator[ScriptFinding]:
        """One finding per folder and log, one for all pictures and texts together."""
        if not reading.trains:
            return
        written = []
        for node in reading.tree.nodes:
            if not isinstance(node, ast.Call) or only_guarded(reading.tree, node):
                continue
            name = reading.tree.callee(node)
            last = node.func.attr if isinstance(node.func, ast.Attribute) else name.rpartition(".")[2]
            if name in ("os.mkdir", "os.makedirs") or last == "mkdir":
                yield from self._folder(reading, node, name)
            elif name in _LOGS:
                what = f"every worker starts a log of its own: {reading.source(node.func)}"
                fix = f"if {reading.session}.is_leader: ..., also around what is logged to it"
                yield reading.say(self.name, node, "note", what, "there are as many logs as workers", fix)
            elif last in _PICTURES or (name == "open" and _writes(node) and not _saves(reading, node)):
                written.append(node)
        if written:
            lines = ", ".join(str(node.lineno) for node in written)
            what = f"every worker writes the same files (line {lines})"
            why = "contents are those of any worker, and may mix"
            fix = f"if {reading.session}.is_leader: ..."
            yield reading.say(self.name, written[0], "note", what, why, fix)

    def _folder(self, reading: Reading, node: ast.Call, name: str) -> Iterator[ScriptFinding]:
        if keyword(node, "exist_ok") is not None or reading.tree.inside(node, ast.Try) is not None:
            return
        if name == "os.mkdir" and len(node.args) == 1 and not node.keywords:
            path, base = reading.text.of(node.args[0]), reading.text.of(node.func).removesuffix("mkdir")
            change = Replace(node, f"{base}makedirs({path}, exist_ok=True)")
        elif name == "os.mkdir":
            return
        else:
            change = add_argument(reading.text, node, "exist_ok=True")
        what = "every worker makes the same folder"
        why = "all but the first find that it exists, and end"
        yield reading.say(self.name, node, "change", what, why, "exist_ok=True", (change,))


def _saves(reading: Reading, call: ast.Call) -> bool:
    """Whether a file is opened for `torch.save`, which has a rule of its own."""
    around = reading.tree.statement(call)
    return isinstance(around, ast.With) and any(
        reading.tree.callee(node) == "torch.save" for one in around.body for node in ast.walk(one)
    )


def _writes(call: ast.Call) -> bool:
    mode = keyword(call, "mode")
    given = mode.value if mode is not None else call.args[1] if len(call.args) > 1 else None
    return any(letter in str(constant(given) or "") for letter in "wax")
