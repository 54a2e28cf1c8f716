"""How do optimizers update slices of parameters, and how do checkpoints get whole states of them?

An optimizer that computes each element by itself makes its states for the slice alone. A checkpoint has
whole states, put together from those of the workers that divide them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.optim import Optimizer

from echelon.checkpoint import state_tree
from echelon.comm.group import Group
from echelon.errors import ConfigError
from echelon.parallel.offload import OffloadedStates
from echelon.parallel.shards import ShardedParameter

# They compute each element by itself, so that a slice's update is the slice of the whole update.
ELEMENTWISE: tuple[type[Optimizer], ...] = (
    optim.SGD,
    optim.Adam,
    optim.AdamW,
    optim.Adamax,
    optim.Adagrad,
    optim.Adadelta,
    optim.ASGD,
    optim.NAdam,
    optim.RAdam,
    optim.RMSprop,
    optim.Rprop,
)

ShardsOf = Callable[[Tensor], ShardedParameter | None]


class SliceSteps:
    """The steps of optimizers on slices. `stepped` gets the parameters that a step may have updated.

    shards_of  the slices of a parameter, if it is divided
    offload    the folder in which states are kept; empty: in memory
    """

    def __init__(
        self, shards_of: ShardsOf, stepped: Callable[[Sequence[Tensor]], None], *, offload: str
    ) -> None:
        self._shards_of = shards_of
        self._stepped = stepped
        self._on_disk = OffloadedStates(offload) if offload else None
        self._optimizers: list[Optimizer] = []
        self._lent: list[tuple[Optimizer, nn.Parameter, dict[str, Any]]] = []

    def adopt(self, optimizer: Optimizer, before: Callable[[], None], after: Callable[[], None]) -> None:
        """Refuse an optimizer that needs whole parameters; call `before` and `after` around its steps."""
        if type(optimizer) not in ELEMENTWISE:
            raise ConfigError(
                f"{type(optimizer).__name__} may compute with whole parameters, and a worker has slices",
                where="prepare, parallel",
                fix="use one that computes each element by itself: "
                + ", ".join(one.__name__ for one in ELEMENTWISE),
            )
        if optimizer.state:
            raise ConfigError(
                "the optimizer has taken steps before prepare, so its states are of whole parameters",
                where="prepare, parallel",
                fix="prepare it before its first step, and continue from checkpoints with session.load",
            )
        self._optimizers.append(optimizer)

        def before_updates(_: Optimizer, args: Any, kwargs: Any) -> None:
            before()
            given = [*args[1:], *kwargs.values()]  # with a closure there are no gradients yet
            if self._on_disk is not None and all(one is None for one in given):
                self._on_disk.step(optimizer)

        def stepped() -> None:
            if self._on_disk is not None:
                self._on_disk.stepped(optimizer)
            self._stepped(list(parameters_of(optimizer)))

        optimizer.register_step_pre_hook(before_updates)
        optimizer.register_step_post_hook(lambda *_: stepped())
        optimizer.register_step_post_hook(lambda *_: after())

    def lend_whole(self, divides: Group) -> None:
        """Give the workers that divide states whole ones, until `take_back`; all of them call this."""
        told = divides.all_gather_bytes(state_tree.pack(self._own_states()))
        parts = [state_tree.unpack(data) for data in told]
        for at, optimizer in enumerate(self._optimizers):
            for index, p in enumerate(parameters_of(optimizer)):
                one = self._shards_of(p)
                own = optimizer.state.get(p)
                if one is None or not own:
                    continue
                self._lent.append((optimizer, p, own))
                optimizer.state[p] = {
                    key: torch.cat([part[f"{at}/{index}"][key] for part in parts]).view(one.shape)
                    if _is_sliced(value, one)
                    else value
                    for key, value in own.items()
                }

    def _own_states(self) -> dict[str, Any]:
        return {
            f"{at}/{index}": dict(optimizer.state[p])
            for at, optimizer in enumerate(self._optimizers)
            for index, p in enumerate(parameters_of(optimizer))
            if p in optimizer.state and self._shards_of(p) is not None
        }

    def take_back(self) -> None:
        """Slices again."""
        for optimizer, p, own in self._lent:
            optimizer.state[p] = own
        self._lent.clear()

    def cut_states(self, rank: int) -> None:
        """Keep only the slices of this worker, with this rank among those that divide, of whole states."""
        for optimizer in self._optimizers:
            for p in parameters_of(optimizer):
                one = self._shards_of(p)
                if one is None:
                    continue
                begin, end = one.edges[rank]
                for key, value in optimizer.state.get(p, {}).items():
                    if isinstance(value, Tensor) and value.shape == one.shape and value.dim():
                        optimizer.state[p][key] = value.reshape(-1)[begin:end].clone()


def _is_sliced(value: Any, one: ShardedParameter) -> bool:
    return isinstance(value, Tensor) and value.dim() == 1 and value.shape == one.mine.shape


def parameters_of(optimizer: Optimizer) -> Iterable[nn.Parameter]:
    """All parameters of an optimizer, in the order of its groups."""
    for group in optimizer.param_groups:
        yield from group["params"]
