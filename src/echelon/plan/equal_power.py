"""Homogeneous groups out of heterogeneous nodes: groups whose total power is as equal as possible.

The first seed, section III-A: with few equal nodes, groups are formed of unequal ones such that groups are
equal. Nodes are placed from the fastest to the slowest, each in the weakest group that has room (longest
processing time first); a deal in turn is used instead where it is better. Then the strongest and the
weakest group exchange nodes as long as that brings them nearer. So the result is never worse than a deal.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from echelon.errors import ConfigError

Names = tuple[str, ...]
_Members = list[list[int]]


def equal_power_groups(
    names: Sequence[str], speeds: Sequence[float], count: int, *, least: int = 1, most: int | None = None
) -> tuple[Names, ...]:
    """`count` groups of `least` to `most` nodes each, the strongest first; members in the given order."""
    limit = len(names) if most is None else most
    if not (len(names) == len(speeds) and count >= 1 and count * least <= len(names) <= count * limit):
        raise ConfigError(
            f"{len(names)} nodes cannot form {count} groups of {least} to {limit}",
            where="groups of equal power",
            fix="give another number of groups, or other limits",
        )
    dealt = [list(range(at, len(names), count)) for at in range(count)]
    by_speed = sorted(range(len(names)), key=lambda at: -speeds[at])
    turns = [by_speed[at::count] for at in range(count)]
    starts = [_longest_first(by_speed, speeds, count, (least, limit)), dealt, turns]
    found = min(
        (_exchanged(start, speeds, least, limit) for start in starts), key=lambda one: _spread(one, speeds)
    )
    found = sorted((sorted(group) for group in found), key=lambda group: -_total(group, speeds))
    return tuple(tuple(names[at] for at in group) for group in found)


def _longest_first(
    by_speed: Sequence[int], speeds: Sequence[float], count: int, limits: tuple[int, int]
) -> _Members:
    """Each node in the weakest group with room, leaving enough nodes for groups that still need some."""
    least, most = limits
    groups: _Members = [[] for _ in range(count)]
    totals = [0.0] * count
    for placed, node in enumerate(by_speed):
        needed = sum(max(0, least - len(group)) for group in groups)
        urgent = len(by_speed) - placed <= needed
        room = [at for at in range(count) if len(groups[at]) < (least if urgent else most)]
        weakest = min(room, key=lambda at: (totals[at], len(groups[at])))
        groups[weakest].append(node)
        totals[weakest] += speeds[node]
    return groups


def _exchanged(groups: _Members, speeds: Sequence[float], least: int, most: int) -> _Members:
    """Move or swap between the strongest and the weakest group while their difference shrinks."""
    groups = [list(group) for group in groups]
    for _ in range(10 * sum(map(len, groups))):
        strong = max(groups, key=lambda group: _total(group, speeds))
        weak = min(groups, key=lambda group: _total(group, speeds))
        apart = _total(strong, speeds) - _total(weak, speeds)
        swaps: list[tuple[int, int | None]] = [(give, take) for give in strong for take in weak]
        if len(strong) > least and len(weak) < most:
            swaps += [(give, None) for give in strong]
        if strong is weak or not swaps:
            break

        def left(swap: tuple[int, int | None], apart: float = apart) -> float:
            return abs(apart - 2 * (speeds[swap[0]] - (0.0 if swap[1] is None else speeds[swap[1]])))

        best = min(swaps, key=left)
        if not left(best) < apart * (1 - 1e-9):
            break
        give, take = best
        strong.remove(give)
        weak.append(give)
        if take is not None:
            weak.remove(take)
            strong.append(take)
    return groups


def _total(group: Sequence[int], speeds: Sequence[float]) -> float:
    return math.fsum(speeds[at] for at in group)


def _spread(groups: _Members, speeds: Sequence[float]) -> float:
    totals = [_total(group, speeds) for group in groups]
    return max(totals) - min(totals)
