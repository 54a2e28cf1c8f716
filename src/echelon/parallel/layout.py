"""How is a model spread over workers? A layout is written as a product of dimensions.

    pipeline(stages=2, micro=4) * data

The first dimension changes fastest with the rank: in the example ranks 0 and 1 are the two stages of the
first replica, ranks 2 and 3 those of the second. In `data * pipeline(stages=2)` ranks 0 and 1 are the
first stages of two replicas. So the first dimension goes over neighbours: workers of one machine, then of
one site. Where ranks are in another order, the layout has the order of the workers.

At most one dimension may leave its extent open; it goes over the workers that the others leave. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from echelon.config.call import parse_call
from echelon.errors import ConfigError
from echelon.parallel.dimension import DIMENSIONS, Dimension
from echelon.parallel.strategies.data import Replicas
from echelon.parallel.strategies.pipeline import Pipeline
from echelon.parallel.strategies.threads import Threads

D = TypeVar("D", bound=Dimension)
AUTO = "auto"


@dataclass(frozen=True, slots=True)
class Layout:
    """A product of dimensions, each at most once; the first changes fastest with a worker's place.

    `order` has the worker at each place, so that neighbours are near each other; empty: by rank.
    """

    dimensions: tuple[Dimension, ...]
    order: tuple[int, ...] = ()

    def find(self, kind: type[D]) -> D | None:
        """The dimension of this kind, if the layout has it."""
        return next((one for one in self.dimensions if isinstance(one, kind)), None)

    @property
    def is_data_only(self) -> bool:
        """Whether every worker has the whole model, as without a layout; it may compute in threads."""
        return all(isinstance(one, (Replicas, Threads)) for one in self.dimensions)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """Who is in which replica and stage: `ranks[replica][stage]`."""

    ranks: tuple[tuple[int, ...], ...]

    @property
    def replicas(self) -> int:
        """How many replicas of the model there are."""
        return len(self.ranks)

    @property
    def stages(self) -> int:
        """How many stages each replica has."""
        return len(self.ranks[0])

    def replica_of(self, rank: int) -> int:
        """The replica that a worker belongs to."""
        return next(at for at, ranks in enumerate(self.ranks) if rank in ranks)

    def stage_of(self, rank: int) -> int:
        """The stage that a worker is."""
        return self.ranks[self.replica_of(rank)].index(rank)

    def peers(self, stage: int) -> tuple[int, ...]:
        """The workers with this stage, by replica."""
        return tuple(ranks[stage] for ranks in self.ranks)

    def weights(self, of_workers: Sequence[float]) -> list[float]:
        """The replicas' parts of a batch: the mean of their workers', who compute one after another."""
        return [sum(of_workers[rank] for rank in ranks) / len(ranks) for ranks in self.ranks]


def is_auto(text: str) -> bool:
    """Whether a layout is to be chosen by cost."""
    return text.strip() == AUTO


def parse_layout(text: str, *, where: str = "--parallel") -> Layout:
    """The layout that an expression names; errors name the nearest known dimension or option."""
    dimensions: list[Dimension] = []
    for part in _factors(text):
        if not part.strip():
            raise ConfigError(
                f"cannot read {text!r}: a dimension is missing beside '*'",
                where=where,
                fix="write dimensions with '*' between them: pipeline(stages=2) * data",
            )
        one = DIMENSIONS.build(parse_call(part.strip()), where=where)
        if any(type(one) is type(other) for other in dimensions):
            raise ConfigError(
                f"{text!r} has {one.name} twice",
                where=where,
                fix=f"write {one.name} once, with all workers",
            )
        dimensions.append(one)
    return Layout(tuple(dimensions))


def _factors(text: str) -> list[str]:
    """The text cut at every '*' that is in no brackets or quotes."""
    parts, depth, quote = [""], 0, ""
    for char in text:
        if quote:
            quote = "" if char == quote else quote
        elif char in "\"'":
            quote = char
        elif char in "([":
            depth += 1
        elif char in ")]":
            depth -= 1
        if char == "*" and not depth and not quote:
            parts.append("")
        else:
            parts[-1] += char
    return parts


def extents(layout: Layout, workers: int, *, where: str = "--parallel") -> tuple[int, ...]:
    """Over how many workers each dimension goes; ConfigError if they do not make `workers`."""
    known = [one.extent for one in layout.dimensions]
    if known.count(0) > 1:
        names = " and ".join(one.name for one in layout.dimensions if not one.extent)
        raise ConfigError(
            f"both {names} take the workers that are left",
            where=where,
            fix="say how many one of them takes, such as pipeline(stages=2) * data",
        )
    product = math.prod(size for size in known if size)
    if 0 in known and workers % product == 0:
        return tuple(size or workers // product for size in known)
    if 0 not in known and product == workers:
        return tuple(known)
    if 0 in known:
        raise ConfigError(
            f"{workers} workers cannot be divided by {product}",
            where=where,
            fix=f"start a multiple of {product} workers, or choose other numbers",
        )
    fix = f"start {product} workers"
    if workers % product == 0 and layout.find(Replicas) is None:
        fix += ", or add '* data'"
    raise ConfigError(f"the layout is for {product} workers, there are {workers}", where=where, fix=fix)


def mesh_of(layout: Layout, workers: int, *, where: str = "--parallel") -> Mesh:
    """Who is in which replica and stage; workers that divide states are replicas, too."""
    return Mesh(ranks=tuple(lines(layout, workers, Pipeline, where=where)))


def lines(
    layout: Layout, workers: int, kind: type[Dimension], *, where: str = "--parallel"
) -> list[tuple[int, ...]]:
    """The workers that differ in this dimension alone, for each place in the others."""
    sizes = extents(layout, workers, where=where)
    at = next((at for at, one in enumerate(layout.dimensions) if isinstance(one, kind)), None)
    if at is None:
        return [(rank,) for rank in range(workers)]
    step, size = math.prod(sizes[:at]), sizes[at]
    first = [place for place in range(workers) if place // step % size == 0]
    order = layout.order or range(workers)
    return [tuple(order[place + index * step] for index in range(size)) for place in first]
