"""Keeps models synchronised whose states are divided among workers: the layout `sharded`.

Every worker has the whole model's code and its own share of each batch; gradients are summed slice by
slice (`parallel/shards.py`). A checkpoint has whole states, so it loads under any layout.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor, nn
from torch.optim import Optimizer

from echelon.comm.group import Group
from echelon.errors import ModelError
from echelon.parallel.gathered import GatheredParameters
from echelon.parallel.norms import WholeNorms
from echelon.parallel.shards import ShardedModel, ShardedParameter
from echelon.train import batchnorm
from echelon.train import consistency as agree
from echelon.train.families.reduce import StepObserver
from echelon.train.families.slice_steps import SliceSteps
from echelon.train.families.spread import refuse_rules
from echelon.train.families.synchronizer import ModelOptions, Overlap, Synchronizer
from echelon.train.freed_memory import give_back_freed_memory


class ShardSynchronizer(Synchronizer):
    """Divides the states of all models of a run, on one worker.

    group   all workers; `divides` are those that divide a set of states, `across` those with equal slices
    level   what is divided; `weights` are the parts of the workers in `divides`
    offload the folder in which this worker keeps its states of optimizers; empty: in memory
    """

    meets_every_step = True

    def __init__(
        self,
        group: Group,
        divides: Group,
        across: Group | None,
        observer: StepObserver,
        *,
        level: int,
        weights: Sequence[float],
        compared: Callable[[str], None],
        offload: str = "",
    ) -> None:
        give_back_freed_memory()
        self._steps = SliceSteps(self._shards_of, self._stepped, offload=offload)
        self._group = group
        self._divides = divides
        self._across = across
        self._observer = observer
        self._level = level
        self._weights = weights
        self._compared = compared
        self._models: list[tuple[nn.Module, ShardedModel]] = []
        self._gathered: list[GatheredParameters] = []
        self._keeps = False
        self.weight = 1.0 / group.size
        self._resolve: Callable[[], None] = lambda: None
        self._norms = WholeNorms(group, self._slice_gradients, self._counted)
        self._norms.install()

    def add(self, model: nn.Module, rules: ModelOptions) -> None:
        """Divide a model; every worker starts from the leader's values."""
        refuse_rules(rules)
        if any(one.of(p) is not None for _, one in self._models for p in model.parameters()):
            raise ModelError(
                "this model shares parameters with one that was prepared before",
                where="prepare, parallel",
                fix="prepare one module that holds both models",
            )
        agree.share_state(self._group, model)
        weight = self._weight_of(rules)
        if rules.batchnorm == "global" and batchnorm.layers(model):
            by_samples = self._weight_of(ModelOptions())
            batchnorm.make_global(model, self._group.fork(), by_samples, self._observer.exchange)
        shards = ShardedModel(
            model,
            self._divides,
            self._across,
            level=self._level,
            weights=self._weights,
            weight=weight,
            keeps=lambda: self._keeps,
            observer=self._observer,
        )
        self._models.append((model, shards))
        if self._level == 3:
            self._gathered.append(GatheredParameters(model, shards))

    def _weight_of(self, rules: ModelOptions) -> Callable[[], float]:
        def weight() -> float:
            self._resolve()
            return self.weight

        return weight if rules.loss == "mean" else lambda: 1.0

    def adopt(
        self, optimizer: Optimizer, overlap: Overlap, before: Callable[[], None], after: Callable[[], None]
    ) -> None:
        """Steps update slices; refuses optimizers that need whole parameters."""
        self._steps.adopt(optimizer, before, after)

    def _stepped(self, updated: Sequence[Tensor]) -> None:
        for _, shards in self._models:
            shards.stepped(updated)

    def keep(self, active: bool) -> None:
        """More backward passes follow before a step while `active`."""
        self._keeps = active

    def weigh(self, weight: float, batch: int = 0) -> None:
        """Set the weight of this worker's loss; gradients that were kept before keep their weight."""
        if weight != self.weight:
            for _, shards in self._models:
                shards.rescale(self.weight / weight)
        self.weight = weight

    def resolve_with(self, resolve: Callable[[], None]) -> None:
        """Call it before a weight is used."""
        self._resolve = resolve

    def refresh(self, *, ended: bool, trains: bool) -> None:
        """At both ends of a pass all workers get the leader's buffers."""
        for model, _ in self._models:
            buffers = list(model.buffers())
            if buffers:
                agree.share_tensors(self._group, buffers)

    def before_step(self, optimizer: Optimizer, where: str) -> None:
        """Refuse a step on gradients that were kept."""
        if any(shards.unreduced for _, shards in self._models):
            raise ModelError(
                "optimizer.step() would apply gradients that the other workers do not have",
                where=where,
                fix="leave accumulate() for the last backward pass before each step, and let that end",
            )

    def replicas(self) -> list[tuple[str, Tensor]]:
        """The whole parameters, where every worker has them."""
        if self._level == 3:
            return []
        return [
            (agree.label(index, name), one.whole)
            for index, (model, shards) in enumerate(self._models)
            for name, p in model.named_parameters()
            if (one := shards.of(p)) is not None
        ]

    def _slice_gradients(self) -> list[Tensor]:
        return [grad for _, shards in self._models for grad in shards.slice_gradients()]

    def _counted(self) -> list[Tensor]:
        """Each slice's gradient counts once: that of the first set."""
        return self._slice_gradients() if self._across is None or self._across.rank == 0 else []

    # Checkpoints -----------------------------------------------------------------------------------

    def before_save(self) -> None:
        """Show whole models, and give the leader the whole states of optimizers."""
        for gathered in self._gathered:
            gathered.lend()
        self._steps.lend_whole(self._divides)

    def _shards_of(self, p: Tensor) -> ShardedParameter | None:
        return next((one for _, shards in self._models if (one := shards.of(p)) is not None), None)

    def after_save(self) -> None:
        """Slices again."""
        self._steps.take_back()
        for gathered in self._gathered:
            gathered.take_back()

    def before_load(self) -> None:
        """A checkpoint is compared with the model on each worker by itself."""
        self._quiet(True)

    def nothing_loaded(self) -> None:
        """Ask the other workers again."""
        self._quiet(False)

    def _quiet(self, quiet: bool) -> None:
        for gathered in self._gathered:
            gathered.quiet = quiet

    def loaded(self) -> None:
        """Keep this worker's slices of the states that were loaded."""
        self._quiet(False)
        self._steps.cut_states(self._divides.rank)

    def close(self) -> None:
        """Give the modules back."""
        self._norms.remove()
        for one in self._gathered:
            one.close()
        for model, shards in self._models:
            shards.close()
            batchnorm.make_local(model)
