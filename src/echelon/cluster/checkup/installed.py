"""Checks that Echelon's dependencies are installed and new enough."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Iterator

from echelon.cluster.checkup.finding import Finding
from echelon.cluster.machine import version_of


def versions() -> Iterator[Finding]:
    """Echelon's own version, and whether its dependencies are installed and new enough."""
    own = version_of("echelon")
    if own is None:
        yield Finding(
            level="problem",
            topic="versions",
            subject="echelon",
            text="not installed, though its files can be imported",
            fix="pip install -e . in its folder",
        )
        return
    yield Finding(level="ok", topic="versions", subject="echelon", text=own)
    others = []
    for name, least in _requirements():
        found = version_of(name)
        if found is None or _numbers(found) < _numbers(least):
            wanted = f"{name}>={least}" if least else name
            yield Finding(
                level="problem",
                topic="versions",
                subject=name,
                text="not installed" if found is None else f"{found}, but {least} or newer is needed",
                fix=f'pip install "{wanted}"',
            )
        elif name == "torch":
            yield Finding(level="ok", topic="versions", subject=name, text=found)
        else:
            others.append(f"{name} {found}")
    yield Finding(level="ok", topic="versions", subject="others", text=", ".join(others))
    absent = [name for name, _ in _requirements("data") if version_of(name) is None]
    if absent:
        yield Finding(
            level="note",
            topic="versions",
            subject="extra data",
            text=f"not installed: {', '.join(absent)}; some data sets need it",
            fix='pip install ".[data]" in the folder of Echelon',
        )


def _requirements(extra: str = "") -> Iterator[tuple[str, str]]:
    """Echelon's dependencies, or those of an extra: name, and minimum version or ''."""
    for line in importlib.metadata.requires("echelon") or ():
        match = re.match(r"([A-Za-z0-9._-]+)(?:\s*>=\s*([0-9.]+))?", line)
        asked = re.search(r"""extra\s*==\s*['"]([^'"]+)""", line)
        if match is not None and (asked.group(1) if asked else "") == extra:
            yield match.group(1), match.group(2) or ""


def _numbers(version: str) -> tuple[int, ...]:
    """The numbers of a version: '2.13.0+cpu' is (2, 13, 0)."""
    release = re.match(r"[0-9.]*", version)
    return tuple(int(part) for part in (release.group() if release else "").split(".") if part)
