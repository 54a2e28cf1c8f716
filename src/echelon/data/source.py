"""The contract of sources: what `loader_of` can read. See `sources/`.

A source recognises a table, names its columns, and writes its rows as chunks, on the machines where they
are if it can. A third engine is one more file.
"""

from __future__ import annotations

import importlib.util
import re
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from echelon.config.registry import Registry, Strategy
from echelon.data.columns import Selection
from echelon.data.write import WrittenPart
from echelon.errors import ConfigError, DataError

_MOST_TEXT = 1200


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteJob:
    """What is to be written where. Tasks on other machines use the same path there."""

    selection: Selection
    folder: str


class DataSource(Strategy):
    """Reads one kind of table. It holds nothing."""

    __slots__ = ()

    @abstractmethod
    def accepts(self, table: Any) -> bool:
        """Whether this is the source of this table; does not import an engine to find out."""

    @abstractmethod
    def columns(self, table: Any) -> Sequence[str]:
        """The names of the table's columns, in order; none if it has no rows to tell them by."""

    @abstractmethod
    def write(self, table: Any, job: WriteJob) -> Sequence[WrittenPart]:
        """Write all rows; the parts are in the order of the table's rows, every row in one of them."""


# mypy does not accept an abstract class as a value; the registry never instantiates it.
SOURCES: Registry[DataSource] = Registry("source", DataSource, "echelon.data.sources")  # type: ignore[type-abstract]


def source_of(table: Any) -> DataSource:
    """The source that accepts this table."""
    for name in SOURCES.names():
        source = SOURCES.build(name)
        if source.accepts(table):
            return source
    raise ConfigError(
        f"loader_of cannot read a {type(table).__module__}.{type(table).__qualname__}",
        where="loader_of",
        fix="give a Spark or pandas DataFrame, a Ray Dataset, a pyarrow Table, the path of Parquet files, "
        "or a dict of arrays",
    )


def need(extra: str, *modules: str) -> None:
    """Raise DataError unless all modules can be imported; the extra of Echelon installs them."""
    for module in modules:
        if importlib.util.find_spec(module) is None:
            raise DataError(
                f"reading this data needs the package {module}, which is not installed",
                where="loader_of",
                fix=f'pip install ".[{extra}]" in the folder of Echelon, or pip install {module}',
            )


def engine_failed(engine: str, error: Exception) -> DataError:
    """The error of tasks that failed, in the engine's words but without its stack."""
    lines = [line for line in str(error).splitlines() if not re.match(r"\s+(at |\.\.\. \d)", line)]
    said = "\n".join(lines).strip()
    fix = "see the engine's own message above"
    if "No module named 'echelon'" in said:
        fix = "install Echelon for the Python of every machine of the engine, or set PYTHONPATH there"
    if len(said) > _MOST_TEXT:
        said = f"{said[: _MOST_TEXT // 2]} ... {said[-_MOST_TEXT // 2 :]}"
    return DataError(f"{engine} could not write the data: {said}", where="loader_of", fix=fix)
