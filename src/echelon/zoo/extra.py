"""Is a package installed that only some data sets need? They are Echelon's extra `data`."""

from __future__ import annotations

import importlib.util

from echelon.errors import DataError


def need_package(data: str, module: str, package: str) -> None:
    """Raise DataError unless `module` can be imported; `package` is the name that pip installs it by."""
    if importlib.util.find_spec(module) is None:
        raise DataError(
            f"data set {data} needs the package {package}, which is not installed",
            where=f"data {data}",
            fix=f'pip install ".[data]" in the folder of Echelon, or pip install {package}',
        )
