"""Which uplinks carry the traffic between two sites?

The fewest uplinks win; among equals, the one that comes first in the file. The choice is made once per
destination, as a tree, so that following it from switch to switch can never go round in a circle.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence


def next_uplinks(sites: Iterable[str], uplinks: Sequence[tuple[str, str]]) -> dict[tuple[str, str], int]:
    """For (here, there): the index of the uplink to take first. Pairs without a path are left out."""
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
    """The first site that the first one has no path to, if there is any."""
    chosen = next_uplinks(sites, uplinks)
    return next((site for site in sites[1:] if (sites[0], site) not in chosen), None)
