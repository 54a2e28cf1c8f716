"""What is a parser, for a fuzzer: bytes in, nothing out, and no error but one of Echelon's own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from echelon.errors import EchelonError


@dataclass(frozen=True, slots=True)
class Parser:
    """`read` gets the bytes that a peer sent, or that a file holds. `seeds` are valid ones."""

    name: str
    read: Callable[[bytes], object]
    seeds: tuple[bytes, ...]

    def feed(self, data: bytes) -> None:
        """Read the bytes; anything but an EchelonError, or no error, is a fault of the parser."""
        try:
            self.read(data)
        except EchelonError as error:
            if not error.message:
                raise AssertionError("an error without a text") from error


def from_file(read: Callable[[Path], object], name: str) -> Callable[[bytes], object]:
    """A parser that reads a file of that name, which may be in a subfolder of the folder that it gets."""

    def feed(data: bytes) -> None:
        with TemporaryDirectory(prefix="echelon-fuzz-") as made:
            file = Path(made) / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(data)
            read(Path(made))

    return feed
