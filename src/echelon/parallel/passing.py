"""How do values go from one stage to another? Tensors as messages, and once a description of them.

The receiver must know shapes before it can receive. The first time that a micro-batch of some size comes,
the sender describes what it hands over; from then on both know, and receives are posted ahead. Sends are
not awaited until the pass ends. Numbers, such as a size that the model has read, travel in the
description only.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from echelon.comm.future import Future
from echelon.comm.group import Group
from echelon.errors import ModelError

_DESCRIBED, _HANDED = 0, 1
TAGS_OF_A_LINK = 2
_AHEAD = 2  # receives that are posted before they are needed


@dataclass(frozen=True, slots=True)
class HandedTensor:
    """A tensor that is handed over; `trained`: a gradient comes back for it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    trained: bool

    def empty(self) -> Tensor:
        """Memory for one."""
        return torch.empty(self.shape, dtype=self.dtype)


@dataclass(frozen=True, slots=True)
class Described:
    """What is handed over: a structure whose leaves are tensors or plain values."""

    tensors: tuple[HandedTensor, ...]
    plain: tuple[Any, ...]  # by leaf; _TENSOR for a tensor
    structure: str

    def build(self, tensors: Sequence[Tensor]) -> Any:
        """The values, with these tensors in their places."""
        left = iter(tensors)
        leaves = [next(left) if one == _TENSOR else one[0] for one in self.plain]
        return pytree.tree_unflatten(leaves, pytree.treespec_loads(self.structure))

    def encoded(self) -> Tensor:
        """As bytes."""
        told = {
            "tensors": [
                [list(one.shape), str(one.dtype).removeprefix("torch."), one.trained]
                for one in self.tensors
            ],
            "plain": [one if one == _TENSOR else list(one) for one in self.plain],
            "structure": self.structure,
        }
        return torch.frombuffer(bytearray(json.dumps(told).encode()), dtype=torch.uint8)

    @classmethod
    def decoded(cls, data: Tensor) -> Described:
        """The inverse of `encoded`."""
        told = json.loads(bytes(data.tolist()))
        return cls(
            tuple(
                HandedTensor(tuple(shape), getattr(torch, kind), trained)
                for shape, kind, trained in told["tensors"]
            ),
            tuple(one if one == _TENSOR else tuple(one) for one in told["plain"]),
            told["structure"],
        )


_TENSOR = "tensor"


def describe(values: Any) -> tuple[Described, list[Tensor]]:
    """The description of values, and their tensors."""
    leaves, structure = pytree.tree_flatten(values)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    plain: list[Any] = []
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            plain.append(_TENSOR)
        elif isinstance(leaf, (bool, int, float, str, type(None))):
            plain.append((leaf,))
        else:
            raise ModelError(
                f"a {type(leaf).__name__} cannot be handed from one stage to the next",
                where="pipeline",
                fix="let layers return tensors and numbers, in tuples, lists and dicts; or cut elsewhere",
            )
    specs = tuple(HandedTensor(tuple(one.shape), one.dtype, one.requires_grad) for one in tensors)
    return Described(specs, tuple(plain), pytree.treespec_dumps(structure)), tensors


class Outbox:
    """What this worker has sent, until it is known to have arrived."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._sent: list[tuple[Future[None], Tensor]] = []

    def send(self, tensor: Tensor, to: int, tag: int) -> None:
        """Send without waiting."""
        own = tensor.detach().contiguous()
        self._sent.append((self._group.send(own, to, tag), own))
        self._sent = [(future, kept) for future, kept in self._sent if not future.done()]

    def flush(self) -> None:
        """Wait until everything has been sent."""
        while self._sent:
            self._sent.pop(0)[0].wait()


class HandedSender:
    """Hands values to one worker. `tag` and the one after it are this link's."""

    def __init__(self, outbox: Outbox, to: int, tag: int) -> None:
        self._outbox = outbox
        self._to = to
        self._tag = tag
        self._known: dict[Hashable, Described] = {}

    def send(self, values: Any, key: Hashable) -> tuple[Described, list[Tensor]]:
        """Send values that are described alike whenever the key is the same."""
        described, tensors = describe(values)
        known = self._known.get(key)
        if known is None:
            self._known[key] = described
            data = described.encoded()
            self._outbox.send(torch.tensor([data.numel()]), self._to, self._tag + _DESCRIBED)
            self._outbox.send(data, self._to, self._tag + _DESCRIBED)
        elif known != described:
            raise ModelError(
                "what a stage hands over changes its shape, though its input does not",
                where="pipeline",
                fix="let the shapes of activations depend on the shapes of inputs only, or cut elsewhere",
            )
        for tensor in tensors:
            self._outbox.send(tensor, self._to, self._tag + _HANDED)
        return described, tensors


class HandedReceiver:
    """Receives values from one worker, in the order in which they are sent."""

    def __init__(self, group: Group, source: int, tag: int) -> None:
        self._group = group
        self._source = source
        self._tag = tag
        self._known: dict[Hashable, Described] = {}
        self._coming: deque[Hashable] = deque()
        self._posted: deque[tuple[Described, list[Future[Tensor]]]] = deque()

    def expect(self, keys: Sequence[Hashable]) -> None:
        """These will be received, in this order."""
        self._coming.extend(keys)
        self._post()

    def _post(self) -> None:
        while self._coming and len(self._posted) < _AHEAD and self._coming[0] in self._known:
            self._posted.append(self._posting(self._known[self._coming.popleft()]))

    def _posting(self, described: Described) -> tuple[Described, list[Future[Tensor]]]:
        tag = self._tag + _HANDED
        return described, [
            self._group.receive(spec.empty(), self._source, tag) for spec in described.tensors
        ]

    @property
    def has_come(self) -> bool:
        """Whether the next values are there, so that `take` does not wait."""
        return bool(self._posted) and all(future.done() for future in self._posted[0][1])

    def take(self) -> tuple[Described, list[Tensor]]:
        """The next values."""
        if not self._posted:
            key = self._coming.popleft()
            self._known[key] = self._description()
            self._posted.append(self._posting(self._known[key]))
        described, futures = self._posted.popleft()
        self._post()
        return described, [future.wait() for future in futures]

    def _description(self) -> Described:
        tag = self._tag + _DESCRIBED
        length = self._group.receive(torch.empty(1, dtype=torch.int64), self._source, tag).wait()
        data = torch.empty(int(length), dtype=torch.uint8)
        return Described.decoded(self._group.receive(data, self._source, tag).wait())


class GradientReceiver:
    """Receives the gradients of what was handed over, in the order in which it was, two ahead."""

    def __init__(self, group: Group, source: int, tag: int) -> None:
        self._group = group
        self._source = source
        self._tag = tag
        self._coming: deque[Sequence[Tensor]] = deque()
        self._posted: deque[list[Future[Tensor]]] = deque()

    def expect(self, handed: Sequence[Tensor]) -> None:
        """Gradients of these tensors will come next."""
        self._coming.append(handed)
        self._post()

    def _post(self) -> None:
        while self._coming and len(self._posted) < _AHEAD:
            self._posted.append(
                [
                    self._group.receive(torch.empty(one.shape, dtype=one.dtype), self._source, self._tag)
                    for one in self._coming.popleft()
                ]
            )

    @property
    def has_come(self) -> bool:
        """Whether the next gradients are there, so that `take` does not wait."""
        return bool(self._posted) and all(future.done() for future in self._posted[0])

    def take(self) -> list[Tensor]:
        """The next gradients."""
        futures = self._posted.popleft()
        self._post()
        return [future.wait() for future in futures]
