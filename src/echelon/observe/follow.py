"""Reads the events of a run: all of them at once, or the new ones while the run goes on.

A line counts only once its newline is there, so an event that is being written is read whole later.
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
    """All events of all workers, merged by time; reads as it goes, so long runs need little memory."""
    return heapq.merge(*map(read_events, sorted(folder.events.glob("*.jsonl"))), key=_time)


class Follower:
    """Hands out the events of all workers as they appear.

    A poll without news costs one look at the folder; only files that have grown are opened, and no
    file is held open in between.
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
        except FileNotFoundError:  # the folder is not there yet, or the run was just deleted
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
        whole = data.rfind(b"\n") + 1  # what follows the last newline is still being written
        self._taken[path] = start + whole
        decoded = map(decode_line, data[:whole].splitlines())
        return [event for event in decoded if event is not None]
