"""Which positions workers have in a collective: neighbours next to each other. Pure.

Collectives take consecutive positions for neighbours. Workers are arranged machine by machine, so that they
are, also where a launcher has dealt ranks out in turn; or group by group, where groups are known, such as
the machines of a site. A unit is what has one position: a worker, or a machine whose workers share memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from echelon.config.call import Call, Value, parse_call
from echelon.errors import ConfigError

Ranks = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Positions:
    """A collective as text, and the units by position."""

    collective: str
    units: tuple[Ranks, ...]

    @property
    def order(self) -> Ranks:
        """The ranks by position, if every worker is a unit."""
        return tuple(chain.from_iterable(self.units))


def arranged(collective: str, units: Sequence[Sequence[int]], groups: Sequence[Sequence[int]]) -> Positions:
    """Arrange units by groups of ranks; `units` have their order without groups.

    `hierarchical` without `group` and `sizes` gets the groups' sizes, in units. `weights` of `direct` are
    by rank, and become the units'.
    """
    call = parse_call(collective)
    found = [tuple(unit) for unit in units]
    if groups:
        blocks = [_of_group(found, group) for group in groups]
        if call.name == "hierarchical" and not {"group", "sizes"} & set(call.options):
            sizes: list[Value] = [len(block) for block in blocks]
            call = Call(call.name, call.args, {**call.options, "sizes": sizes})
        found = list(chain.from_iterable(blocks))
    weights = call.options.get("weights")
    if call.name == "direct" and isinstance(weights, list):
        if len(weights) != sum(map(len, found)):
            raise ConfigError(
                f"direct has {len(weights)} weights for {sum(map(len, found))} workers",
                where="collective direct, weights",
                fix="give one for each worker, or leave them out",
            )
        by_unit: list[Value] = [sum(float(str(weights[rank])) for rank in unit) for unit in found]
        call = Call(call.name, call.args, {**call.options, "weights": by_unit})
    return Positions(collective=str(call), units=tuple(found))


def _of_group(units: Sequence[Ranks], group: Sequence[int]) -> list[Ranks]:
    """The units of a group, in the order of its ranks."""
    members = set(group)
    split = [unit for unit in units if 0 < len(members & set(unit)) < len(unit)]
    if split:
        raise ConfigError(
            f"ranks {list(split[0])} share a machine, but are in different groups",
            where="groups",
            fix="put all workers of a machine in one group",
        )
    mine = {unit[0]: unit for unit in units if members & set(unit)}
    first_of = {rank: unit[0] for unit in mine.values() for rank in unit}
    return [mine[first] for first in dict.fromkeys(first_of[rank] for rank in group)]
