"""A graph given as pairs of ranks: `edges("0-1, 1-2, 2-3")`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar

from echelon.errors import ConfigError
from echelon.sync.graph import Graph, Neighbourhood, from_pairs

_PAIR = re.compile(r"([0-9]+)-([0-9]+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Edges(Graph):
    """Neighbours are the given pairs of workers, such as "0-1, 1-2"."""

    name: ClassVar[str] = "edges"
    pairs: str = "0-1"

    def __post_init__(self) -> None:
        for one, other in self._pairs():
            if one == other:
                raise ConfigError(
                    f"the pair {one}-{other} joins worker {one} with itself",
                    where="pairs",
                    fix="leave it out: every worker counts among its own neighbours",
                )

    def _pairs(self) -> list[tuple[int, int]]:
        found = []
        for text in self.pairs.split(","):
            match = _PAIR.fullmatch(text.strip())
            if match is None:
                raise ConfigError(
                    f"{text.strip()!r} is not a pair of workers",
                    where="pairs",
                    fix='write ranks with a dash between, pairs with commas between: "0-1, 1-2"',
                )
            found.append((int(match[1]), int(match[2])))
        return found

    def neighbours(self, workers: int, round_: int) -> Neighbourhood:
        """The given pairs; refuses ranks that do not exist."""
        pairs = self._pairs()
        for one, other in pairs:
            if max(one, other) >= workers:
                raise ConfigError(
                    f"the pair {one}-{other} names worker {max(one, other)}, there are {workers} workers",
                    where="graph edges, pairs",
                    fix=f"use ranks from 0 to {workers - 1}",
                )
        return from_pairs(workers, pairs)
