"""Which checkpoints stay: the newest ones, and the best by a figure.

    best="loss"         the lowest loss          best="accuracy"     the highest accuracy
    best="wer:min"      the lowest wer           best="f1:max"       the highest f1

A figure belongs to the weights that it was measured with, so a checkpoint has one only if it was measured
at its step. Of equal figures the newest is the best. NaN is never the best.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from echelon.errors import ConfigError

Figures = Mapping[str, float]
_DIRECTIONS: dict[str, Literal["min", "max"]] = {"loss": "min", "accuracy": "max"}


@dataclass(frozen=True, slots=True)
class Best:
    """A figure, and whether the lowest or the highest is the best."""

    figure: str
    direction: Literal["min", "max"]

    @classmethod
    def parse(cls, text: str, *, where: str) -> Best:
        """The rule that a text such as `loss` or `f1:max` stands for."""
        name, colon, word = text.partition(":")
        if name and not colon and name in _DIRECTIONS:
            return cls(name, _DIRECTIONS[name])
        if name and word == "min":
            return cls(name, "min")
        if name and word == "max":
            return cls(name, "max")
        raise ConfigError(
            f"{text!r} does not say which checkpoint is the best",
            where=where,
            fix="write loss, accuracy, or the figure's name with :min or :max, such as f1:max",
        )

    def step(self, figures: Mapping[int, Figures]) -> int | None:
        """The step of the best checkpoint; None if no checkpoint has the figure."""
        sign = 1 if self.direction == "max" else -1
        known = [
            (sign * found[self.figure], step)
            for step, found in figures.items()
            if self.figure in found and not math.isnan(found[self.figure])
        ]
        return max(known)[1] if known else None


def kept(figures: Mapping[int, Figures], *, keep: int, best: Best | None) -> set[int]:
    """The steps whose checkpoints stay, given every checkpoint's figures."""
    stay = set(sorted(figures, reverse=True)[:keep])
    if best is not None:
        found = best.step(figures)
        stay |= set() if found is None else {found}
    return stay
