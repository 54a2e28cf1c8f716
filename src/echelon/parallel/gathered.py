"""When are divided parameters whole? While a module computes with them, forward and backward.

The first call of the model shows which module uses which parameters: all are whole then. From then on
they are whole when such a module begins, and given back when it ends; in the backward pass they are
whole when a gradient reaches its output, and given back when their own gradients are complete. A
parameter that is used outside the modules that used it before has the wrong shape there, and torch says
so.

The first call also shows the order of modules. While one computes, gathers for the next are under way
already, at most two; in the backward pass for the one before. What was fetched and then not used is given
back when the pass ends. What is fetched when depends on the order of modules only, never on time: so all
workers begin the same gathers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from echelon.parallel.shards import ShardedModel, ShardedParameter
from echelon.parallel.value_gather import ValuesUnderWay, together

_MOST_FETCHED = 2  # gathers under way for modules that have not begun
_LOOK_AHEAD = 4  # modules


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
        self._order: list[nn.Module] = []  # the modules that use parameters, as the first call runs them
        self._next = 0  # the position in that order of the module that comes next
        self._positions: list[int] = []  # of the modules that compute now; -1: not in the order
        self._fetched: list[ValuesUnderWay] = []
        self.quiet = False  # state_dict has shapes only, and does not ask the other workers
        shards.backward_ends = self._pass_ends
        self._handles: list[Any] = []
        for module in model.modules():
            self._handles += [
                module.register_forward_pre_hook(self._enters),
                module.register_forward_hook(self._leaves, always_call=True),
            ]
        self._handles += [
            model.register_state_dict_pre_hook(lambda *_: self.lend(values=not self.quiet)),
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
            self._begins(module)
            return
        if module is self._model and self._mode is None:
            self._mode = _Uses(self)
            self._mode.__enter__()  # type: ignore[no-untyped-call]
        self._inside.append(module)
        self._order.append(module)

    def _begins(self, module: nn.Module) -> None:
        """A module whose parameters are known begins: they are whole now, and those of the next coming."""
        if module is self._model and not self._shards.in_backward:
            self._pass_ends()  # a pass that an error has ended
            self._next = 0
            self._positions.clear()
        used = self._used_by(module)
        position = self._position(module) if used else -1
        self._positions.append(position)
        self._gather(used)
        if position >= 0:
            self._next = position + 1
            if not self._shards.in_backward:  # else it is computed again for its backward pass
                self._fetch(self._order[self._next : self._next + _LOOK_AHEAD])

    def _position(self, module: nn.Module) -> int:
        """Where the module is in the order: at the next place where it comes, or the first one."""
        later = (at for at in range(self._next, len(self._order)) if self._order[at] is module)
        found = next(later, -1)
        return found if found >= 0 or module not in self._order else self._order.index(module)

    def _leaves(self, module: nn.Module, _args: Any, output: Any) -> None:
        if not self._known:
            if self._inside and self._inside[-1] is module:
                self._inside.pop()
            if self._mode is not None:
                self._watch(module, output, -1)
            if module is self._model and self._mode is not None:
                self._mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
                self._mode, self._known = None, True
                self._order = [one for one in self._order if one in self._uses]
                self._give_back(self._shards.parameters)
            return
        position = self._positions.pop() if self._positions else -1
        self._watch(module, output, position)
        self._release(self._used_by(module))
        if module is self._model and output is not None:
            self._pass_ends()

    def used(self, parameter: Tensor) -> None:
        """The first call computes with a parameter, in the innermost module."""
        one = self._shards.of(parameter)
        if one is not None and self._inside:
            self._uses.setdefault(self._inside[-1], {})[id(one)] = one

    def _used_by(self, module: nn.Module) -> list[ShardedParameter]:
        return list(self._uses.get(module, {}).values())

    # Backward --------------------------------------------------------------------------------------

    def _watch(self, module: nn.Module, output: Any, position: int) -> None:
        if module not in self._uses:
            return

        def reached(_grad: Tensor) -> None:
            self._fill(self._used_by(module))
            if position > 0:
                self._fetch(self._order[max(0, position - _LOOK_AHEAD) : position][::-1])

        for leaf in pytree.tree_leaves(output):
            if isinstance(leaf, Tensor) and leaf.grad_fn is not None:
                leaf.register_hook(reached)

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
        if not self._shards.in_backward:  # else it was computed again, and its backward pass follows
            self._give_back([one for one in used if not self._users[id(one)]])

    @torch.no_grad()
    def _fill(self, wanted: Sequence[ShardedParameter]) -> None:
        """Gather the values of parameters that are slices now, or wait for gathers that have begun."""
        missing = {id(one) for one in wanted if one.cut}
        if not missing:
            return
        coming = {id(one) for flight in self._fetched for one in flight.members}
        flights = self._begin([one for one in wanted if id(one) in missing - coming])
        for flight in [*self._fetched, *flights]:
            if any(id(one) in missing for one in flight.members):
                self._land(flight)

    def _begin(self, wanted: Sequence[ShardedParameter]) -> list[ValuesUnderWay]:
        for one in wanted:
            _resize(one, one.length)
        return self._shards.values.begin(wanted)

    def _land(self, flight: ValuesUnderWay) -> None:
        self._shards.values.land(flight)
        self._fetched = [one for one in self._fetched if one is not flight]
        for one in flight.members:
            one.show_whole()

    @torch.no_grad()
    def _fetch(self, modules: Sequence[nn.Module]) -> None:
        """Begin to gather what these modules will use, as far as few gathers are under way."""
        for module in modules:
            coming = {id(one) for flight in self._fetched for one in flight.members}
            wanted = [one for one in self._used_by(module) if one.cut and id(one) not in coming]
            for members in together(wanted):
                if len(self._fetched) >= _MOST_FETCHED:
                    return
                self._fetched += self._begin(members)

    def _pass_ends(self) -> None:
        """A forward or backward pass is over: nothing stays whole that no module computes with."""
        for flight in list(self._fetched):
            self._land(flight)
        if self._known:
            self._give_back([one for one in self._shards.parameters if not self._users.get(id(one))])

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
