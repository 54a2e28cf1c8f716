"""Keeps models the same on all workers: gradients are reduced in every backward pass.

Each prepared model gets a reducer and, where asked for, global batch normalisation, factors and a codec.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from echelon.codec.fitting import goes_on, refuse_factors
from echelon.comm.group import Group
from echelon.comm.schedule.cost import LinkCost
from echelon.config.choices import FactorRule
from echelon.errors import ModelError
from echelon.reduce.deferred import DeferredSteps
from echelon.reduce.encoded.encoder import ModelEncoder
from echelon.reduce.piggyback import Piggyback
from echelon.reduce.reducer import Reducer
from echelon.reduce.round_seen import Inspector, RoundObserver
from echelon.train import batchnorm, linear
from echelon.train import consistency as agree
from echelon.train.encoding import Encoding
from echelon.train.factoring import Factoring
from echelon.train.families.synchronizer import Explain, ModelOptions, Overlap, Synchronizer


class StepObserver(RoundObserver, Protocol):
    """Records how a round goes, and the exchanges within forward and backward."""

    def exchange(self) -> AbstractContextManager[None]:
        """In the block, all workers meet in batch normalisation."""


class ReduceSynchronizer(Synchronizer):
    """Reduces the gradients of all models of a run, on one worker.

    `link` is the slowest link between the workers, None if unknown; `explain` records decisions.
    """

    meets_every_step = True
    same_on_all = True

    def __init__(
        self,
        group: Group,
        observer: StepObserver,
        *,
        link: LinkCost | None = None,
        encoding: Encoding | None = None,
        explain: Explain = lambda topic, why, tell: None,
        inspector: Inspector | None = None,
        copies: int = 1,
    ) -> None:
        self._inspector = inspector
        self._copies = copies
        self._group = group
        self._encoding = encoding or Encoding("none", group, links=None, sites=(), explain=explain)
        self._observer = observer
        self._link = link
        self._explain = explain
        self._factorings: list[Factoring] = []
        self._reducers: list[Reducer] = []
        self._rules: list[ModelOptions] = []
        self._models: list[nn.Module] = []
        self._rounds_at_step: dict[int, int] = {}
        self._optimizers: list[Optimizer] = []
        self._deferred = DeferredSteps()
        self.weight = 1.0 / group.size  # the mean, as in DDP, until a prepared loader sets it
        self._resolve: Callable[[], None] = _nothing
        self._piggyback: Piggyback | None = None

    def carry(self, piggyback: Piggyback) -> None:
        """With the first model whose gradients have room for them."""
        self._piggyback = piggyback

    def add(self, model: nn.Module, rules: ModelOptions) -> None:
        """Reduce a model's gradients from now on."""
        if self._group.size == 1 and not self._encoding.active(rules.codec) and self._inspector is None:
            return

        if self._group.changes is not None:
            refuse_changes(rules)
            self._group.changes.settle = self._deferred.settle
        weight = self._weight_of(rules)
        deferred = rules.overlap == "step"
        if deferred:
            refuse_compiled(model)
        if deferred or rules.loss == "sum":
            self._refuse_shared(model)
        agree.share_state(self._group, model)
        self._models.append(model)
        if rules.batchnorm == "global" and batchnorm.layers(model) and self._group.size > 1:
            batchnorm.make_global(
                model, self._group.fork(), weight, self._observer.exchange, copies=self._copies
            )
        coding = self._encoding.add(model, rules.codec)
        factoring = self._watch(model, self._factors(rules, coding))
        reducer = Reducer(
            list(model.named_parameters()),
            self._group.fork(),
            weight,
            self._observer,
            summed=rules.loss == "sum",
            receiver=self._deferred if deferred else None,
            link=self._link,
            encoder=coding,
            piggyback=self._piggyback if self._piggyback and not self._piggyback.is_carried else None,
            inspector=self._inspector,
        )
        self._reducers.append(reducer)
        self._rules.append(rules)
        if factoring is not None:
            factoring.serve(reducer)
            self._factorings.append(factoring)

    def _weight_of(self, rules: ModelOptions) -> Callable[[], float]:
        """The weight of this worker's gradients of a model, whenever it is needed."""

        def weight() -> float:
            self._resolve()
            return self.weight

        return weight if rules.loss == "mean" else lambda: 1.0 / self._group.size

    def renew(self, model: nn.Module) -> list[str]:
        """Give new parameters the leader's values, and reduce their gradients too."""
        at = next((at for at, known in enumerate(self._models) if known is model), None)
        if at is None:
            return []
        reducer, rules = self._reducers[at], self._rules[at]
        named = list(model.named_parameters())
        fresh = [(name, p) for name, p in named if not reducer.touches({id(p)})]
        if not fresh and len(named) == len(reducer.named):
            return []
        if self._encoding.active(rules.codec):
            raise ModelError(
                f"parameters were replaced after prepare ({', '.join(name for name, _ in fresh)}), and the "
                "codec keeps states for those that it was given",
                where="prepare",
                fix="change the model first, then prepare it",
            )
        self.settle()
        agree.share_tensors(self._group, [p.data for _, p in fresh] + list(model.buffers()))
        if rules.batchnorm == "global" and batchnorm.layers(model):
            batchnorm.make_global(model, self._group.fork(), self._weight_of(rules), copies=self._copies)
        reducer.renew(named)
        return [name for name, _ in fresh]

    def _factors(self, rules: ModelOptions, coding: ModelEncoder | None) -> FactorRule:
        """Which layers may send factors; none if the gradients are encoded."""
        if coding is not None:
            refuse_factors(coding.codec, rules.factors)
        if self._inspector is not None:  # checks look at whole gradients, also where factors would travel
            return "never"
        return rules.factors if coding is None else "never"

    def _refuse_shared(self, model: nn.Module) -> None:
        held = {id(p) for p in model.parameters()}
        if any(reducer.touches(held) for reducer in self._reducers):
            raise ModelError(
                "this model shares parameters with one that was prepared before",
                where='prepare(overlap="step") or prepare(loss="sum")',
                fix="prepare one module that holds both models",
            )

    def _watch(self, model: nn.Module, rule: FactorRule) -> Factoring | None:
        """Watch the linear layers that may send factors; None if no layer may."""
        if rule == "never":
            return None
        layers = linear.eligible(model)
        if not layers:
            return None
        topic = f"factors of model {len(self._models)}" if len(self._models) > 1 else "factors"
        factoring = Factoring(layers, rule=rule, link=self._link, explain=partial(self._explain, topic))
        factoring.attach()
        return factoring

    def adopt(
        self, optimizer: Optimizer, overlap: Overlap, before: Callable[[], None], after: Callable[[], None]
    ) -> None:
        """Call `before` and `after` once around every step of an optimizer, deferred or not."""
        self._optimizers.append(optimizer)
        if overlap == "step" and self._group.size > 1:
            self._deferred.adopt(optimizer, before, after)
            return
        optimizer.register_step_pre_hook(lambda *_: before())
        if self._group.size > 1:
            optimizer.register_step_pre_hook(lambda _, args, kwargs: self._with_closure(args, kwargs))
        optimizer.register_step_post_hook(lambda *_: after())

    def _with_closure(self, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Let a step's closure return the loss of all workers, so that all take the same decisions."""
        closure = kwargs.get("closure") or next((one for one in args[1:] if callable(one)), None)
        if closure is None:
            return None

        def together() -> Any:
            return self._loss_of_all(closure())

        given = tuple(together if one is closure else one for one in args)
        return given, {**kwargs, "closure": together} if "closure" in kwargs else kwargs

    def _loss_of_all(self, loss: Any) -> Any:
        if not isinstance(loss, (Tensor, float)):
            return loss
        summed = bool(self._rules) and all(rules.loss == "sum" for rules in self._rules)
        own = loss.detach() if isinstance(loss, Tensor) else torch.tensor(loss)
        whole = (own.double().cpu() * (1.0 if summed else self.weight)).reshape(1).clone()
        self._group.all_reduce(whole).wait()
        if isinstance(loss, float):
            return float(whole)
        return whole.to(own.dtype).to(own.device).view(own.shape)

    def begin(self) -> None:
        """Refuse momentum that a codec applies too."""
        for optimizer in self._optimizers:
            self._encoding.check(optimizer)

    def keep(self, active: bool) -> None:
        """Keep gradients on this worker while `active`."""
        for reducer in self._reducers:
            reducer.active = not active

    def refresh(self, *, ended: bool, trains: bool) -> None:
        """At both ends of a pass: update for thawed layers, and share the leader's buffers."""
        self.settle()
        for reducer in self._reducers:
            reducer.refresh()
        for model in self._models:
            buffers = list(model.buffers())
            if buffers:
                agree.share_tensors(self._group, buffers)

    def weigh(self, weight: float, batch: int = 0) -> None:
        """Set the weight of this worker's loss; gradients that were kept before keep their weight."""
        if weight != self.weight:
            for reducer in self._reducers:
                if reducer.unreduced:
                    reducer.rescale(self.weight / weight)
        self.weight = weight

    def resolve_with(self, resolve: Callable[[], None]) -> None:
        """Call it before a weight is used."""
        self._resolve = resolve

    def before_step(self, optimizer: Optimizer, where: str) -> None:
        """Refuse a step on unreduced gradients; decide about factors after the first round."""
        self._check(optimizer, where)
        for factoring in self._factorings:
            factoring.consider()

    def not_reduced(self, optimizer: Optimizer) -> list[tuple[str, Tensor | None]]:
        """Its gradients, if it steps without a round since its last step; a deferred step has one."""
        rounds = sum(reducer.rounds for reducer in self._reducers)
        before, self._rounds_at_step[id(optimizer)] = self._rounds_at_step.get(id(optimizer), 0), rounds
        if rounds != before or self._deferred.active:
            return []
        held = {id(p) for p in _parameters(optimizer)}
        found = {name: p.grad for reducer in self._reducers for name, p in reducer.named if id(p) in held}
        return [] if all(grad is None for grad in found.values()) else list(found.items())

    def replicas(self) -> list[tuple[str, Tensor]]:
        """All parameters, once nothing is in flight."""
        self.settle()
        return [
            (agree.label(index, name), p.data)
            for index, model in enumerate(self._models)
            for name, p in model.named_parameters()
        ]

    def _check(self, optimizer: Optimizer, where: str) -> None:
        if not self._reducers:
            return
        held = {id(p) for p in _parameters(optimizer)}
        for reducer in self._reducers:
            missed = reducer.missed(held)
            if missed:
                raise ModelError(
                    f"parameter {missed} was thawed, and its gradient is this worker's only",
                    where=where,
                    fix="thaw it before the loop over the data begins, or before another backward pass",
                )
        if any(reducer.unreduced and reducer.touches(held) for reducer in self._reducers):
            raise ModelError(
                "optimizer.step() would apply gradients that the other workers do not have",
                where=where,
                fix="leave accumulate() for the last backward pass before each step, and let that end",
            )

    def settle(self) -> None:
        """Wait for deferred gradients, and apply them."""
        self._deferred.settle()

    def residuals(self) -> dict[str, Any]:
        """The codecs' residuals."""
        return self._encoding.residuals()

    def restore_residuals(self, residuals: Sequence[dict[str, Any]]) -> None:
        """Take over the residuals of a checkpoint's workers."""
        self._encoding.restore(residuals)

    def lost(self, slots: Sequence[int]) -> str:
        """What was lost with the states of codecs."""
        return self._encoding.lost(slots)

    def shared_state(self) -> dict[str, Any]:
        """The states of codecs, without residuals, and which layers send factors."""
        factors = [factoring.state() for factoring in self._factorings]
        return {"codecs": self._encoding.shared(), "factors": factors}

    def adopt_shared(self, state: dict[str, Any]) -> None:
        """Take over the states of codecs, and which layers send factors."""
        self._encoding.adopt(state["codecs"])
        for factoring, saved in zip(self._factorings, state["factors"], strict=True):
            factoring.adopt(saved)

    def finish(self) -> None:
        """Record what codecs could not encode, and their residuals."""
        self._encoding.report()

    def closed(self) -> None:
        """Wait for the codec threads, which have nothing in flight now."""
        self._encoding.join()

    def close(self) -> None:
        """Remove all hooks from models and optimizers."""
        self._encoding.close()
        self._deferred.close()
        for reducer in self._reducers:
            reducer.detach()
        for model in self._models:
            batchnorm.make_local(model)
            linear.detach(model)


def _nothing() -> None:
    """Nobody knows better than `weigh`."""


def _parameters(optimizer: Optimizer) -> Iterable[nn.Parameter]:
    for group in optimizer.param_groups:
        yield from group["params"]


def refuse_compiled(model: nn.Module) -> None:
    """Refuse a compiled module, whose parameters cannot be deferred."""
    compiled = ("OptimizedModule", "ScriptModule")
    kinds = [kind.__name__ for module in model.modules() for kind in type(module).__mro__]
    if any(name in compiled for name in kinds):
        raise ModelError(
            "a compiled module reads its parameters where nobody can wait for them",
            where='prepare(overlap="step")',
            fix='prepare with overlap="backward", or without torch.compile',
        )


def refuse_changes(rules: ModelOptions) -> None:
    """Refuse what cannot go on yet when a worker is lost."""
    found = (
        "a loss that is a sum"
        if rules.loss == "sum"
        else f"codec {rules.codec}"
        if rules.codec and not goes_on(rules.codec)
        else ""
    )
    if found:
        raise ModelError(
            f"{found} cannot go on yet when a worker is lost",
            where="prepare, --min-workers",
            fix='leave --min-workers out, or prepare(loss="mean")',
        )
