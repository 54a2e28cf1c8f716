"""When are a stage's divided parameters whole? While a layer of the stage computes with them.

They are gathered when a layer's pass begins, and given back when it ends; in the backward pass they are
gathered when a gradient reaches what the layer yields, and given back when their own gradient is complete.
While a layer computes, the gather for the next one is under way: the one after it forward, the one before
it backward. What is gathered when depends on the order of layers and of the schedule's passes only, never
on time, so all workers of a stage begin the same gathers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from echelon.parallel.chain import Given, LayerChain
from echelon.parallel.shards import ShardedParameter
from echelon.parallel.stage_shards import StageShards, resize
from echelon.parallel.value_gather import ValuesUnderWay


class GatheredLayers(LayerChain):
    """A chain of which a worker runs some `layers`, one by one, with divided parameters."""

    def __init__(
        self, chain: LayerChain, model: nn.Module, shards: StageShards, layers: Sequence[int]
    ) -> None:
        self._chain = chain
        self._shards = shards
        self.names, self.closed = chain.names, chain.closed
        named = dict(model.named_parameters(remove_duplicate=False))
        self._of: dict[int, list[ShardedParameter]] = {}
        for at in layers:
            used = {id(named[name]) for name in chain.holds(at, at + 1) if name in named}
            self._of[at] = [one for one in shards.parameters if id(one.parameter) in used]
        self._coming: list[ValuesUnderWay] = []
        self._handles = [one.parameter.register_hook(self._given_back(one)) for one in shards.parameters]

    def _given_back(self, one: ShardedParameter) -> Callable[[Tensor], None]:
        return lambda _grad: self._shards.give_back([one])

    def holds(self, begin: int, end: int) -> set[str]:
        """What the layers hold."""
        return self._chain.holds(begin, end)

    def run(self, begin: int, end: int, given: Given, carried: Sequence[Any]) -> tuple[Any, ...]:
        """Run the layers, each with whole parameters."""
        self.end_pass()
        values: Any = carried
        for at in range(begin, end):
            self._fill(at, following=at + 1)
            before = {id(one): one.grad_fn for one in _tensors(values)}
            values = self._chain.run(at, at + 1, given, values)
            if torch.is_grad_enabled() and self._of[at]:
                self._watch(at, before, _tensors(values))
            self._shards.give_back(self._of[at])
        result: tuple[Any, ...] = values
        return result

    def _watch(self, at: int, before: Mapping[int, Any], yielded: Sequence[Tensor]) -> None:
        """Gather a layer's parameters when a gradient reaches what it yields itself."""

        def reached(_grad: Tensor) -> None:
            self._fill(at, following=at - 1)

        for one in yielded:
            if one.grad_fn is not None and before.get(id(one)) is not one.grad_fn:
                one.register_hook(reached)

    @torch.no_grad()
    def _fill(self, at: int, *, following: int) -> None:
        """A layer's parameters are whole, and those of the layer that follows are under way."""
        self._land()
        missing = [one for one in self._of[at] if one.cut]
        self._shards.fill(missing)
        wanted = [one for one in self._of.get(following, ()) if one.cut]
        for one in wanted:
            resize(one, one.length)
        self._coming = self._shards.values.begin(wanted)

    def _land(self) -> None:
        """Wait for what is under way."""
        coming, self._coming = self._coming, []
        for flight in coming:
            self._shards.values.land(flight)
            for one in flight.members:
                one.show_whole()

    @torch.no_grad()
    def end_pass(self) -> None:
        """No pass is under way: nothing stays whole."""
        self._land()
        self._shards.give_back(self._shards.parameters)

    def close(self) -> None:
        """Watch parameters no longer."""
        for handle in self._handles:
            handle.remove()


def _tensors(values: Any) -> list[Tensor]:
    return [one for one in pytree.tree_leaves(values) if isinstance(one, Tensor)]
