"""How often something happens: "5min", "500steps", "1epoch"."""

from __future__ import annotations

import re
from dataclasses import dataclass

from echelon.config.units import duration_s
from echelon.errors import ConfigError

_COUNT = re.compile(r"\s*([0-9]+)\s*(steps?|epochs?)\s*")
_WANTED = "a time, steps or epochs, such as 5min, 500steps or 1epoch"


@dataclass(frozen=True, slots=True)
class Every:
    """A period in seconds, in steps or in epochs; the other two are 0."""

    seconds: float = 0.0
    steps: int = 0
    epochs: int = 0

    @classmethod
    def parse(cls, text: str, *, where: str) -> Every:
        """The period that a text stands for."""
        count = _COUNT.fullmatch(text.lower())
        if count is not None:
            number, unit = int(count[1]), count[2]
            found = cls(steps=number) if unit.startswith("step") else cls(epochs=number)
        else:
            try:
                found = cls(seconds=duration_s(text))
            except ConfigError:
                found = cls()
        if not (found.seconds or found.steps or found.epochs):
            raise ConfigError(f"{text!r} is not {_WANTED}", where=where, fix=f"write {_WANTED}")
        return found
