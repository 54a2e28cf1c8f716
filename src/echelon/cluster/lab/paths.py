"""Chooses the uplinks that carry the traffic between two sites.

The path with the fewest uplinks wins; among equals, the uplink that comes first in the file. The choice is
a tree per destination, so that following it from switch to switch never loops.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence


def next_uplinks(sites: Iterable[str], uplinks: Sequence[tuple[str, str]]) -> dict[tuple[str, str], int]:
    """For (here, there): the index of the first uplink to take. Pairs without a path are omitted."""
    chosen: dict[tuple[str, str], int] = {}
    for there in sites:
        reached = {there}
        waiting = deque([there])
        while waiting:
            nearer = waiting.popleft()
            for index, ends in enumerate(uplinks):
                if nearer not in ends:
                    continue
                farther = ends[1] if ends[0] == nearer else ends[0]
                if farther not in reached:
                    reached.add(farther)
                    chosen[farther, there] = index
                    waiting.append(farther)
    return chosen


def unreachable(sites: Sequence[str], uplinks: Sequence[tuple[str, str]]) -> str | None:
    """The first site that cannot be reached from the first one, if any."""
    chosen = next_uplinks(sites, uplinks)
    return next((site for site in sites[1:] if (sites[0], site) not in chosen), None)
