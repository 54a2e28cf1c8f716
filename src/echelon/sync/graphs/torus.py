"""A torus: workers in rows and columns, in the order of ranks; rows and columns close to rings.

Its spectral gap falls with the number of workers; that of a ring falls with its square.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from echelon.errors import ConfigError
from echelon.sync.graph import Graph, Neighbourhood, from_pairs


@dataclass(frozen=True, slots=True, kw_only=True)
class Torus(Graph):
    """The neighbours of each worker are left, right, above and below; rows and columns close to rings.

    Without `rows` it is as square as possible; a prime number of workers makes one row, which is a ring.
    """

    name: ClassVar[str] = "torus"
    rows: int | None = None

    def __post_init__(self) -> None:
        if self.rows is not None and self.rows < 1:
            raise ConfigError(
                f"a torus cannot have {self.rows} rows",
                where="rows",
                fix="give 1 or more, or leave it out for a torus as square as possible",
            )

    def neighbours(self, workers: int, round_: int) -> Neighbourhood:
        """Four neighbours each; fewer if left and right, or above and below, are the same worker."""
        fitting = [rows for rows in range(1, workers + 1) if workers % rows == 0]
        if self.rows is not None and self.rows not in fitting:
            raise ConfigError(
                f"{workers} workers do not fill a torus of {self.rows} rows",
                where="graph torus, rows",
                fix=f"give a number of rows that divides them: {', '.join(map(str, fitting))}",
            )
        rows = self.rows or max(count for count in fitting if count <= math.isqrt(workers))
        columns = workers // rows
        right = [(at, at - at % columns + (at + 1) % columns) for at in range(workers)]
        below = [(at, (at + columns) % workers) for at in range(workers)]
        return from_pairs(workers, right + below)
