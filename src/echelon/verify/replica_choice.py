"""Where replicas' gradients differ, which replica's are used?

By checksum the majority's. With the user's `consensus` function one of those that it lets pass; if several
do, the one that the user's `validate` function names, else the first. Functions get the replicas' gradients
by parameter name. Pure: gradients in, choice out.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from echelon.config.call import parse_call
from echelon.config.named_function import check_target, named_function
from echelon.errors import ConfigError
from echelon.verify.vote import vote

if TYPE_CHECKING:
    from torch import Tensor

Gradients: TypeAlias = "Mapping[str, Tensor]"
Consensus = Callable[[Sequence[Gradients]], Sequence[int]]
Validate = Callable[[Sequence[Gradients], Sequence[int]], int]

NOBODY = -1
_FUNCTION = "function"


@dataclass(frozen=True, slots=True)
class Choice:
    """The replica whose gradients are used (NOBODY if there is none), and those that are wrong."""

    used: int
    wrong: tuple[int, ...] = ()


def by_checksum(numbers: Sequence[Hashable]) -> Choice:
    """The majority's; nobody's if there is none."""
    outcome = vote(numbers)
    return Choice(outcome.source, outcome.others) if outcome.majority else Choice(NOBODY)


def by_functions(
    replicas: Sequence[Gradients], consensus: Consensus | None, validate: Validate | None
) -> Choice:
    """As the user's functions say; without `consensus` all pass, without `validate` the first is used."""
    everybody = range(len(replicas))
    passing = sorted({int(one) for one in consensus(replicas)}) if consensus else list(everybody)
    if any(one not in everybody for one in passing):
        raise _misuse("consensus", f"returned {passing}", f"return indices from 0 to {len(replicas) - 1}")
    if not passing:
        return Choice(NOBODY)
    used = passing[0]
    if validate is not None and len(passing) > 1:
        used = int(validate(replicas, passing))
        if used not in passing:
            raise _misuse(
                "validate", f"returned {used}", f"return one of the indices it was given: {passing}"
            )
    return Choice(used, tuple(one for one in everybody if one not in passing))


def named(text: str, option: str) -> Callable[..., object] | None:
    """The function that an option names: `module:name` or `function(module:name)`; None if it is empty."""
    if not text:
        return None
    where = f"verify replicate, {option}"
    target = text
    if text.startswith(f"{_FUNCTION}("):
        call = parse_call(text)
        target = str(next(iter([*call.args, *call.options.values()]), ""))
    check_target(target, where=where, example=f'{option}="my_module:{option}"')
    return named_function(target, where=where, of="the replicas' gradients")


def _misuse(option: str, what: str, fix: str) -> ConfigError:
    return ConfigError(f"the function {option} {what}", where=f"verify replicate, {option}", fix=fix)
