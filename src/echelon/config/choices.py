"""The choices that the settings, the plan and `echelon.join` share.

Each choice has its type, its default, its help and its range here and nowhere else. Which strategies exist,
and which of them work together, `train/checks.py` knows.
"""

from __future__ import annotations

import dataclasses
import math
import typing
from dataclasses import dataclass, field
from typing import Any, Literal

from echelon.errors import ConfigError, UnknownName

Transport = Literal["auto", "shm", "tcp", "c10d"]
Overlap = Literal["backward", "step"]
Integrity = Literal["authenticated", "checksum"]
FactorRule = Literal["auto", "always", "never"]

LARGEST_FLOAT32 = 3.4e38
LONGEST_WAIT_S = 1e7
SEEDS = 2**63  # TOML's integers end here


def setting(default: Any, help: str) -> Any:
    """A dataclass field with a default and the sentence that explains it. Ruff does not know it is one."""
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """How workers communicate and synchronise. A wrong value raises ConfigError at once."""

    transport: Transport = setting(  # noqa: RUF009
        "auto", "How bytes move: shared memory on one machine, TCP between machines, or torch.distributed."
    )
    integrity: Integrity = setting(  # noqa: RUF009
        "authenticated",
        "What guards bytes between machines: keys that strangers lack, or a checksum against accidents.",
    )
    collective: str = setting("auto", "How gradients are summed: see `echelon list collective`.")
    codec: str = setting("none", "How gradients are encoded on the wire: see `echelon list codec`.")
    sync: str = setting("full", "When workers synchronise: see `echelon list sync`.")
    verify: str = setting(
        "none", "Checks against silent corruption, separated by semicolons: see `echelon list verify`."
    )
    replicas: int = setting(0, "Copies of each server's shard that other servers keep, with every update.")
    parallel: str = setting(
        "data",
        'How one model is spread over workers: "pipeline(stages=2) * data"; `echelon list parallel`.',
    )
    overlap: Overlap = setting(  # noqa: RUF009
        "backward",
        "What hides communication: backward, or also the optimizer and the next forward pass (step).",
    )
    factors: FactorRule = setting(  # noqa: RUF009
        "auto", "Send the factors of linear layers' gradients instead: where cheaper, always or never."
    )
    seed: int = setting(0, "Fixes the order of the data and, in `echelon train`, the initial weights.")
    join_timeout_s: float = setting(60.0, "How long to wait for all workers to join.")
    round_timeout_s: float = setting(300.0, "How long a worker may keep the others waiting at a round.")

    def __post_init__(self) -> None:
        for name, known in _WORDS.items():
            check_word(name, getattr(self, name), known, where=flag(name))
        check_at_least(self, "replicas", 0)
        if not 0 <= self.seed < SEEDS:
            raise ConfigError(f"seed is {self.seed}", where="--seed", fix=f"give 0 to {SEEDS - 1}")
        check_timeout(self, "join_timeout_s")
        check_timeout(self, "round_timeout_s")

    def chosen(self) -> dict[str, Any]:
        """The choices by name, without the fields of a subclass."""
        return {name: getattr(self, name) for name in CHOICES}


CHOICES = tuple(choice.name for choice in dataclasses.fields(Choices))
_WORDS: dict[str, tuple[str, ...]] = {
    name: typing.get_args(hint)
    for name, hint in typing.get_type_hints(Choices).items()
    if typing.get_origin(hint) is Literal
}


def choice(name: str) -> Any:
    """A field with the default and the help that Choices has for this name."""
    found = next(choice for choice in dataclasses.fields(Choices) if choice.name == name)
    return setting(found.default, found.metadata["help"])


def check_servers(servers: int, choices: Choices, *, sums: bool) -> None:
    """Refuse a transport or collective that servers cannot use. `sums`: they sum, and keep no weights."""
    transport, collective = choices.transport, choices.collective
    if servers and transport == "c10d":
        raise ConfigError(
            "servers use Echelon's own transports, not torch.distributed",
            where="--servers",
            fix="leave --transport at auto, or start no servers",
        )
    if servers and sums and (transport == "shm" or collective not in ("auto", "ps")):
        raise ConfigError(
            f"servers sum over TCP as collective ps, not {transport} and {collective}",
            where="--servers",
            fix="leave --transport and --collective at auto, or start no servers",
        )


def check_word(name: str, value: Any, known: tuple[str, ...], *, where: str) -> None:
    """Refuse a word that is not known; the error names the nearest known one."""
    if value not in known:
        raise UnknownName(name, str(value), known, where=where)


def check_at_least(settings: object, name: str, least: int) -> None:
    """Refuse a number below `least`, NaN or infinity."""
    value = getattr(settings, name)
    if value is not None and not least <= value < math.inf:
        raise ConfigError(
            f"{name.replace('_', ' ')} is {value}", where=flag(name), fix=f"give at least {least}"
        )


def check_above(settings: object, name: str, bound: float) -> None:
    """Refuse a number that is not above `bound`, NaN or infinity."""
    value = getattr(settings, name)
    if not bound < value < math.inf:
        raise ConfigError(
            f"{name.replace('_', ' ')} is {value:g}",
            where=flag(name),
            fix=f"give a number above {bound:g}",
        )


def check_timeout(settings: object, name: str) -> None:
    """Refuse a time that nobody can wait for: clocks and locks end at different numbers of seconds."""
    check_above(settings, name, 0)
    if getattr(settings, name) > LONGEST_WAIT_S:
        raise ConfigError(
            f"{name.replace('_', ' ')} is {getattr(settings, name):g}",
            where=flag(name),
            fix=f"give at most {LONGEST_WAIT_S:g}, which is 115 days",
        )


def flag(name: str) -> str:
    """The command line's option for a setting."""
    return "--" + name.replace("_", "-")
