"""What is a rule of `echelon adapt`?

A rule looks at a script for one habit, and says what to change and why. Each is one file in `rules/`, found
by being there. A rule is pure: it gets a `Reading` and returns findings.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator

from echelon.adapt.finding import ScriptFinding
from echelon.adapt.reading import Reading
from echelon.config.registry import Registry, Strategy


class AdaptRule(Strategy):
    """One habit of training scripts that several workers touch."""

    __slots__ = ()

    @abstractmethod
    def look(self, reading: Reading) -> Iterator[ScriptFinding]:
        """What the rule finds in a script."""


RULES: Registry[AdaptRule] = Registry("rule", AdaptRule, "echelon.adapt.rules")  # type: ignore[type-abstract]
