"""Which workers form a group: as the user says, or one group per site of a lab. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from echelon.errors import ConfigError

Groups = tuple[tuple[int, ...], ...]
_WHERE = "--groups"
_FIX = "give each group's size, 4,4, or its ranks, 0,1;2,3"


def parse_groups(text: str, workers: int) -> Groups:
    """Parse sizes of consecutive workers, `4,4`, or ranks, `0,2;1,3`; every worker is in one group."""
    try:
        if ";" in text:
            groups = tuple(tuple(int(rank) for rank in part.split(",")) for part in text.split(";"))
        else:
            sizes = [int(size) for size in text.split(",")]
            groups = tuple(tuple(range(a, b)) for a, b in pairwise(accumulate(sizes, initial=0)))
    except ValueError:
        raise ConfigError(f"{text!r} does not say who is in which group", where=_WHERE, fix=_FIX) from None
    members = sorted(rank for group in groups for rank in group)
    if members != list(range(workers)) or not all(groups):
        raise ConfigError(
            f"groups {text!r} do not hold each of {workers} workers exactly once", where=_WHERE, fix=_FIX
        )
    return groups


def by_site(sites: Sequence[str]) -> Groups:
    """One group per site; no groups if there is only one site."""
    found: dict[str, list[int]] = {}
    for rank, site in enumerate(sites):
        found.setdefault(site, []).append(rank)
    return tuple(tuple(ranks) for ranks in found.values()) if len(found) > 1 else ()
