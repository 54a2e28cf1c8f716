"""Text, character by character."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from echelon.errors import DataError
from echelon.zoo.dataset import Data, SampleSpec, Splits
from echelon.zoo.locate import damaged, locate, locate_given, unreadable
from echelon.zoo.options import check_range

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from echelon.zoo.arrays import ArrayDataset

_DEFAULT = "text/tinyshakespeare.txt"
_MANUAL = "python"


@dataclass(frozen=True, slots=True, kw_only=True)
class Text(Data):
    """A text file, to predict each next character; text/tinyshakespeare.txt if no path is given.

    The path `python` means the topics of Python's own manual, which every interpreter includes. The first
    90 % are for training, the rest for testing. Samples are windows of `context` characters that do not
    overlap; the remainder of each part is not used. The vocabulary is the sorted characters of the whole
    file.
    """

    name: ClassVar[str] = "text"

    path: str | None = None
    context: int = 128

    def __post_init__(self) -> None:
        check_range("data text", "context", self.context, least=1)

    def load(self) -> Splits:
        """Windows of character numbers, and the same windows shifted by one character."""
        from echelon.zoo.arrays import collate

        file = self._file()
        codes, vocabulary = _encode(_manual() if self.path == _MANUAL else _read(file))
        cut = len(codes) * 9 // 10
        return Splits(
            train=self._windows(file, codes[:cut], "the first 90 %"),
            test=self._windows(file, codes[cut:], "the last 10 %"),
            spec=SampleSpec(shape=(self.context,), dtype="int64", classes=vocabulary, task="next-token"),
            collate=collate,
        )

    def _file(self) -> Path:
        if self.path == _MANUAL:
            return Path(_MANUAL)
        if self.path is None:
            return locate(self.name, [[_DEFAULT]])[0]
        return locate_given(self.name, self.path)

    def _windows(self, file: Path, codes: NDArray[np.generic], part: str) -> ArrayDataset:
        import torch

        from echelon.zoo.arrays import ArrayDataset

        count = (len(codes) - 1) // self.context
        if count < 1:
            raise DataError(
                f"{part} of the text has {len(codes)} characters, too few for a window of {self.context}",
                where=str(file),
                fix="give a longer text, or a smaller context",
            )
        values = torch.from_numpy(codes)
        used = count * self.context
        # Two views of one array, so that no memory is used twice.
        inputs = values[:used].view(count, self.context)
        targets = values[1 : used + 1].view(count, self.context)
        return ArrayDataset(inputs, targets, dtype=torch.int64)


def _manual() -> str:
    """The topics of Python's manual, in order."""
    from pydoc_data.topics import topics

    return "\n".join(topics[name] for name in sorted(topics))


def _read(file: Path) -> str:
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise damaged(file, f"not UTF-8 text: {error.reason} at byte {error.start}") from error
    except OSError as error:
        raise unreadable(file, error) from error
    if not text:
        raise damaged(file, "it is empty")
    return text


def _encode(text: str) -> tuple[NDArray[np.generic], int]:
    """Each character's index in the vocabulary, in the smallest type, and the vocabulary's size."""
    import numpy as np

    points = np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)
    vocabulary, codes = np.unique(points, return_inverse=True)
    return codes.astype(np.uint8 if len(vocabulary) <= 256 else np.int32), len(vocabulary)
