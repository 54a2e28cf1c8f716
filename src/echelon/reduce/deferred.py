"""overlap="step": parameters that are still to be updated, and gradients that are still on their way.

With it, `backward()` and `optimizer.step()` return while gradients travel. A parameter that is to be
updated is a LateParameter, a gradient on its way a LateGradient. Whoever uses one, be it the next forward
pass, gradient clipping, an exponential average or `state_dict()`, first waits for that bucket alone and has
the optimizer update its parameters, with the learning rate and all else as it was when `step()` was called.
So results are the same as without, and a forward pass waits only for what it is about to use.

Both are torch's own objects with another class for a while; afterwards nothing reminds of it.
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
from echelon.reduce.bucket import Bucket
from echelon.reduce.reducer import Reducer

# Looking at these does not read the parameter's values.
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
    """A gradient that is on its way; it is as valid as any once somebody has used it."""

    _echelon_plain: Tensor
    _echelon_settle: Callable[[], None]

    @classmethod
    def of(cls, plain: Tensor, settle: Callable[[], None]) -> DeferredGradient:
        """A gradient that will be in `plain`."""
        late: DeferredGradient = Tensor._make_subclass(cls, plain)
        late._echelon_plain = plain
        late._echelon_settle = settle
        return late

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
    """A bucket that has left, and who waits for it."""

    def __init__(self, reducer: Reducer, bucket: Bucket) -> None:
        self.reducer = reducer
        self.bucket = bucket
        self.gradients: dict[int, DeferredGradient] = {}
        self.before: dict[int, Tensor | None] = {}
        self.due: list[tuple[_DeferredStep, _Settings]] = []


_Settings = list[dict[str, Any]]  # an optimizer's, by parameter group, as they were


class DeferredSteps:
    """The buckets on their way of all models, and the optimizers that will use them."""

    def __init__(self) -> None:
        self._buckets: list[_InFlight] = []
        self._of: dict[int, _InFlight] = {}
        self._undo: list[Callable[[], None]] = []

    # From the reducer ----------------------------------------------------------------------------

    def take(self, reducer: Reducer, buckets: Sequence[Bucket]) -> None:
        """Let gradients land when they are used."""
        for bucket in buckets:
            late = _InFlight(reducer, bucket)
            self._buckets.append(late)
            for p, plain in zip(bucket.parameters, bucket.room(), strict=True):
                self._of[id(p)] = late
                gradient = DeferredGradient.of(plain, lambda late=late: self._settle(late))  # type: ignore[misc]
                late.gradients[id(p)] = gradient
                late.before[id(p)] = p.grad
                p.grad = gradient

    def settle(self) -> None:
        """Let everything land and be applied."""
        while self._buckets:
            self._settle(self._buckets[0])

    def _settle(self, late: _InFlight) -> None:
        """Let one bucket land, and meanwhile apply those that have landed already."""
        if late not in self._buckets:
            return
        if not late.bucket.lands_alone:  # in the same order on all workers, whichever is used first
            for other in self._buckets[: self._buckets.index(late)]:
                if not other.bucket.lands_alone:
                    self._apply(other)
        for other in list(self._buckets):
            if other is late or not other.bucket.lands_alone:
                continue
            if late.bucket.future is not None and late.bucket.future.done():
                break
            if other.bucket.future is not None and other.bucket.future.done():
                self._apply(other)
        self._apply(late)

    @torch.inference_mode(False)
    @torch.no_grad()
    def _apply(self, late: _InFlight) -> None:
        self._buckets.remove(late)
        replaced: list[tuple[nn.Parameter, Tensor | None]] = []  # by zero_grad() for example
        for p in late.bucket.parameters:
            del self._of[id(p)]
            restore(p)
            if p.grad is not late.gradients[id(p)]:
                replaced.append((p, p.grad))
            p.grad = late.before[id(p)]
        try:
            for p, gradient in late.reducer.receive(late.bucket):
                if gradient is not None:
                    p.grad = gradient
            late.bucket.reset()
            for stepping, settings in late.due:
                stepping.now(late.bucket.parameters, settings)
        finally:
            for p, now in replaced:
                p.grad = now

    # From optimizers -----------------------------------------------------------------------------

    def adopt(self, optimizer: Optimizer, before: Callable[[], None], after: Callable[[], None]) -> None:
        """Let this optimizer's `step` be late; `before` and `after` are called once for each."""
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
        """Give optimizers their own step back; what is still on its way never lands."""
        while self._buckets:
            late = self._buckets.pop()
            for p in late.bucket.parameters:
                self._of.pop(id(p), None)
                restore(p)
                if p.grad is late.gradients[id(p)]:
                    p.grad = late.before[id(p)]
        while self._undo:
            self._undo.pop()()

    def settle_due(self, stepping: _DeferredStep) -> None:
        """Let land what this optimizer still has to apply."""
        for late in list(self._buckets):
            if any(other is stepping for other, _ in late.due):
                self._settle(late)

    def postpone(self, stepping: _DeferredStep, settings: _Settings) -> list[nn.Parameter]:
        """Note that an update is due; returns the parameters whose gradients have landed already."""
        there: list[nn.Parameter] = []
        noted: list[_InFlight] = []
        for p in stepping.parameters():
            late = self._of.get(id(p))
            if late is None or p.grad is not late.gradients[id(p)]:
                there.append(p)
                continue
            if type(p) is not nn.Parameter:  # somebody else's class: it stays what it is
                self._settle(late)
                there.append(p)
                continue
            p.__class__ = DeferredParameter
            p._echelon_settle = lambda late=late: self._settle(late)  # type: ignore[attr-defined]
            if late not in noted:
                noted.append(late)
                late.due.append((stepping, settings))
        return there


class _DeferredStep:
    """Stands in for an optimizer's `step`."""

    def __init__(
        self,
        optimizer: Optimizer,
        late: DeferredSteps,
        before: Callable[[], None],
        after: Callable[[], None],
    ) -> None:
        _refuse(optimizer)
        self._optimizer = optimizer
        self._late = late
        self._before = before
        self._after = after
        self._step = getattr(type(optimizer).step, "__wrapped__", type(optimizer).step)
        self._wrapped_by_lr_sched = True  # schedulers ask for it: what they would note is noted below

    def __call__(self, closure: Any = None) -> None:
        if closure is not None:
            raise ConfigError(
                "a step with a closure computes gradients of its own, which cannot be late",
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
        self._late.settle_due(self)
        there = self._late.postpone(self, settings)
        if any(p.grad is not None for p in there):
            with torch.no_grad():
                self.now(there, settings)
        self._after()

    def parameters(self) -> Iterator[nn.Parameter]:
        """All parameters that it updates."""
        for group in self._optimizer.param_groups:
            yield from group["params"]

    def now(self, parameters: Sequence[nn.Parameter], settings: _Settings) -> None:
        """Update these parameters only, with settings as they were."""
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
    """Make a late parameter an ordinary one."""
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
    """What is not known to update every parameter by itself is refused."""
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
