"""overlap="step": deferred parameters, whose update is due, and deferred gradients, which are in flight.

`backward()` and `optimizer.step()` return while gradients are in flight. Any use of a deferred parameter or
gradient (the next forward pass, gradient clipping, an exponential average, `state_dict()`) first waits for
its bucket alone and lets the optimizer update the bucket's parameters, with the learning rate and all other
settings as they were when `step()` was called. So results are the same as without overlap, and a forward
pass waits only for the parameters that it uses. Where members may be lost, a round counts as a whole: the
first use waits for all of its buckets.

Both are torch's own objects that have another class for a while.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer
from torch.utils._pytree import tree_leaves, tree_map

from echelon.errors import ConfigError, ModelError
from echelon.reduce.bucket import Bucket, Landed
from echelon.reduce.reducer import Reducer

# These attributes do not read the parameter's values.
_LOOKS = ("dtype", "device", "shape", "requires_grad", "is_leaf", "is_cuda", "layout", "ndim", "grad")
_HARMLESS = {getattr(Tensor, name).__get__ for name in _LOOKS} | {
    getattr(vars(torch._C.TensorBase)["grad"], change) for change in ("__set__", "__delete__")
}


class DeferredParameter(nn.Parameter):
    """A parameter whose update is due."""

    _echelon_settle: Callable[[], None]

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _HARMLESS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        for leaf in tree_leaves((args, kwargs)):
            if type(leaf) is DeferredParameter:
                leaf._echelon_settle()
        return func(*args, **(kwargs or {}))

    def __reduce_ex__(self, protocol: Any) -> Any:
        self._echelon_settle()
        return self.__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        self._echelon_settle()
        return copy.deepcopy(self, memo)


class DeferredGradient(Tensor):
    """A gradient in flight; after its first use it has its values."""

    _echelon_plain: Tensor
    _echelon_settle: Callable[[], None]

    @classmethod
    def of(cls, plain: Tensor, settle: Callable[[], None]) -> DeferredGradient:
        """A gradient whose values will be in `plain`."""
        deferred: DeferredGradient = Tensor._make_subclass(cls, plain)
        deferred._echelon_plain = plain
        deferred._echelon_settle = settle
        return deferred

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        def landed(leaf: Any) -> Any:
            if type(leaf) is not DeferredGradient:
                return leaf
            leaf._echelon_settle()
            return leaf._echelon_plain

        args, kwargs = tree_map(landed, (args, kwargs or {}))
        return func(*args, **kwargs)


class _InFlight:
    """Buckets in flight that land together, and the optimizer steps that wait for them."""

    def __init__(self, reducer: Reducer, buckets: Sequence[Bucket]) -> None:
        self.reducer = reducer
        self.parameters = [p for bucket in buckets for p in bucket.parameters]
        self._bucket = buckets[0]
        self._whole = reducer.lands_whole
        self.gradients: dict[int, DeferredGradient] = {}
        self.before: dict[int, Tensor | None] = {}
        self.due: list[tuple[_DeferredStep, _Settings]] = []

    @property
    def lands_alone(self) -> bool:
        """Whether the order in which it lands does not matter to other workers."""
        return self._bucket.lands_alone and not self._whole

    @property
    def has_landed(self) -> bool:
        """Whether the sums are here."""
        return self._bucket.future is not None and self._bucket.future.done()

    def land(self) -> Landed:
        """Wait for the sums."""
        if self._whole:
            landed = self.reducer.land()
            for p, gradient in landed:  # buckets may have been made anew
                if gradient is not None:
                    self.gradients[id(p)]._echelon_plain = gradient
            return landed
        landed = self.reducer.receive(self._bucket)
        self._bucket.reset()
        return landed


_Settings = list[dict[str, Any]]  # an optimizer's, by parameter group, at the time of `step()`


class DeferredSteps:
    """The rounds in flight of all models, and the optimizers that will use them."""

    def __init__(self) -> None:
        self._buckets: list[_InFlight] = []
        self._of: dict[int, _InFlight] = {}
        self._undo: list[Callable[[], None]] = []

    @property
    def active(self) -> bool:
        """Whether any optimizer's steps are deferred."""
        return bool(self._undo)

    # From the reducer ----------------------------------------------------------------------------

    def take(self, reducer: Reducer, buckets: Sequence[Bucket]) -> None:
        """Defer these buckets' gradients until they are used."""
        if not buckets:
            return
        for together in [buckets] if reducer.lands_whole else [[bucket] for bucket in buckets]:
            deferred = _InFlight(reducer, together)
            self._buckets.append(deferred)
            memory = [plain for bucket in together for plain in bucket.memory()]
            for p, plain in zip(deferred.parameters, memory, strict=True):
                self._of[id(p)] = deferred
                gradient = DeferredGradient.of(plain, lambda deferred=deferred: self._settle(deferred))  # type: ignore[misc]
                deferred.gradients[id(p)] = gradient
                deferred.before[id(p)] = p.grad
                p.grad = gradient

    def settle(self) -> None:
        """Wait for all buckets, and apply them."""
        while self._buckets:
            self._settle(self._buckets[0])

    def _settle(self, deferred: _InFlight) -> None:
        """Wait for one bucket; meanwhile apply those that have arrived."""
        if deferred not in self._buckets:
            return
        if not deferred.lands_alone:  # all workers must take these in the same order
            for other in self._buckets[: self._buckets.index(deferred)]:
                if not other.lands_alone:
                    self._apply(other)
        for other in list(self._buckets):
            if other is deferred or not other.lands_alone:
                continue
            if deferred.has_landed:
                break
            if other.has_landed:
                self._apply(other)
        self._apply(deferred)

    @torch.inference_mode(False)
    @torch.no_grad()
    def _apply(self, deferred: _InFlight) -> None:
        self._buckets.remove(deferred)
        replaced: list[tuple[nn.Parameter, Tensor | None]] = []  # by zero_grad() for example
        for p in deferred.parameters:
            del self._of[id(p)]
            restore(p)
            if p.grad is not deferred.gradients[id(p)]:
                replaced.append((p, p.grad))
            p.grad = deferred.before[id(p)]
        try:
            for p, gradient in deferred.land():
                if gradient is not None:
                    p.grad = gradient
            for stepping, settings in deferred.due:
                stepping.now(deferred.parameters, settings)
        finally:
            for p, now in replaced:
                p.grad = now

    # From optimizers -----------------------------------------------------------------------------

    def adopt(self, optimizer: Optimizer, before: Callable[[], None], after: Callable[[], None]) -> None:
        """Defer this optimizer's steps; `before` and `after` are called once for each."""
        stepping = _DeferredStep(optimizer, self, before, after)
        own = vars(optimizer).get("step")  # a scheduler's, perhaps
        handles = [
            optimizer.register_state_dict_pre_hook(lambda _: self.settle()),
            optimizer.register_load_state_dict_pre_hook(lambda *_: self.settle()),
        ]
        vars(optimizer)["step"] = stepping

        def undo() -> None:
            for handle in handles:
                handle.remove()
            del vars(optimizer)["step"]
            if own is not None:
                vars(optimizer)["step"] = own

        self._undo.append(undo)

    def close(self) -> None:
        """Restore the optimizers' own steps; buckets in flight are dropped."""
        while self._buckets:
            deferred = self._buckets.pop()
            for p in deferred.parameters:
                self._of.pop(id(p), None)
                restore(p)
                if p.grad is deferred.gradients[id(p)]:
                    p.grad = deferred.before[id(p)]
        while self._undo:
            self._undo.pop()()

    def settle_due(self, stepping: _DeferredStep) -> None:
        """Wait for the buckets that this optimizer still has to apply."""
        for deferred in list(self._buckets):
            if any(other is stepping for other, _ in deferred.due):
                self._settle(deferred)

    def postpone(self, stepping: _DeferredStep, settings: _Settings) -> list[nn.Parameter]:
        """Note that an update is due; returns the parameters whose gradients have arrived."""
        there: list[nn.Parameter] = []
        noted: list[_InFlight] = []
        for p in stepping.parameters():
            deferred = self._of.get(id(p))
            if deferred is None or p.grad is not deferred.gradients[id(p)]:
                there.append(p)
                continue
            if type(p) is not nn.Parameter:  # a subclass: its class must not change
                self._settle(deferred)
                there.append(p)
                continue
            p.__class__ = DeferredParameter
            p._echelon_settle = lambda deferred=deferred: self._settle(deferred)  # type: ignore[attr-defined]
            if deferred not in noted:
                noted.append(deferred)
                deferred.due.append((stepping, settings))
        return there


