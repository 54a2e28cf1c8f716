"""What was measured before, by what it depends on: texts in the cache folder, each under a key.

The folder is `probe/` in the folder that ECHELON_CACHE names, or in `~/.cache/echelon`. An entry holds its
whole key, and is used only for that key: what another machine measured is not used here, also if both share
a home folder. It is not used beyond its age. The cache never causes an error: an entry that cannot be read
is measured again, and one that cannot be written is not kept.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

import msgspec
import xxhash

from echelon.errors import ConfigError
from echelon.observe.atomic import write_whole
from echelon.zoo.locate import cache_folder

COMPUTE_AGE_S = 7 * 24 * 3600.0  # a machine computes as it did, unless its key says otherwise
LINKS_AGE_S = 24 * 3600.0  # others use the network too


class CacheEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One measurement: what it depends on, when it was made (Unix time), and its text."""

    key: str
    at: float
    text: str


def cached(key: str, *, within_s: float, now: float | None = None) -> CacheEntry | None:
    """The entry of that key, unless it is older than `within_s`, from the future, or damaged."""
    file = _file(key)
    if file is None:
        return None
    try:
        entry = msgspec.json.decode(file.read_bytes(), type=CacheEntry)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    age_s = (time.time() if now is None else now) - entry.at
    return entry if entry.key == key and 0 <= age_s <= within_s else None


def keep(key: str, text: str, *, now: float | None = None) -> None:
    """Write an entry; the one before is replaced."""
    file = _file(key)
    if file is None:
        return
    entry = CacheEntry(key=key, at=time.time() if now is None else now, text=text)
    with contextlib.suppress(ConfigError, OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, msgspec.json.format(msgspec.json.encode(entry)))


def forget(key: str) -> None:
    """Remove the entry of that key, if there is one."""
    file = _file(key)
    if file is not None:
        with contextlib.suppress(OSError):
            file.unlink()


def _file(key: str) -> Path | None:
    given = os.environ.get("ECHELON_CACHE", "")
    try:
        folder = Path(given).expanduser() if given else cache_folder()
    except RuntimeError:  # no home folder
        return None
    return folder / "probe" / f"{xxhash.xxh64_hexdigest(key.encode())}.json"
