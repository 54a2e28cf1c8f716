"""Where a setting comes from: default < TOML file < command line, and nothing else."""

from __future__ import annotations

import dataclasses
import re
import tomllib
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import tomli_w

from echelon.config.allowed import allow_names_in
from echelon.config.registry import convert
from echelon.config.schema import SECTIONS, RunSettings, section_of
from echelon.config.toml_text import read_toml
from echelon.errors import ConfigError, UnknownName

DEFAULT_FILE = Path("echelon.toml")
_OPTION = re.compile(r"--([a-z-]+)")
_MOVED = {"train": ("checkpoint",)}  # settings that were in this table once, and are still read there

S = TypeVar("S", bound=RunSettings)
S_co = TypeVar("S_co", bound=RunSettings, covariant=True)


@dataclass(frozen=True, slots=True)
class Resolved(Generic[S_co]):
    """Settings, and the origin of each."""

    settings: S_co
    origins: Mapping[str, str]

    def place(self, where: str) -> str:
        """Where the user must look: the option, or the file and key that set it."""
        option = _OPTION.match(where)
        name = option.group(1).replace("-", "_") if option else ""
        origin = self.origins.get(name, "")
        if option is None or origin in ("", "default", "command line"):
            return where
        return f"{origin}, [{section_of(name)}], {name}{where[option.end() :]}"

    def to_toml(self) -> str:
        """The settings as a TOML file that resolves to the same settings; unset ones are left out."""
        tables: dict[str, dict[str, Any]] = {}
        for field in dataclasses.fields(self.settings):
            value = getattr(self.settings, field.name)
            if value is not None:
                tables.setdefault(section_of(field.name), {})[field.name] = value
        return tomli_w.dumps(tables)


def resolve(schema: type[S], given: Mapping[str, Any], file: Path | None = None) -> Resolved[S]:
    """Resolve the settings of `schema` from the file (default: ./echelon.toml if present) and `given`.

    A ConfigError names the file, table and key, or the option, that is wrong.
    """
    names = {field.name for field in dataclasses.fields(schema)}
    values: dict[str, Any] = {}
    origins = dict.fromkeys(names, "default")
    if file is None and DEFAULT_FILE.is_file():
        file = DEFAULT_FILE
    if file is not None:
        for name, value in _read(file).items():
            if name in names:
                values[name] = value
                origins[name] = str(file)
                if not _is_recorded(file):
                    allow_names_in(value)
    hints = typing.get_type_hints(schema)
    for name, value in given.items():
        if value is None:
            continue
        if name not in names:
            raise UnknownName("setting", name, names, where="command line")
        values[name] = convert(value, hints[name], where=f"--{name.replace('_', '-')}")
        allow_names_in(value)
        origins[name] = "command line"
    try:
        return Resolved(schema(**values), origins)
    except ConfigError as error:
        error.where = Resolved(schema(), origins).place(error.where)
        raise


def _is_recorded(file: Path) -> bool:
    """Whether the file is part of a run's record, which somebody else may have written."""
    folder = file.resolve().parent  # a plan alone may be the user's own, beside his echelon.toml
    return (folder / "plan.toml").exists() and (folder / "events").is_dir()


def _read(file: Path) -> dict[str, Any]:
    """Read all settings of a file; refuse an unknown one, a wrong table or a wrong type."""
    try:
        tables = read_toml(file.read_bytes().decode())
    except OSError as error:
        raise ConfigError(
            f"cannot read the settings: {error.strerror}", where=str(file), fix="check the path"
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"the settings are not TOML: {error}",
            where=str(file),
            fix='write [run] or [train], and key = value lines; text in "quotes"',
        ) from None
    found = {}
    for table, content in tables.items():
        if table not in SECTIONS:
            raise UnknownName("table", table, SECTIONS, where=str(file))
        where = f"{file}, [{table}]"
        if not isinstance(content, dict):
            raise ConfigError(
                f"{table} is not a table", where=str(file), fix=f"write [{table}] above its keys"
            )
        hints = typing.get_type_hints(SECTIONS[table])
        known = [f.name for f in dataclasses.fields(SECTIONS[table]) if section_of(f.name) == table]
        for key, value in content.items():
            if key in _MOVED.get(table, ()):
                found[key] = convert(value, hints[key], where=f"{where}, {key}")
                continue
            if key not in known:
                raise UnknownName("key", key, known, where=where)
            found[key] = convert(value, hints[key], where=f"{where}, {key}")
    return found
