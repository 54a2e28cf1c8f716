"""Keeps models synchronised that are spread over workers by a layout (`parallel/`).

Every replica of the model is a pipeline of workers. A replica's workers draw the same share of each
batch; the gradients of a parameter are summed over the workers that hold it, when backward ends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from echelon.checkpoint import state_tree
from echelon.comm.group import Group
from echelon.comm.meet.links import Links
from echelon.errors import ConfigError, ModelError
from echelon.parallel.layout import Mesh
from echelon.parallel.shards import ShardedParameter
from echelon.parallel.spread import SpreadModel
from echelon.parallel.stage_shards import StageDivision
from echelon.parallel.strategies.pipeline import Pipeline
from echelon.train import batchnorm
from echelon.train import consistency as agree
from echelon.train.families.reduce import StepObserver
from echelon.train.families.slice_steps import SliceSteps, parameters_of
from echelon.train.families.synchronizer import Explain, ModelOptions, Overlap, Synchronizer
from echelon.train.freed_memory import give_back_freed_memory


class SpreadSynchronizer(Synchronizer):
    """Runs all models of a run in parts, on one worker. `compared` makes all workers agree on a call.

    division  how the workers with this stage divide its states, `offload` in which folder they keep them
    """

    meets_every_step = True

    def __init__(
        self,
        group: Group,
        mesh: Mesh,
        pipeline: Pipeline,
        observer: StepObserver,
        *,
        memory_bytes: float,
        links: Links | None,
        compared: Callable[[str], None],
        explain: Explain,
        division: StageDivision | None = None,
        offload: str = "",
    ) -> None:
        self._division = division
        self._steps: SliceSteps | None = None
        if division is not None:
            give_back_freed_memory()
            self._steps = SliceSteps(self._shards_of, self._stepped, offload=offload)
        self._group = group
        self._mesh = mesh
        self._pipeline = pipeline
        self._observer = observer
        self._memory_bytes = memory_bytes
        self._links = links
        self._compared = compared
        self._explain = explain
        self._models: list[tuple[nn.Module, SpreadModel]] = []
        self._optimizers: list[Optimizer] = []
        self._lent: list[tuple[Optimizer, nn.Parameter]] = []
        self._keeps = False
        self.weight = 1.0 / mesh.replicas
        self._resolve: Callable[[], None] = lambda: None

    def add(self, model: nn.Module, rules: ModelOptions) -> None:
        """Spread a model; every worker starts from the leader's values."""
        self._refuse(model, rules)
        agree.share_state(self._group, model)
        spread = SpreadModel(
            model,
            self._pipeline,
            self._mesh,
            self._group,
            memory_bytes=self._memory_bytes,
            links=self._links,
            weight=self._weight_of(rules),
            keeps=lambda: self._keeps,
            agree=self._compared,
            observer=self._observer,
            explain=self._explain,
            division=self._division,
            begun=self._keep_own_states,
        )
        self._models.append((model, spread))

    def _refuse(self, model: nn.Module, rules: ModelOptions) -> None:
        refuse_rules(rules)
        layers = batchnorm.layers(model)
        whole = self._pipeline.micro == 1 and not self._pipeline.samples and self._mesh.replicas == 1
        if layers and rules.batchnorm == "global" and not whole:
            raise ModelError(
                "batch normalisation in a pipeline sees one micro-batch at a time, so it would not train "
                "as the whole batch does",
                where="prepare, parallel",
                fix='prepare with batchnorm="local" to normalise each micro-batch by itself, or use '
                "pipeline(micro=1) without data",
            )

    def _weight_of(self, rules: ModelOptions) -> Callable[[], float]:
        def weight() -> float:
            self._resolve()
            return self.weight

        return weight if rules.loss == "mean" else lambda: 1.0

    def adopt(
        self, optimizer: Optimizer, overlap: Overlap, before: Callable[[], None], after: Callable[[], None]
    ) -> None:
        """Call `before` and `after` around every step. Parameters of other workers have no gradient."""
        if isinstance(optimizer, LBFGS):
            raise ConfigError(
                "LBFGS computes with all parameters at once, and a worker holds only some",
                where="prepare, parallel",
                fix="use an optimizer that updates each element by itself, such as SGD or Adam",
            )
        self._optimizers.append(optimizer)
        if self._steps is not None:
            self._steps.adopt(optimizer, before, after)
            return
        optimizer.register_step_pre_hook(lambda *_: before())
        optimizer.register_step_post_hook(lambda *_: after())

    def _shards_of(self, p: Tensor) -> ShardedParameter | None:
        found = (spread.shards.of(p) for _, spread in self._models if spread.shards is not None)
        return next((one for one in found if one is not None), None)

    def _stepped(self, updated: Sequence[Tensor]) -> None:
        for _, spread in self._models:
            if spread.shards is not None:
                spread.shards.stepped(updated)

    def keep(self, active: bool) -> None:
        """Keep gradients on this worker while `active`."""
        self._keeps = active

    def weigh(self, weight: float, batch: int = 0) -> None:
        """Set the weight of this replica's loss."""
        self.weight = weight

    def resolve_with(self, resolve: Callable[[], None]) -> None:
        """Call it before a weight is used."""
        self._resolve = resolve

    def refresh(self, *, ended: bool, trains: bool) -> None:
        """At both ends of a pass all workers get the buffers of those that compute them.

        What is late when a training pass ends is dropped, also before a checkpoint: it would not have it.
        """
        for _, spread in self._models:
            if ended and trains:
                spread.drop_late()
            if spread.holdings is not None:
                spread.holdings.share_buffers()

    def before_step(self, optimizer: Optimizer, where: str) -> None:
        """Refuse a step on gradients that were kept."""
        if any(spread.unreduced for _, spread in self._models):
            raise ModelError(
                "optimizer.step() would apply gradients that the other workers do not have",
                where=where,
                fix="leave accumulate() for the last backward pass before each step, and let that end",
            )

    def replicas(self) -> list[tuple[str, Tensor]]:
        """None: replicas may be cut differently."""
        return []

    # Checkpoints -----------------------------------------------------------------------------------

    def before_save(self) -> None:
        """Give all workers the whole models, and the leader all states of optimizers."""
        for _, spread in self._models:
            spread.drop_late()
            spread.quiet = True
            spread.whole()
        if any(spread.holdings is not None for _, spread in self._models):
            self._lend_states()

    def _lend_states(self) -> None:
        if self._steps is not None and self._division is not None:
            self._steps.lend_whole(self._division.divides)
        own = state_tree.pack(self._own_states())
        parts = self._group.all_gather_bytes(own)
        if self._group.rank:
            return
        for data in parts[1:]:
            for key, state in state_tree.unpack(data).items():
                at, index = (int(part) for part in key.split("/"))
                optimizer = self._optimizers[at]
                p = list(parameters_of(optimizer))[index]
                optimizer.state[p] = state
                self._lent.append((optimizer, p))

    def _own_states(self) -> dict[str, Any]:
        """The states whose first owner this worker is."""
        first = {
            id(p): spread.holdings.first_owner(p)
            for model, spread in self._models
            if spread.holdings is not None
            for p in model.parameters()
        }
        return {
            f"{at}/{index}": dict(optimizer.state[p])
            for at, optimizer in enumerate(self._optimizers)
            for index, p in enumerate(parameters_of(optimizer))
            if p in optimizer.state and first.get(id(p)) == self._group.rank
        }

    def after_save(self) -> None:
        """Keep only this worker's part again."""
        for optimizer, p in self._lent:
            optimizer.state.pop(p, None)
        self._lent.clear()
        if self._steps is not None:
            self._steps.take_back()
        self._part()

    def before_load(self) -> None:
        """States are compared and replaced on each worker by itself."""
        for _, spread in self._models:
            spread.drop_late()
            spread.quiet = True

    def nothing_loaded(self) -> None:
        """Ask the other workers again."""
        self._part()

    def loaded(self) -> None:
        """Keep only this worker's part of what was loaded."""
        self._part()
        self._keep_own_states()

    def _keep_own_states(self) -> None:
        """Of loaded states keep those of this worker's parameters."""
        for _, spread in self._models:
            for p in spread.holdings.others if spread.holdings is not None else ():
                for optimizer in self._optimizers:
                    optimizer.state.pop(p, None)
        if self._steps is not None and self._division is not None:
            self._steps.cut_states(self._division.divides.rank)

    def _part(self) -> None:
        for _, spread in self._models:
            spread.quiet = False
            spread.part()

    def close(self) -> None:
        """Give the modules back."""
        for _, spread in self._models:
            spread.close()


def refuse_rules(rules: ModelOptions) -> None:
    """Refuse what does not go with a model in parts."""
    if rules.codec not in ("", "none"):
        raise _does_not_go("codec", rules.codec)
    if rules.overlap == "step":
        raise _does_not_go("overlap", "step")


def _does_not_go(what: str, value: str) -> ConfigError:
    return ConfigError(
        f"{what} {value} does not work with a model in parts",
        where="prepare, parallel",
        fix=f"leave {what} at its default, or use parallel data",
    )
