"""How each of torch's random operations is drawn for the whole batch and cut to a worker's rows.

A recipe says which shape an operation draws, and draws another one in its place. Where the values depend on
the operation's input (`bernoulli`, `multinomial`, `normal` with a tensor of means), plain uniform, normal
or exponential numbers are drawn first, which do not. Alone the same recipes are used, without a cut.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

Arguments = tuple[Any, ...]
Keywords = Mapping[str, Any]
CutRows = Callable[[Tensor], Tensor]


class Recipe(ABC):
    """One way to draw."""

    @abstractmethod
    def shape(self, func: Any, args: Arguments) -> tuple[int, ...]:
        """The shape of the random numbers that the call asks for."""

    @abstractmethod
    def draw(
        self, func: Any, args: Arguments, kwargs: Keywords, whole: tuple[int, ...], cut: CutRows
    ) -> Any:
        """What the call returns, made of random numbers of shape `whole` that are then cut."""


class FillRecipe(Recipe):
    """`tensor.uniform_()` and its kind: the tensor's own values do not matter."""

    def shape(self, func: Any, args: Arguments) -> tuple[int, ...]:
        """That of the tensor."""
        return tuple(args[0].shape)

    def draw(
        self, func: Any, args: Arguments, kwargs: Keywords, whole: tuple[int, ...], cut: CutRows
    ) -> Any:
        """Fill a tensor of the whole shape, and copy the rows."""
        drawn = func(torch.empty(whole, dtype=args[0].dtype, device=args[0].device), *args[1:], **kwargs)
        return args[0].copy_(cut(drawn))


class LikeRecipe(Recipe):
    """`torch.randn_like(tensor)` and its kind."""

    def shape(self, func: Any, args: Arguments) -> tuple[int, ...]:
        """That of the tensor."""
        return tuple(args[0].shape)

    def draw(
        self, func: Any, args: Arguments, kwargs: Keywords, whole: tuple[int, ...], cut: CutRows
    ) -> Any:
        """Draw like a tensor of the whole shape."""
        return cut(func(args[0].new_empty(whole), *args[1:], **kwargs)).clone()


class SizeRecipe(Recipe):
    """`torch.randn(size)` and its kind."""

    def shape(self, func: Any, args: Arguments) -> tuple[int, ...]:
        """The argument."""
        return tuple(args[_size_position(func)])

    def draw(
        self, func: Any, args: Arguments, kwargs: Keywords, whole: tuple[int, ...], cut: CutRows
    ) -> Any:
        """Draw the whole size."""
        at = _size_position(func)
        return cut(func(*args[:at], list(whole), *args[at + 1 :], **kwargs)).clone()


class BernoulliRecipe(Recipe):
    """Zeros and ones by given probabilities: a uniform number is below its probability or not."""

    def shape(self, func: Any, args: Arguments) -> tuple[int, ...]:
        """That of the first tensor."""
        return tuple(args[0].shape)

    def draw(
        self, func: Any, args: Arguments, kwargs: Keywords, whole: tuple[int, ...], cut: CutRows
    ) -> Any:
        """`bernoulli(p)`, `bernoulli(like, p)` or `tensor.bernoulli_(p)`."""
        uniform = torch.rand(whole, generator=kwargs.get("generator"), device=args[0].device)
        ones = cut(uniform) < (args[1] if len(args) > 1 else args[0])
        if func is torch.ops.aten.bernoulli_.Tensor:
            return args[0].copy_(ones)
        return ones.to(args[0].dtype)


class NativeDropoutRecipe(Recipe):
    """Dropout as one operation, which returns its mask too."""

    def shape(self, func: Any, args: Arguments) -> tuple[int, ...]:
        """That of the input."""
        return tuple(args[0].shape)

    def draw(
        self, func: Any, args: Arguments, kwargs: Keywords, whole: tuple[int, ...], cut: CutRows
    ) -> Any:
        """The output and the mask."""
        x, p, trains = args
        if trains is False or p in (0, 1):
            return func(*args, **kwargs)
        mask = cut(torch.rand(whole, device=x.device)) >= p
        return x * mask / (1 - p), mask


