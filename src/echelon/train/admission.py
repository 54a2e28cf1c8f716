"""When do members admit a worker that comes back? After one and the same round, which costs no message.

The launcher writes into a file that all members of a machine map how many workers wait. The first member
sees it when its loop asks for a batch, and lets the launcher write there after which round of gradients
they are admitted: the next one. No member completes that round without the first one's gradients, which are
sent after it is written on all machines. So all see it when their loops ask for a batch after that round,
and meet there.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from pathlib import Path

ADMISSION_VARIABLE = "ECHELON_ADMISSION"
_NUMBER = struct.Struct("=Q")
_SIZE = 16


class AdmissionFlag:
    """Two numbers in a file that launcher and members map."""

    def __init__(self, file: Path) -> None:
        self.file = file
        with file.open("r+b") as opened:
            self._mapped = mmap.mmap(opened.fileno(), _SIZE)

    @classmethod
    def create(cls, file: Path) -> AdmissionFlag:
        """With both numbers zero."""
        file.write_bytes(bytes(_SIZE))
        return cls(file)

    @classmethod
    def from_environment(cls, env: Mapping[str, str]) -> AdmissionFlag | None:
        """The launcher's; None if this run has none."""
        file = env.get(ADMISSION_VARIABLE)
        return cls(Path(file)) if file else None

    @property
    def waiting(self) -> int:
        """How many workers wait to be members; the launcher writes it."""
        return int(_NUMBER.unpack_from(self._mapped, 0)[0])

    @waiting.setter
    def waiting(self, count: int) -> None:
        _NUMBER.pack_into(self._mapped, 0, count)

    @property
    def round(self) -> int:
        """After how many rounds they are admitted; 0: that is not decided. The launcher writes it, too."""
        return int(_NUMBER.unpack_from(self._mapped, 8)[0])

    @round.setter
    def round(self, number: int) -> None:
        _NUMBER.pack_into(self._mapped, 8, number)

    @property
    def undecided(self) -> bool:
        """Whether workers wait, and the leader has not said yet when they are admitted."""
        return bool(self.waiting and not self.round)

    def due(self, rounds: int) -> bool:
        """Whether workers are admitted now, after so many rounds."""
        return 0 < self.round <= rounds

    def remove(self) -> None:
        """Delete the file; those who map it keep it."""
        self.file.unlink(missing_ok=True)
