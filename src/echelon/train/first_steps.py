"""What does a script's own model cost? Learned from its first steps; nothing is declared, no pass is added.

Thin hooks write down when a step's forward begins and when each gradient is ready. After some steps they
are removed, and what they wrote is folded into a JobProfile (`fold_steps`, pure):

    ready_at     of each parameter: the median over the steps, as a fraction of forward and backward
    cost         fixed_s + s * per_sample_s, fitted, if the share s varied; else all of it is per sample
    memory       the process's largest resident size, so far; nothing is known about a single sample

The first two steps are not used: they load code. A pass without gradients, or in evaluation mode, is not a
step. Several backward passes before an update count as one step each.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from echelon.plan.job import ComputeCost, JobProfile, Layer
from echelon.train import batchnorm, linear

STEPS = 10
_SKIPPED = 2
_SHORTEST_S = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSeen:
    """One forward and backward pass.

    samples  the worker's share; 0 if unknown
    took_s   from the begin of forward to the last gradient
    ready_s  by parameter, since the begin of forward
    """

    samples: int
    took_s: float
    ready_s: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What is known of a model without running it: its trained parameters, in order."""

    name: str
    batch: int
    layers: tuple[Layer, ...]
    exchanges: int = 0
    base_bytes: float = 0.0


def fold_steps(facts: ModelFacts, steps: Sequence[StepSeen], apply_s: float = 0.0) -> JobProfile:
    """The profile, from at least one step. A parameter whose gradient was not seen is ready at 1."""
    used = steps[_SKIPPED:] or steps
    ready: dict[str, list[float]] = {}
    for step in used:
        for name, at_s in step.ready_s.items():
            ready.setdefault(name, []).append(min(1.0, max(0.0, at_s / max(_SHORTEST_S, step.took_s))))
    layers = tuple(
        Layer(
            name=layer.name,
            size_bytes=layer.size_bytes,
            ready_at=median(ready.get(layer.name, [1.0])),
            factors=layer.factors,
            rows=layer.rows,
        )
        for layer in facts.layers
    )
    return JobProfile(
        name=facts.name,
        batch=facts.batch,
        cost=fitted_cost(used, apply_s),
        layers=layers,
        base_bytes=facts.base_bytes,
        exchanges=facts.exchanges,
    )


def fitted_cost(steps: Sequence[StepSeen], apply_s: float = 0.0) -> ComputeCost:
    """A line through the medians by share, with least relative errors; through 0 with one share."""
    by_share: dict[int, list[float]] = {}
    for step in steps:
        by_share.setdefault(max(1, step.samples), []).append(max(_SHORTEST_S, step.took_s))
    shares = np.array(list(by_share), dtype=float)
    times = np.array([median(seconds) for seconds in by_share.values()])
    proportional = float((shares / times).sum() / ((shares / times) ** 2).sum())
    if len(shares) == 1:
        return ComputeCost(fixed_s=0.0, per_sample_s=proportional, apply_s=apply_s)
    scaled = np.stack([1 / times, shares / times], axis=1)
    (fixed_s, per_sample_s), *_ = np.linalg.lstsq(scaled, np.ones(len(times)), rcond=None)
    if fixed_s < 0:
        fixed_s, per_sample_s = 0.0, proportional
    elif per_sample_s < 0:
        fixed_s, per_sample_s = float(times.mean()), 0.0
    return ComputeCost(fixed_s=float(fixed_s), per_sample_s=float(per_sample_s), apply_s=apply_s)


class StepProfiler:
    """Watches a prepared model for some steps, then calls `done` with its profile and removes its hooks.

        profiler = StepProfiler(model, name="net", batch=64, done=keep)   # before the synchronizer adds it
        profiler.attach()                                                # after

    Made before the model has other hooks, because those hide which layers have factors; attached after, so
    that it sees gradients when they have been handed over. `done` is called once, in the forward pass that
    follows the last watched step; with `failed`, what is raised there goes to it and not into that pass.
    `waited_s` tells how long this worker has waited for others so far, which is not computing. A share is
    the first dimension of the forward pass's first positional tensor; without one, `share` tells it.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        name: str,
        batch: int,
        done: Callable[[JobProfile], None],
        failed: Callable[[Exception], None] | None = None,
        waited_s: Callable[[], float] = lambda: 0.0,
        share: Callable[[], int] = lambda: 0,
        steps: int = STEPS,
    ) -> None:
        self._model = model
        self._facts = facts_of(model, name, batch)
        self._done = done
        self._failed = failed
        self._waited_s = waited_s
        self._share = share
        self._wanted = steps
        self._seen: list[StepSeen] = []
        self._began: float | None = None
        self._samples = 0
        self._ready: dict[str, float] = {}
        self._handles: list[Any] = []

    @property
    def attached(self) -> bool:
        """Whether it watches."""
        return bool(self._handles)

    def attach(self) -> None:
        """Begin to watch. The owner tells when the model is called (`called`).

        Not by a hook: copies and pickles of a module have its hooks, and torch warns of global ones.
        """
        self._handles = []
        for key, parameter in self._model.named_parameters():
            if parameter.requires_grad:
                self._handles.append(parameter.register_post_accumulate_grad_hook(self._mark(key)))

    def detach(self) -> None:
        """Stop watching; nothing of it is left in the model."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def profile(self) -> JobProfile:
        """What the steps so far tell; at least one is needed."""
        return fold_steps(replace(self._facts, base_bytes=float(_peak_bytes())), self._seen)

    def _now(self) -> float:
        """The time, without what was waited."""
        return time.perf_counter() - self._waited_s()

    def _mark(self, key: str) -> Callable[[Tensor], None]:
        def ready(_: Tensor) -> None:
            self._ready[key] = self._now()

        return ready

    def called(self, module: nn.Module, given: tuple[Any, ...]) -> None:
        """A module is called. If it is the watched one, the step before is over."""
        if module is not self._model or not self.attached:
            return
        self._close_step()
        if len(self._seen) >= self._wanted:
            self.detach()
            self._end()
        elif self._model.training and torch.is_grad_enabled():
            tensors = (each for each in given if isinstance(each, Tensor) and each.dim())
            first = next(tensors, None)
            self._samples = self._share() if first is None else int(first.shape[0])
            self._began = self._now()

    def _end(self) -> None:
        try:
            self._done(self.profile())
        except Exception as error:
            if self._failed is None:
                raise
            self._failed(error)

    def _close_step(self) -> None:
        began, self._began = self._began, None
        ready, self._ready = self._ready, {}
        if began is not None and ready:
            self._seen.append(
                StepSeen(
                    samples=self._samples,
                    took_s=max(_SHORTEST_S, max(ready.values()) - began),
                    ready_s={key: at - began for key, at in ready.items()},
                )
            )


def facts_of(model: nn.Module, name: str, batch: int) -> ModelFacts:
    """The trained parameters of a model that has no hooks yet."""
    shapes = {
        f"{key}.weight".lstrip("."): layer.weight.shape for key, layer in linear.eligible(model).items()
    }
    return ModelFacts(
        name=name,
        batch=batch,
        layers=tuple(
            Layer(
                name=key,
                size_bytes=p.numel() * p.element_size(),
                factors=(int(shapes[key][0]), int(shapes[key][1])) if key in shapes else (0, 0),
            )
            for key, p in model.named_parameters()
            if p.requires_grad
        ),
        exchanges=2 * len(batchnorm.layers(model)),
    )


def _peak_bytes() -> int:
    """The process's largest resident size; the system counts KiB, or bytes on macOS."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
