"""Which worker failed first, and why. Pure.

When one worker fails, the others fail because their connections to it break. The launcher names a worker
whose failure is no consequence of another's; among several, the earliest.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable

import msgspec


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """Why a worker failed. `consequence`: it failed because another worker did."""

    rank: int
    t: float
    kind: str
    message: str
    text: str = ""
    consequence: bool = False

    @property
    def cause(self) -> str:
        """Kind and first line of the message."""
        line = self.message.partition("\n")[0]
        return f"{self.kind}: {line}" if self.kind else line


def first(failures: Iterable[Failure]) -> Failure | None:
    """The failure that caused the others, if there is any."""
    ordered = sorted(failures, key=lambda failure: (failure.consequence, failure.t))
    return ordered[0] if ordered else None


def from_exit(rank: int, code: int, t: float) -> Failure:
    """A failure of which only the exit code is known."""
    if code < 0:
        name = _signal_name(-code)
        hint = "; the kernel does this when memory runs out" if name == "SIGKILL" else ""
        return Failure(rank=rank, t=t, kind="", message=f"killed by {name}{hint}")
    return Failure(rank=rank, t=t, kind="", message=f"ended with exit code {code} and no exception")


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # most real-time signals have no name
        return f"signal {number}"
