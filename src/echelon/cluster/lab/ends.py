"""Which two sites does an uplink of a file join, and is each site joined to the others?

For the file of a lab and for that of a cluster: uplinks are written alike in both.
"""

from __future__ import annotations

from collections.abc import Sequence

from echelon.cluster.lab.paths import unreachable
from echelon.errors import ConfigError, UnknownName

Ends = tuple[str, str]


def ends_of(between: Sequence[str], sites: Sequence[str], others: Sequence[Ends], where: str) -> Ends:
    """The two sites that an uplink is written to be between; `others` are the uplinks before it."""
    for site in between:
        if site not in sites:
            raise UnknownName("site", site, sites, where=f"{where}, between")
    if len(between) != 2 or between[0] == between[1]:
        raise ConfigError(
            f"an uplink must join two different sites, not {between}",
            where=f"{where}, between",
            fix='write between = ["one-site", "another"]',
        )
    if any(set(between) == set(other) for other in others):
        raise ConfigError(
            f"there are two uplinks between {between[0]} and {between[1]}",
            where=f"{where}, between",
            fix="describe it once, with the combined rate",
        )
    return between[0], between[1]


def check_joined(sites: Sequence[str], uplinks: Sequence[Ends], file: str, *, otherwise: str = "") -> None:
    """Refuse uplinks that leave a site out; `otherwise` is what else may be written, for the fix."""
    lost = unreachable(sites, uplinks)
    if lost is not None:
        raise ConfigError(
            f"no uplink leads from site {sites[0]} to site {lost}",
            where=file,
            fix=f'add [[uplink]] with between = ["{sites[0]}", "{lost}"]{otherwise}',
        )
