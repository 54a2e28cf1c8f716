"""Where does the coordinator write what it has decided? In a log with two operations, append and read.

An entry is written before anybody is told of it. So a coordinator that starts again reads the log and goes
on, and a log that several machines keep needs nothing else.
"""

from __future__ import annotations

from typing import Protocol

from echelon.membership.messages import Message, NewView
from echelon.membership.view import MemberId


class ViewDecided(Message, frozen=True, kw_only=True, tag="view-decided"):
    """A view, and who is out of it for which reason."""

    record: NewView
    out: tuple[tuple[MemberId, str], ...] = ()


class SlotFailed(Message, frozen=True, kw_only=True, tag="slot-failed"):
    """A process of a slot has failed."""

    member: MemberId
    failure: str
    step: int


class SlotStarted(Message, frozen=True, kw_only=True, tag="slot-started"):
    """A process of a slot was asked for: incarnations never repeat."""

    member: MemberId


class RunStopped(Message, frozen=True, kw_only=True, tag="run-stopped"):
    """The run was stopped."""

    reason: str


Entry = ViewDecided | SlotFailed | SlotStarted | RunStopped


class Log(Protocol):
    """A list of entries that only grows."""

    def append(self, entry: Entry) -> None:
        """Write an entry; it is safe when this returns."""

    def read(self) -> list[Entry]:
        """All entries, oldest first."""


class MemoryLog:
    """A log in the memory of one process."""

    def __init__(self) -> None:
        self._entries: list[Entry] = []

    def append(self, entry: Entry) -> None:
        """Keep it."""
        self._entries.append(entry)

    def read(self) -> list[Entry]:
        """All entries, oldest first."""
        return list(self._entries)
