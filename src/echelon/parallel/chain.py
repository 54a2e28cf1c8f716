"""A model as a chain of layers that can be cut anywhere, with its own modules and parameters.

    nn.Sequential     its children, nested Sequentials included
    any other module  its operations in the order in which they run, traced with torch.fx (`traced.py`);
                      a loop over a ModuleList becomes its layers, one after another

No cut comes before a layer that changes its input in place: a received activation is kept for the
backward pass.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from echelon.errors import ModelError

Given = tuple[tuple[Any, ...], Mapping[str, Any]]


class LayerChain(ABC):
    """Layers, numbered from 0. `names` are how users know them; `closed`: no cut comes before these."""

    names: Sequence[str]
    closed: frozenset[int]

    @abstractmethod
    def run(self, begin: int, end: int, given: Given, carried: Sequence[Any]) -> tuple[Any, ...]:
        """Run layers `begin` to `end`.

        given    what the model was called with; every stage has it
        carried  what the layers before hand over; empty at layer 0

        Returns what is handed over at `end`; at the chain's end, the model's output alone.
        """

    @abstractmethod
    def holds(self, begin: int, end: int) -> set[str]:
        """The names of parameters and buffers that these layers use."""

    def __len__(self) -> int:
        return len(self.names)


class SequentialLayers(LayerChain):
    """The children of an nn.Sequential."""

    def __init__(self, model: nn.Sequential) -> None:
        found = list(_children(model, ""))
        self.names = [name for name, _ in found]
        self._units = [unit for _, unit in found]
        self.closed = frozenset(at for at, unit in enumerate(self._units) if at and is_in_place(unit))

    def run(self, begin: int, end: int, given: Given, carried: Sequence[Any]) -> tuple[Any, ...]:
        """One value goes through."""
        if begin:
            (value,) = carried
        else:
            value = given[0][0] if given[0] else next(iter(given[1].values()))
        for unit in self._units[begin:end]:
            value = unit(value)
        return (value,)

    def holds(self, begin: int, end: int) -> set[str]:
        """All that the children hold."""
        return {
            f"{prefix}.{name}"
            for prefix, unit in zip(self.names[begin:end], self._units[begin:end], strict=True)
            for name in names_in(unit)
        }


def names_in(module: nn.Module) -> Iterator[str]:
    """The names of a module's parameters and buffers; a shared one under each of its names."""
    yield from (name for name, _ in module.named_parameters(remove_duplicate=False))
    yield from (name for name, _ in module.named_buffers(remove_duplicate=False))


def _children(model: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    for name, child in model.named_children():
        if type(child) is nn.Sequential and len(child) and not child._forward_hooks:
            yield from _children(child, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", child


def is_in_place(module: nn.Module) -> bool:
    """Whether a layer says that it changes its input."""
    return getattr(module, "inplace", False) is True


def chain_of(model: nn.Module) -> LayerChain:
    """The model's chain; ModelError if it has none."""
    if type(model) is nn.Sequential:
        return SequentialLayers(model)
    from echelon.parallel.traced import TracedLayers  # torch.fx takes a while to import

    return TracedLayers(model)


def check_cuts(chain: LayerChain, cuts: Sequence[int], stages: int, chunks: int = 1) -> None:
    """Refuse stages, or chunks of each, that the chain does not have."""
    parts = len(chain) - len(chain.closed)
    if stages * chunks > parts:
        of_each = f" with {chunks} chunks each" if chunks > 1 else ""
        raise ModelError(
            f"{stages} stages{of_each} are more than the {parts} parts that the model can be cut into",
            where="prepare, parallel",
            fix="use fewer stages or chunks" if chunks > 1 else "use fewer stages",
        )
    for cut in cuts:
        if cut >= len(chain):
            raise ModelError(
                f"there is no layer {cut} to cut at, the model has {len(chain)}",
                where="prepare, parallel, cuts",
                fix=f"give numbers below {len(chain)}",
            )
        if cut in chain.closed:
            raise ModelError(
                f"layer {cut}, {chain.names[cut]}, changes its input in place, so no stage can begin there",
                where="prepare, parallel, cuts",
                fix=f"cut at {cut + 1}, or build the layer with inplace=False",
            )
