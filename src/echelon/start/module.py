"""Is there a module of this name? Looked for without importing anything of the user's.

The first part of a dotted name is found as Python finds it, from the current folder. What follows is looked
for in the package's folders; a package that changes its own path is left to the workers.
"""

from __future__ import annotations

import importlib.util
import sys
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from echelon.errors import LaunchError


def check_module(name: str) -> None:
    """Refuse a module that is not there, before any worker starts."""
    if not _may_exist(name):
        raise missing_module(name)


def missing_module(name: str) -> LaunchError:
    """The error for it."""
    return LaunchError(
        f"there is no module {name}",
        where="run -m",
        fix="check the name, and that the module is installed or in the current folder",
    )


def _may_exist(name: str) -> bool:
    parts = name.split(".")
    if not all(part.isidentifier() for part in parts):
        return False
    here = str(Path.cwd())
    found: ModuleSpec | None = PathFinder.find_spec(parts[0], [here])
    if found is None:
        try:
            found = importlib.util.find_spec(parts[0])
        except ValueError:  # __main__, or another module without a spec: the worker will say so
            return True
    for at in range(1, len(parts)):
        if found is None:
            return False
        if found.submodule_search_locations is None:
            return False
        if _changes_its_path(found):
            return True
        found = PathFinder.find_spec(".".join(parts[: at + 1]), list(found.submodule_search_locations))
    return found is not None


def _changes_its_path(package: ModuleSpec) -> bool:
    if package.name in sys.modules:
        return False
    try:
        return package.origin is not None and "__path__" in Path(package.origin).read_text(errors="replace")
    except OSError:
        return False
