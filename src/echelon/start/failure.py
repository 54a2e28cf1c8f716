"""Which worker failed first, and why; only `read_failures` reads files.

When one worker fails, the others fail because their connections to it break. The launcher names a worker
whose failure is no consequence of another's; among several, the earliest.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable
from pathlib import Path

import msgspec

from echelon.observe.run_folder import RunFolder


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
    """The failure that caused the others, if any; of several with the same error, the lowest rank's.

    Where all workers make the same mistake, it is chance which one is first, and the leader's is the one to
    show: its output has been seen.
    """
    ordered = sorted(failures, key=lambda failure: (failure.consequence, failure.t))
    same = (failure for failure in ordered if is_alike(failure, ordered[0]))
    return min(same, key=lambda failure: failure.rank, default=None)


def alike(failure: Failure, failures: Iterable[Failure]) -> tuple[int, ...]:
    """The other workers with the same error."""
    others = (other.rank for other in failures if other.rank != failure.rank and is_alike(other, failure))
    return tuple(sorted(others))


def is_alike(one: Failure, other: Failure) -> bool:
    """Whether two workers failed with the same error of their own."""
    if one.consequence or not one.kind:
        return one == other
    return (one.kind, one.message, one.consequence) == (other.kind, other.message, other.consequence)


def read_failures(folder: RunFolder) -> list[Failure]:
    """The errors that workers have left in the run's folder."""
    found = (read_failure(path) for path in sorted(folder.errors.glob("rank-*.json")))
    return [failure for failure in found if failure is not None]


def read_failure(path: Path) -> Failure | None:
    """The error that a worker has left, if it has left one."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Failure)
    except (OSError, msgspec.DecodeError):
        return None


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
