"""Describes an optimizer, so that another process can build it. Nothing is pickled.

An optimizer spec holds the class by module and name, its defaults, and the options of every parameter
group. A spec comes over the network, so `build` calls only optimizers of torch.optim, those that this
process has registered (`register_optimizer`), and those that the user named (`echelon --allow module:Name`,
see config/allowed.py). Options are numbers, booleans, None, lists of these, and words that the optimizer
knows.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.optim import LBFGS, Optimizer

from echelon.config.allowed import is_allowed
from echelon.errors import ConfigError

# Optimizers that update every element by itself, so that a parameter may be split anywhere.
_BY_ELEMENT = {
    "SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "Adadelta", "Adamax", "NAdam", "RAdam", "ASGD", "Rprop",
}  # fmt: skip
_TORCH_WORDS = frozenset({"original", "match_rms_adamw"})  # Muon's adjust_lr_fn
_LONGEST_LIST = 64
_WHERE = "--sync"

O = TypeVar("O", bound=type[Optimizer])  # noqa: E741

_registered: dict[str, type[Optimizer]] = {}
_words: dict[str, frozenset[str]] = {}


def register_optimizer(kind: O, *, words: Collection[str] = ()) -> O:
    """Let parameter servers use an optimizer of your own; also a decorator of its class.

    kind    a subclass of torch.optim.Optimizer whose constructor takes parameter groups and its defaults
    words   texts that its options may have; other options are numbers, booleans, None, or lists of them

    A server builds only optimizers of torch.optim and those that its own process has registered. Call it
    before `join`: with `join(servers=...)` servers run the script until there. The servers of `echelon run
    --servers` do not run the script: there, put the class in a module and give `echelon --allow
    my_module:MyOptimizer run ...`. Example:

        @echelon.register_optimizer
        class Mine(torch.optim.Optimizer): ...
    """
    if not (inspect.isclass(kind) and issubclass(kind, Optimizer)):
        raise ConfigError(
            f"{kind!r} is not a class of optimizers",
            where="register_optimizer",
            fix="give a subclass of torch.optim.Optimizer",
        )
    _registered[_key(kind)] = kind
    _words[_key(kind)] = frozenset(words)
    return kind


def describe(optimizer: Optimizer) -> dict[str, Any]:
    """The spec of an optimizer; raises ConfigError if a server cannot use it."""
    kind = type(optimizer)
    if isinstance(optimizer, LBFGS):
        raise ConfigError(
            "LBFGS evaluates the loss while it steps, which a parameter server cannot do",
            where=_WHERE,
            fix="use another optimizer, or --sync full",
        )
    _find(kind.__module__, kind.__qualname__)
    return {
        "module": kind.__module__,
        "name": kind.__qualname__,
        "defaults": {name: _plain(name, value) for name, value in optimizer.defaults.items()},
        "groups": settings(optimizer),
    }


def settings(optimizer: Optimizer) -> list[dict[str, Any]]:
    """The current options of every parameter group. Texts that are no options, such as names, stay here."""
    return [
        {
            name: _plain(name, value)
            for name, value in group.items()
            if name != "params" and (name in optimizer.defaults or not _is_text(value))
        }
        for group in optimizer.param_groups
    ]


def updates_elements(spec: dict[str, Any]) -> bool:
    """Whether the optimizer updates every element by itself, so that a parameter may be split."""
    return spec["name"] in _BY_ELEMENT and _of_torch(spec["module"], spec["name"]) is not None


def build(spec: dict[str, Any], parameters: Sequence[Tensor], group_of: Sequence[int]) -> Optimizer:
    """Build the optimizer of a spec over these parameters; `group_of` is the parameter group of each."""
    kind = _find(spec.get("module"), spec.get("name"))
    words = _TORCH_WORDS | _words.get(_key(kind), frozenset())
    groups = []
    for index, options in enumerate(_groups(spec.get("groups"))):
        held = [p for p, group in zip(parameters, group_of, strict=True) if group == index]
        groups.append({**_read(options, words), "params": held})
    # Some options are read by the constructor only, and some constructors require them.
    wanted = inspect.signature(kind).parameters
    defaults = {k: v for k, v in _read(spec.get("defaults"), words).items() if k in wanted}
    try:
        return kind(groups, **defaults)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"the server cannot build optimizer {kind.__name__}: {error}",
            where=_WHERE,
            fix="let its constructor take parameter groups and the options that are in its defaults",
        ) from error


def update(optimizer: Optimizer, changed: list[dict[str, Any]]) -> None:
    """Set options that have changed, such as a learning rate."""
    words = _TORCH_WORDS | _words.get(_key(type(optimizer)), frozenset())
    for group, options in zip(optimizer.param_groups, _groups(changed), strict=True):
        group.update(_read(options, words))


# What may be built ---------------------------------------------------------------------------------


def _key(kind: type[Optimizer]) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def _find(module: object, name: object) -> type[Optimizer]:
    """The optimizer of that name, if this process may use it."""
    key = f"{module}:{name}"
    found = _of_torch(module, name) or _registered.get(key) or _of_user(key)
    if found is None:
        raise ConfigError(
            f"optimizer {key} is neither of torch.optim nor registered where the parameter server runs",
            where=_WHERE,
            fix="call echelon.register_optimizer before join; for `echelon run --servers` put it in a "
            f"module and give echelon --allow {_in_module(key)} run ...",
        )
    return found


def _in_module(key: str) -> str:
    return key.replace("__main__:", "my_module:").replace("<locals>.", "")


def _of_torch(module: object, name: object) -> type[Optimizer] | None:
    """The class of torch.optim that has this name and is defined there; None if there is none."""
    found = vars(torch.optim).get(name) if isinstance(name, str) else None
    is_one = inspect.isclass(found) and issubclass(found, Optimizer) and found is not Optimizer
    return found if is_one and module in (found.__module__, torch.optim.__name__) else None


def _of_user(key: str) -> type[Optimizer] | None:
    """The class that the user of this process named as `module:Name`; None if he did not."""
    module, _, name = key.partition(":")
    if not is_allowed(key) or module == "__main__" or "." in name:
        return None
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"the server cannot import optimizer {module}.{name}: {error}",
            where=_WHERE,
            fix="install its module where the servers run",
        ) from error
    if not (inspect.isclass(found) and issubclass(found, Optimizer)):
        raise ConfigError(
            f"{key} is not a class of optimizers",
            where=_WHERE,
            fix="name a subclass of torch.optim.Optimizer",
        )
    return found


# Options -------------------------------------------------------------------------------------------


def _is_text(value: Any) -> bool:
    """Whether it is a text or holds one."""
    return isinstance(value, str) or (isinstance(value, (tuple, list)) and any(map(_is_text, value)))


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


def _groups(sent: object) -> list[Any]:
    if not isinstance(sent, list):
        raise _refused("the parameter groups", sent)
    return sent


def _read(options: object, words: Collection[str]) -> dict[str, Any]:
    """Options as they were sent, each checked by its type."""
    if not isinstance(options, Mapping):
        raise _refused("the options", options)
    read = {}
    for name, value in options.items():
        if not isinstance(name, str) or not name.isidentifier() or name.startswith("_") or name == "params":
            raise _refused("an option's name", name)
        read[name] = tuple(value) if isinstance(value, list) else value
        items = value if isinstance(value, list) and len(value) <= _LONGEST_LIST else [value]
        for item in items:
            known = (
                item in words if isinstance(item, str) else item is None or type(item) in (bool, int, float)
            )
            if not known:
                raise _refused(f"option {name}", value)
    return read


def _refused(what: str, value: object) -> ConfigError:
    return ConfigError(
        f"{what} of the optimizer cannot be {str(value)[:60]!r}",
        where=_WHERE,
        fix="give numbers, booleans, None or lists of them; register texts: register_optimizer(words=...)",
    )
