"""Describes an optimizer, so that another process can build it. Nothing is pickled.

An optimizer spec holds the class by module and name, its defaults, and the options of every parameter
group. Only `build` imports what a spec names.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.optim import LBFGS, Optimizer

from echelon.errors import ConfigError

# Optimizers that update every element by itself, so that a parameter may be split anywhere.
_BY_ELEMENT = {
    "SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "Adadelta", "Adamax", "NAdam", "RAdam", "ASGD", "Rprop",
}  # fmt: skip
_WHERE = "--sync"


def describe(optimizer: Optimizer) -> dict[str, Any]:
    """The spec of an optimizer; raises ConfigError if a server cannot use it."""
    kind = type(optimizer)
    if isinstance(optimizer, LBFGS):
        raise ConfigError(
            "LBFGS evaluates the loss while it steps, which a parameter server cannot do",
            where=_WHERE,
            fix="use another optimizer, or --sync full",
        )
    if kind.__module__ == "__main__" or "<locals>" in kind.__qualname__:
        raise ConfigError(
            f"optimizer {kind.__qualname__} is defined in the script, where a server cannot import it",
            where=_WHERE,
            fix="put it in a module of its own",
        )
    return {
        "module": kind.__module__,
        "name": kind.__qualname__,
        "defaults": {name: _plain(name, value) for name, value in optimizer.defaults.items()},
        "groups": settings(optimizer),
    }


def settings(optimizer: Optimizer) -> list[dict[str, Any]]:
    """The current options of every parameter group."""
    return [
        {name: _plain(name, value) for name, value in group.items() if name != "params"}
        for group in optimizer.param_groups
    ]


def updates_elements(spec: dict[str, Any]) -> bool:
    """Whether the optimizer updates every element by itself, so that a parameter may be split."""
    return bool(spec["module"].startswith("torch.optim") and spec["name"] in _BY_ELEMENT)


def build(spec: dict[str, Any], parameters: Sequence[Tensor], group_of: Sequence[int]) -> Optimizer:
    """Build the optimizer of a spec over these parameters; `group_of` is the parameter group of each."""
    try:
        kind = getattr(importlib.import_module(spec["module"]), spec["name"])
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"the server cannot import optimizer {spec['module']}.{spec['name']}: {error}",
            where=_WHERE,
            fix="install its module where the servers run",
        ) from error
    groups = []
    for index, options in enumerate(spec["groups"]):
        held = [p for p, group in zip(parameters, group_of, strict=True) if group == index]
        groups.append({**_read(options), "params": held})
    # Some options are read by the constructor only, and some constructors require them.
    wanted = inspect.signature(kind).parameters
    defaults = {name: value for name, value in _read(spec["defaults"]).items() if name in wanted}
    try:
        made: Optimizer = kind(groups, **defaults)
    except TypeError as error:
        raise ConfigError(
            f"the server cannot build optimizer {spec['name']}: {error}",
            where=_WHERE,
            fix="let its constructor take parameter groups and the options that are in its defaults",
        ) from error
    return made


def update(optimizer: Optimizer, changed: list[dict[str, Any]]) -> None:
    """Set options that have changed, such as a learning rate."""
    for group, options in zip(optimizer.param_groups, changed, strict=True):
        group.update(_read(options))


def _plain(name: str, value: Any) -> Any:
    if isinstance(value, Tensor) and value.numel() == 1:
        return float(value)
    if isinstance(value, (tuple, list)):
        return [_plain(name, item) for item in value]
    if isinstance(value, float):
        return float(value)  # also numpy's
    if value is None or isinstance(value, (bool, int, str)):
        return value
    raise ConfigError(
        f"option {name} of the optimizer is a {type(value).__name__}, which cannot be sent to a server",
        where=_WHERE,
        fix="give a number",
    )


def _read(options: dict[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in options.items()}
