"""Reads the events of a run: all of them, or the new ones while the run is going on.

A line without its newline is still being written; it is read later.
"""

from __future__ import annotations

import heapq
import os
from collections.abc import Iterator
from pathlib import Path

from echelon.observe.events import AnyEvent, decode_line, read_events
from echelon.observe.run_folder import RunFolder


def _time(event: AnyEvent) -> float:
    return event.t


def read_run(folder: RunFolder) -> Iterator[AnyEvent]:
    """All events of all workers, merged by time; reads lazily, so long runs need little memory."""
    return heapq.merge(*map(read_events, sorted(folder.events.glob("*.jsonl"))), key=_time)


class Follower:
    """Returns the events of all workers as they appear.

    A poll scans the folder once and opens only the files that have grown; no file stays open.
    """

    def __init__(self, folder: RunFolder) -> None:
        self._events = folder.events
        self._sizes: dict[str, int] = {}
        self._taken: dict[str, int] = {}

    def poll(self) -> list[AnyEvent]:
        """The events written since the last poll, merged by time."""
        events: list[AnyEvent] = []
        for path in self._grown():
            events += self._take(path)
        events.sort(key=_time)
        return events

    def _grown(self) -> list[str]:
        grown = []
        try:
            with os.scandir(self._events) as entries:
                for entry in entries:
                    if not entry.name.endswith(".jsonl"):
                        continue
                    size = entry.stat().st_size
                    if size > self._sizes.get(entry.path, 0):
                        self._sizes[entry.path] = size
                        grown.append(entry.path)
        except FileNotFoundError:  # the folder does not exist yet, or was just deleted
            pass
        return grown

    def _take(self, path: str) -> list[AnyEvent]:
        start = self._taken.get(path, 0)
        try:
            with Path(path).open("rb") as file:
                file.seek(start)
                data = file.read()
        except FileNotFoundError:
            return []
        complete = data.rfind(b"\n") + 1
        self._taken[path] = start + complete
        decoded = map(decode_line, data[:complete].splitlines())
        return [event for event in decoded if event is not None]
