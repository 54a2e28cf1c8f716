"""What is known about chunks: which files hold a table's rows, as which tensors, and who wrote them.

A chunk is a file in the safetensors format: the tensors of some consecutive rows. A catalogue lists the
chunks in the order of the rows, so a row of the table has one number on all workers.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Literal

import msgspec
import xxhash

from echelon.errors import DataError

CATALOGUE = "catalogue.json"
Form = Literal["one", "tuple", "dict"]


def this_host() -> str:
    """The name of this machine, as chunks and workers are compared by it."""
    return socket.gethostname()


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """One file: its name, the machine that wrote it, how many rows it has, its size and its checksum."""

    name: str
    host: str
    rows: int
    size_bytes: int
    checksum: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """One tensor of a row: numpy's name of its type, and its shape without the dimension of rows."""

    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Catalogue:
    """All chunks of a table. `form` says what a batch is: one tensor, a tuple of them, or a dict."""

    folder: str
    form: Form
    tensors: tuple[TensorSpec, ...]
    chunks: tuple[Chunk, ...]

    @property
    def rows(self) -> int:
        """How many rows the table has."""
        return sum(chunk.rows for chunk in self.chunks)

    @property
    def starts(self) -> list[int]:
        """The number of each chunk's first row, and of the row after the last."""
        return list(accumulate((chunk.rows for chunk in self.chunks), initial=0))

    @property
    def fingerprint(self) -> str:
        """A text that differs if the rows or their order differ, wherever they are stored."""
        content = [(chunk.rows, chunk.checksum) for chunk in self.chunks]
        return xxhash.xxh3_64_hexdigest(msgspec.json.encode([self.form, self.tensors, content]))

    def path(self, number: int) -> Path:
        """Where a chunk was written."""
        return Path(self.folder) / self.chunks[number].name


def save(catalogue: Catalogue) -> None:
    """Write the catalogue beside its chunks."""
    (Path(catalogue.folder) / CATALOGUE).write_bytes(msgspec.json.encode(catalogue))


def is_saved(folder: Path) -> bool:
    """Whether a folder holds a catalogue."""
    return (folder / CATALOGUE).is_file()


def read(folder: Path) -> Catalogue:
    """The catalogue of a folder, which may have been moved."""
    try:
        found = msgspec.json.decode((folder / CATALOGUE).read_bytes(), type=Catalogue)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DataError(
            f"the catalogue cannot be read: {error}",
            where=str(folder / CATALOGUE),
            fix="write the table again, into an empty folder",
        ) from error
    return replace(found, folder=str(folder))
