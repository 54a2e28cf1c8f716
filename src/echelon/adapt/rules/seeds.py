"""Looks at how random numbers are seeded: the same before `prepare`, each worker's own after it."""

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
from echelon.adapt.tree import keyword

SEEDS = {
    "torch.manual_seed", "torch.random.manual_seed", "torch.cuda.manual_seed", "torch.cuda.manual_seed_all",
    "random.seed", "numpy.random.seed",
}  # fmt: skip
_SEED_WORDS = ("seed_everything", "set_seed", "manual_seed", "default_rng")
_SPLITS = {
    "torch.utils.data.random_split": "generator",
    "sklearn.model_selection.train_test_split": "random_state",
    "torch.randperm": "generator",
    "torch.randn": "generator",
    "torch.rand": "generator",
    "torch.randint": "generator",
    "random.shuffle": "",
    "numpy.random.permutation": "",
    "numpy.random.shuffle": "",
    "numpy.random.randn": "",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Seeds(AdaptRule):
    """Seeds that depend on the rank, seeds inside the loop, and data drawn without a seed."""

    name: ClassVar[str] = "seeds"

    def look(self, reading: Reading) -> Iterator[ScriptFinding]:
        """One finding per seed that is not right, one for data without a seed."""
        if not reading.trains:
            return
        for call in reading.tree.calls(*SEEDS):
            if any(names_rank(one) for one in call.args):
                yield self._by_rank(reading, call)
            else:
                yield from self._in_loop(reading, call)
        yield from self._unseeded(reading)

    def _in_loop(self, reading: Reading, call: ast.Call) -> Iterator[ScriptFinding]:
        loop = reading.tree.inside(call, ast.For, ast.While)
        if loop is None or not reading.tree.trains(loop):
            return
        batches = any(one.node is loop for one in reading.roles.loops)
        what = f"{reading.source(call)} seeds inside the training loop"
        if batches:
            why = "all workers then draw the same dropout masks and noise"
            fix = f"leave it out, or add {reading.session}.rank to the seed"
            yield reading.say(self.name, call, "check", what, why, fix)
        else:
            why = "workers draw the same numbers from there to the next pass over a prepared loader"
            yield reading.say(self.name, call, "note", what, why, "one seed at the beginning is enough")

    def _by_rank(self, reading: Reading, call: ast.Call) -> ScriptFinding:
        what = f"{reading.source(call)} gives each worker a seed of its own"
        why = (
            "after prepare each worker draws random numbers of its own anyway; with one seed, data that is "
            "drawn before is the same on all workers"
        )
        given = call.args[0]
        if isinstance(given, ast.BinOp) and isinstance(given.op, ast.Add):
            sides = [side for side in (given.left, given.right) if not names_rank(side)]
            if len(sides) == 1:
                new = reading.text.of(sides[0])
                return reading.say(
                    self.name, call, "change", what, why, f"seed {new}", (Replace(given, new),)
                )
        return reading.say(self.name, call, "note", what, why, "seed all workers alike")

    def _unseeded(self, reading: Reading) -> Iterator[ScriptFinding]:
        home = reading.home
        named = [reading.tree.callee(node) for node in reading.tree.nodes]
        if home is None or any(name.rpartition(".")[2] in _SEED_WORDS or name in SEEDS for name in named):
            return
        prepared = [home.block.index(at) for call in home.calls if (at := call.anchor) in home.block]
        for statement in home.block[: max(prepared, default=0) + 1]:
            if statement is home.training:
                return
            for node in reading.tree.run_by(statement):
                name = reading.tree.callee(node)
                if not isinstance(node, ast.Call) or name not in _SPLITS or _in_module(reading, node):
                    continue
                if not _SPLITS[name] or keyword(node, _SPLITS[name]) is None:
                    what = f"{name.rpartition('.')[2]} draws random numbers, and nothing seeds them"
                    why = "each worker would get data of its own: other splits, other samples"
                    fix = "torch.manual_seed(0), and the seed of the library that draws, before it"
                    yield reading.say(self.name, node, "check", what, why, fix)
                    return


def _in_module(reading: Reading, node: ast.AST) -> bool:
    """Whether a node is in a torch module, whose weights all workers get from the leader."""
    around = reading.tree.class_around(node)
    return around is not None and around.name in reading.tree.modules
