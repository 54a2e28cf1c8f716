"""When are divided parameters whole? While a module computes with them, forward and backward.

The first call of the model shows which module uses which parameters: all are whole then. From then on
they are gathered when such a module begins, and given back when it ends; in the backward pass they are
gathered when a gradient reaches its output, and given back when their own gradients are complete. A
parameter that is used outside the modules that used it before has the wrong shape there, and torch says
so.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from echelon.parallel.shards import ShardedModel, ShardedParameter


class GatheredParameters:
    """Gathers and gives back the parameters of one model with shards of level 3."""

    def __init__(self, model: nn.Module, shards: ShardedModel) -> None:
        self._model = model
        self._shards = shards
        self._uses: dict[nn.Module, dict[int, ShardedParameter]] = {}
        self._known = False
        self._inside: list[nn.Module] = []
        self._mode: _Uses | None = None
        self._users: dict[int, int] = {}  # modules that compute with a parameter now
        self._handles: list[Any] = []
        for module in model.modules():
            self._handles += [
                module.register_forward_pre_hook(self._enters),
                module.register_forward_hook(self._leaves, always_call=True),
            ]
        self._handles += [
            model.register_state_dict_pre_hook(lambda *_: self.lend()),
            model.register_state_dict_post_hook(lambda *_: self.take_back()),
            model.register_load_state_dict_pre_hook(lambda *_: self.lend(values=False)),
            model.register_load_state_dict_post_hook(lambda *_: self.loaded()),
            *(
                one.parameter.register_post_accumulate_grad_hook(lambda p: self._computed(p))
                for one in shards.parameters
            ),
        ]

    # Forward ---------------------------------------------------------------------------------------

    def _enters(self, module: nn.Module, _args: Any) -> None:
        if self._known:
            self._gather(self._used_by(module))
            return
        if module is self._model and self._mode is None:
            self._mode = _Uses(self)
            self._mode.__enter__()  # type: ignore[no-untyped-call]
        self._inside.append(module)

    def _leaves(self, module: nn.Module, _args: Any, output: Any) -> None:
        if not self._known:
            if self._inside and self._inside[-1] is module:
                self._inside.pop()
            if self._mode is not None:
                self._watch(module, output)
            if module is self._model and self._mode is not None:
                self._mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
                self._mode, self._known = None, True
                self._give_back(self._shards.parameters)
            return
        self._watch(module, output)
        self._release(self._used_by(module))

    def used(self, parameter: Tensor) -> None:
        """The first call computes with a parameter, in the innermost module."""
        one = self._shards.of(parameter)
        if one is not None and self._inside:
            self._uses.setdefault(self._inside[-1], {})[id(one)] = one

    def _used_by(self, module: nn.Module) -> list[ShardedParameter]:
        return list(self._uses.get(module, {}).values())

    # Backward --------------------------------------------------------------------------------------

    def _watch(self, module: nn.Module, output: Any) -> None:
        if module not in self._uses:
            return
        for leaf in pytree.tree_leaves(output):
            if isinstance(leaf, Tensor) and leaf.grad_fn is not None:
                leaf.register_hook(lambda _grad: self._fill(self._used_by(module)))

    def _computed(self, parameter: Tensor) -> None:
        one = self._shards.of(parameter)
        if self._known and one is not None:
            self._give_back([one])

    # Memory ----------------------------------------------------------------------------------------

    def _gather(self, wanted: Sequence[ShardedParameter]) -> None:
        self._fill([one for one in wanted if not self._users.get(id(one))])
        for one in wanted:
            self._users[id(one)] = self._users.get(id(one), 0) + 1

    def _release(self, used: Sequence[ShardedParameter]) -> None:
        for one in used:
            self._users[id(one)] -= 1
        self._give_back([one for one in used if not self._users[id(one)]])

    @torch.no_grad()
    def _fill(self, wanted: Sequence[ShardedParameter]) -> None:
        """Gather the values of parameters that are slices now."""
        missing = [one for one in wanted if one.cut]
        for one in missing:
            _resize(one, one.length)
        self._shards.gather(missing)
        for one in missing:
            one.show_whole()

    def _give_back(self, parameters: Sequence[ShardedParameter]) -> None:
        for one in parameters:
            if not one.cut:
                one.show_slice()
                _resize(one, 0)

    # State -----------------------------------------------------------------------------------------

    @torch.no_grad()
    def lend(self, *, values: bool = True) -> None:
        """Show whole parameters in memory that others may keep; with `values` all workers call this."""
        cut = [one for one in self._shards.parameters if one.cut]
        if values:
            self._fill(cut)
        for one in cut:
            one.parameter.data = (
                one.whole.clone() if values else torch.empty(one.length, dtype=one.mine.dtype)
            ).view(one.shape)
            one.cut = False

    def take_back(self) -> None:
        """Slices again, if parameters are slices between passes."""
        if self._known:
            self._give_back(self._shards.parameters)

    @torch.no_grad()
    def loaded(self) -> None:
        """Keep this worker's slices of what was loaded."""
        for one in self._shards.parameters:
            begin, end = one.edges[self._shards.rank]
            one.mine.copy_(one.parameter.data.reshape(-1)[begin:end])
        self.take_back()

    def close(self) -> None:
        """Give the module back; its parameters stay slices."""
        for handle in self._handles:
            handle.remove()


def _resize(one: ShardedParameter, length: int) -> None:
    """Give back the memory of whole values, or take it again; views that autograd keeps stay valid."""
    storage = one.whole.untyped_storage()
    if storage.resizable():  # not if numpy has seen it, as with batch normalisation
        storage.resize_(length * one.whole.element_size())


class _Uses(TorchFunctionMode):
    """Tells which parameters are computed with."""

    def __init__(self, gathered: GatheredParameters) -> None:
        super().__init__()
        self._gathered = gathered

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for leaf in pytree.tree_leaves((tuple(args), kwargs or {})):
            if isinstance(leaf, nn.Parameter):
                self._gathered.used(leaf)
        return func(*args, **(kwargs or {}))