class _DeferredStep:
    """Replaces an optimizer's `step`."""

    def __init__(
        self,
        optimizer: Optimizer,
        deferred: DeferredSteps,
        before: Callable[[], None],
        after: Callable[[], None],
    ) -> None:
        _refuse(optimizer)
        self._optimizer = optimizer
        self._deferred = deferred
        self._before = before
        self._after = after
        self._step = getattr(type(optimizer).step, "__wrapped__", type(optimizer).step)
        self._wrapped_by_lr_sched = True  # schedulers check it; `_opt_called` is set below

    def __call__(self, closure: Any = None) -> None:
        if closure is not None:
            raise ConfigError(
                "a step with a closure computes gradients of its own, which cannot be deferred",
                where='overlap="step"',
                fix='prepare with overlap="backward"',
            )
        _refuse(self._optimizer)
        self._before()
        self._optimizer._opt_called = True  # type: ignore[attr-defined]
        settings = [
            {name: _kept(value) for name, value in group.items() if name != "params"}
            for group in self._optimizer.param_groups
        ]
        self._deferred.settle_due(self)
        there = self._deferred.postpone(self, settings)
        if any(p.grad is not None for p in there):
            with torch.no_grad():
                self.now(there, settings)
        self._after()

    def parameters(self) -> Iterator[nn.Parameter]:
        """The optimizer's parameters."""
        for group in self._optimizer.param_groups:
            yield from group["params"]

    def now(self, parameters: Sequence[nn.Parameter], settings: _Settings) -> None:
        """Update these parameters only, with the given settings."""
        wanted = {id(p) for p in parameters}
        groups = self._optimizer.param_groups
        with _restored(groups):
            for added in groups[len(settings) :]:
                added["params"] = []
            for group, then in zip(groups, settings, strict=False):
                group.update(then)
                group["params"] = [p for p in group["params"] if id(p) in wanted]
            self._step(self._optimizer)


def restore(p: nn.Parameter) -> None:
    """Make a deferred parameter an ordinary one."""
    if type(p) is DeferredParameter:
        del p._echelon_settle
        p.__class__ = nn.Parameter  # type: ignore[assignment]


@contextmanager
def _restored(groups: list[dict[str, Any]]) -> Iterator[None]:
    kept = [dict(group) for group in groups]
    try:
        yield
    finally:
        for group, then in zip(groups, kept, strict=True):
            group.update(then)


def _kept(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _refuse(optimizer: Optimizer) -> None:
    """Raise an error unless the optimizer is known to update each parameter independently."""
    kind = type(optimizer)
    if isinstance(optimizer, LBFGS) or not kind.__module__.startswith("torch.optim"):
        raise ConfigError(
            f"{kind.__name__} may update parameters together, so it cannot update them one by one",
            where='overlap="step"',
            fix='use an optimizer of torch.optim, or prepare with overlap="backward"',
        )
    if len(optimizer._optimizer_step_pre_hooks) or len(optimizer._optimizer_step_post_hooks):
        raise ModelError(
            f"{kind.__name__} has step hooks, which would run before its updates are done",
            where='overlap="step"',
            fix='remove them, or prepare with overlap="backward"',
        )
