"""What has a run's folder gained since the last look? For workers that do not share the record's disk.

The side with the files follows them (`FolderTail`), and sends what was added (`Grown`). The side with the
record writes it at the same place (`write_grown`), but only files of the ranks that it expects there.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path

import msgspec

from echelon.errors import Corrupt

_KINDS = ("errors", "results", "events", "logs")
_READ_BYTES = 1 << 20
_LONGEST_NAME = 200


class Grown(msgspec.Struct, frozen=True, tag=True):
    """A file of the run's folder has grown; `path` is relative to the folder."""

    path: str
    offset: int
    data: bytes


_decoder: msgspec.msgpack.Decoder[Grown] = msgspec.msgpack.Decoder(Grown)


class FolderTail:
    """Follows all files of a run's folder: what was added since the last look, and new files."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._at: dict[Path, int] = {}

    def grown(self) -> Iterator[Grown]:
        """The parts that were added; of one file at most so much at once."""
        for kind in _KINDS:
            for path in sorted((self._folder / kind).glob("rank-*")):
                if path.suffix == ".tmp":
                    continue
                start = self._at.get(path, 0)
                if path in self._at and path.stat().st_size <= start:
                    continue
                with path.open("rb") as file:
                    file.seek(start)
                    data = file.read(_READ_BYTES)
                self._at[path] = start + len(data)
                yield Grown(str(path.relative_to(self._folder)), start, data)


def read_grown(data: bytes) -> Grown:
    """The part that a worker sent; raises Corrupt."""
    try:
        return _decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise Corrupt("a part of a file that cannot be read", where=str(error)) from None


def write_grown(folder: Path, part: Grown, ranks: Collection[int]) -> None:
    """Write a part where it belongs. Corrupt if it is not of a file of one of these ranks."""
    kind, _, name = part.path.partition("/")
    owner = name.partition(".")[0]
    of_sender = kind in _KINDS and owner in {f"rank-{rank}" for rank in ranks} and "/" not in name
    if not of_sender or not name.isprintable() or len(name) > _LONGEST_NAME:
        raise Corrupt(f"{part.path[:_LONGEST_NAME]!r} is not a file of its sender")
    path = folder / kind / name
    size_bytes = path.stat().st_size if path.exists() else 0
    if not 0 <= part.offset <= size_bytes:  # files grow at their end: a gap is not what a worker sends
        raise Corrupt(f"a part of {part.path!r} at {part.offset}, where it has {size_bytes} bytes")
    with path.open("r+b" if path.exists() else "w+b") as file:
        file.seek(part.offset)
        file.write(part.data)