class NormalRecipe(Recipe):
    """`torch.normal(mean, std)` with tensors."""

    def shape(self, func: Any, args: Arguments) -> tuple[int, ...]:
        """That of mean and std together."""
        tensors = [argument.shape for argument in args if isinstance(argument, Tensor)]
        return tuple(torch.broadcast_shapes(*tensors))

    def draw(
        self, func: Any, args: Arguments, kwargs: Keywords, whole: tuple[int, ...], cut: CutRows
    ) -> Any:
        """Standard normal numbers, moved and scaled."""
        like = next(argument for argument in args if isinstance(argument, Tensor))
        drawn = torch.randn(whole, generator=kwargs.get("generator"), dtype=like.dtype, device=like.device)
        return args[0] + (args[1] if len(args) > 1 else 1.0) * cut(drawn)


class MultinomialRecipe(Recipe):
    """`torch.multinomial`: without replacement by exponential numbers, with it by uniform ones."""

    def shape(self, func: Any, args: Arguments) -> tuple[int, ...]:
        """One number for each probability, or for each draw with replacement."""
        shape = tuple(args[0].shape)
        return (*shape[:-1], args[1]) if _replaces(args) else shape

    def draw(
        self, func: Any, args: Arguments, kwargs: Keywords, whole: tuple[int, ...], cut: CutRows
    ) -> Any:
        """The drawn categories."""
        weights, count = args[0], args[1]
        made: dict[str, Any] = {"dtype": weights.dtype, "device": weights.device}
        generator = kwargs.get("generator")
        if _replaces(args):
            total = weights.cumsum(-1)
            uniform = cut(torch.rand(whole, generator=generator, **made)) * total[..., -1:]
            return torch.searchsorted(total, uniform, right=True).clamp_(max=weights.shape[-1] - 1)
        arrival = cut(torch.empty(whole, **made).exponential_(generator=generator))
        return (weights / arrival).topk(count, -1).indices


def _replaces(args: Arguments) -> bool:
    return len(args) > 2 and bool(args[2]) and args[1] > 1


def _size_position(func: Any) -> int:
    return [argument.name for argument in func._schema.arguments].index("size")


_aten = torch.ops.aten
_BY_NAME: dict[str, Recipe] = {
    **dict.fromkeys(
        ["uniform_", "normal_", "exponential_", "geometric_", "log_normal_", "cauchy_", "random_"],
        FillRecipe(),
    ),
    **dict.fromkeys(["rand_like", "randn_like", "randint_like"], LikeRecipe()),
    **dict.fromkeys(["rand", "randn", "randint"], SizeRecipe()),
    "multinomial": MultinomialRecipe(),
    "native_dropout": NativeDropoutRecipe(),
}
_BY_OVERLOAD: dict[Any, Recipe] = {
    _aten.bernoulli_.float: FillRecipe(),
    _aten.bernoulli_.Tensor: BernoulliRecipe(),
    _aten.bernoulli.default: BernoulliRecipe(),
    _aten.bernoulli.p: BernoulliRecipe(),
    _aten.normal.float_float: SizeRecipe(),
    _aten.normal.Tensor_float: NormalRecipe(),
    _aten.normal.float_Tensor: NormalRecipe(),
    _aten.normal.Tensor_Tensor: NormalRecipe(),
}


def is_random(func: Any) -> bool:
    """Whether an operation draws random numbers."""
    return torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())


def recipe_of(func: Any) -> Recipe | None:
    """The recipe of a random operation; None if there is none."""
    if func in _BY_OVERLOAD:
        return _BY_OVERLOAD[func]
    _, _, name = func._schema.name.partition("::")
    return None if "out" in func._overloadname else _BY_NAME.get(name)
