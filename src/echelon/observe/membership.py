"""Who was lost, left out and back in a run with `--min-workers`, in one line for its end and its report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import msgspec

from echelon.observe.events import MembersChanged


class MembersFigures(msgspec.Struct, frozen=True, kw_only=True):
    """How often what happened, and the smallest number of workers that went on."""

    counts: Mapping[str, int]
    fewest: int

    @property
    def text(self) -> str:
        """One line."""
        told = ", ".join(f"{count:,} {what}" for what, count in self.counts.items())
        return f"{told}; never fewer than {self.fewest} went on"


class MembersTally:
    """Takes events one by one."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._fewest: int | None = None

    def add(self, event: MembersChanged) -> None:
        """Take one event into account."""
        self._counts[event.what] += 1
        self._fewest = event.workers if self._fewest is None else min(self._fewest, event.workers)

    def figures(self) -> MembersFigures | None:
        """None if nothing happened."""
        if self._fewest is None:
            return None
        return MembersFigures(counts=dict(self._counts), fewest=self._fewest)


def members_line(found: MembersFigures | None) -> str:
    """The line for the closing text; empty if nothing happened."""
    return f"workers: {found.text}" if found is not None else ""
