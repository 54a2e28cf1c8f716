"""How far is each worker? Workers write it into a file that the launcher maps, too, so it costs no message.

Each slot has seven numbers: the process, the operation and what the training thread is doing, the batches
that it has got, its rounds of gradients; and of its cycles (membership/slow.py) the nanoseconds of all, the
samples of the last one, and how many there were. They are written one by one: a reader may see some of them
a moment before the others.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path

from echelon.membership.slow import Cycles
from echelon.membership.stuck import WorkerSeen, WorkPhase

PROGRESS_VARIABLE = "ECHELON_PROGRESS"
_NUMBER = struct.Struct("=Q")
_NUMBERS = 7
_SLOT_BYTES = _NUMBERS * _NUMBER.size
_MOST_SLOTS = 2048
_PROCESS, _PLACE, _BATCHES, _ROUNDS, _CYCLES_NS, _SHARE, _CYCLES = range(_NUMBERS)
_PHASES = 4


class ProgressTable:
    """The file, as the launcher sees it."""

    def __init__(self, file: Path) -> None:
        self.file = file
        with file.open("w+b") as opened:
            opened.truncate(_MOST_SLOTS * _SLOT_BYTES)
            self._mapped = mmap.mmap(opened.fileno(), _MOST_SLOTS * _SLOT_BYTES)

    def read(self, slot: int) -> tuple[int, WorkerSeen] | None:
        """A worker's process and how far it is; None if it has not said so."""
        if not 0 <= slot < _MOST_SLOTS:
            return None
        numbers = [
            int(_NUMBER.unpack_from(self._mapped, slot * _SLOT_BYTES + at * _NUMBER.size)[0])
            for at in range(_NUMBERS)
        ]
        if not numbers[_PROCESS]:
            return None
        operation, phase = divmod(numbers[_PLACE], _PHASES)
        seen = WorkerSeen(
            operation=operation,
            phase=WorkPhase(phase),
            batches=numbers[_BATCHES],
            rounds=numbers[_ROUNDS],
            cycles=_cycles(numbers),
        )
        return numbers[_PROCESS], seen

    def clear(self, slot: int) -> None:
        """The slot's worker has ended."""
        if 0 <= slot < _MOST_SLOTS:
            self._mapped[slot * _SLOT_BYTES : (slot + 1) * _SLOT_BYTES] = bytes(_SLOT_BYTES)

    def remove(self) -> None:
        """Delete the file; those who map it keep it."""
        self.file.unlink(missing_ok=True)


def _cycles(numbers: Sequence[int]) -> Cycles | None:
    """A worker's cycles; None if it has made none."""
    if not numbers[_CYCLES]:
        return None
    return Cycles(count=numbers[_CYCLES], total_s=numbers[_CYCLES_NS] / 1e9, share=numbers[_SHARE])


class OwnProgress:
    """One worker's numbers; without a file nobody reads them."""

    def __init__(self, file: Path | None, slot: int) -> None:
        self._operation = self._batches = self._rounds = self._cycles = self._cycles_ns = 0
        self._at = slot * _SLOT_BYTES
        self._mapped: mmap.mmap | None = None
        if file is not None and slot < _MOST_SLOTS:
            with file.open("r+b") as opened:
                self._mapped = mmap.mmap(opened.fileno(), _MOST_SLOTS * _SLOT_BYTES)
            for number in (_PLACE, _BATCHES, _ROUNDS, _CYCLES_NS, _SHARE, _CYCLES):
                self._write(number, 0)
            self._write(_PROCESS, os.getpid())

    @classmethod
    def from_environment(cls, env: Mapping[str, str], slot: int) -> OwnProgress:
        """In the launcher's file, if it has one on this machine."""
        file = Path(env[PROGRESS_VARIABLE]) if env.get(PROGRESS_VARIABLE) else None
        return cls(file if file is not None and file.exists() else None, slot)

    def waits(self, operation: int) -> None:
        """This worker has begun an operation of all members, and waits until it is complete."""
        self._operation = operation
        self._place(WorkPhase.WAITING)

    def goes_on(self) -> None:
        """This worker does something else than waiting or computing a batch."""
        self._place(WorkPhase.ELSEWHERE)

    def computes(self) -> None:
        """This worker has got a batch to train with."""
        self._batches += 1
        self._write(_BATCHES, self._batches)
        self._place(WorkPhase.BATCH)

    def reduced(self) -> None:
        """A round of gradients is complete."""
        self._rounds += 1
        self._write(_ROUNDS, self._rounds)

    def cycled(self, seconds: float, share: int) -> None:
        """A cycle is over, which took so long without waiting for others, for so many samples."""
        self._cycles += 1
        self._cycles_ns += round(seconds * 1e9)
        self._write(_CYCLES_NS, self._cycles_ns)
        self._write(_SHARE, share)
        self._write(_CYCLES, self._cycles)

    def _place(self, phase: WorkPhase) -> None:
        self._write(_PLACE, self._operation * _PHASES + phase)

    def _write(self, number: int, value: int) -> None:
        if self._mapped is not None:
            _NUMBER.pack_into(self._mapped, self._at + number * _NUMBER.size, value)
