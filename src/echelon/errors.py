"""The errors that Echelon raises, as a tree.

    EchelonError
    ├── ConfigError          a name, key, value or combination from the user does not work
    │   └── UnknownName      a name is unknown; the error suggests the nearest known one
    ├── DataError            a data set is missing, damaged or too small
    ├── ModelError           a model cannot be prepared, or models differ between workers
    ├── CheckpointError      a checkpoint cannot be written or read
    ├── LaunchError          workers cannot be started
    ├── LabError             an emulated cluster cannot be built, or one is in the way
    ├── PlanError            a job does not fit the machines
    └── WorkerError          something happened to, or on, another worker
        ├── JoinTimeout      workers did not join in time
        ├── PeerLost         a worker is gone
        ├── RoundTimeout     a worker did not arrive at a round in time
        ├── MismatchedCalls  workers make different calls, and wait for each other
        ├── Corrupt          a worker's message arrived damaged
        ├── GradientError    a worker's gradient holds NaN or infinity
        ├── FunctionFailed   a function that `launch` runs failed on a worker
        └── StaleView        a worker's message belongs to another view

Each error prints the problem, where it is, and how to fix it, on three lines. Errors can be pickled, so
that the process that knows the reason can send it to the others.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any


class EchelonError(Exception):
    """Base of all errors that Echelon raises on purpose."""

    def __init__(self, message: str, *, where: str = "", fix: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.where = where
        self.fix = fix

    def __str__(self) -> str:
        lines = [self.message]
        if self.where:
            lines.append(f"  where: {self.where}")
        if self.fix:
            lines.append(f"  fix:   {self.fix}")
        return "\n".join(lines)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.message, dict(self.__dict__))


def _rebuild(kind: type[EchelonError], message: str, fields: dict[str, Any]) -> EchelonError:
    error = kind.__new__(kind)
    Exception.__init__(error, message)
    error.__dict__.update(fields)
    return error


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that resembles this one most, if any does."""
    close = difflib.get_close_matches(name.lower(), list(known), n=1, cutoff=0.5)
    return close[0] if close else None


class ConfigError(EchelonError):
    """A name, key, value or combination given by the user does not work."""


class UnknownName(ConfigError):
    """An unknown name; `nearest` is the most similar known one, if any is similar."""

    def __init__(self, what: str, name: str, known: Iterable[str], *, where: str = "") -> None:
        choices = sorted(known)
        self.name = name
        self.nearest = nearest(name, choices)
        listing = ", ".join(choices) if choices else "none"
        fix = f"did you mean {self.nearest!r}? known: {listing}" if self.nearest else f"known: {listing}"
        super().__init__(f"unknown {what} {name!r}", where=where, fix=fix)


class DataError(EchelonError):
    """A data set is missing, damaged, or too small for the request."""


class ModelError(EchelonError):
    """A model cannot be prepared, or models differ between workers."""


class CheckpointError(EchelonError):
    """A checkpoint cannot be written, or none can be read."""


class LaunchError(EchelonError):
    """Workers cannot be started."""


class LabError(EchelonError):
    """An emulated cluster cannot be built, or one is in the way."""


class PlanError(EchelonError):
    """A job does not fit the machines: memory, batch or links; the message says what is missing where."""


class WorkerError(EchelonError):
    """Something happened to, or on, other workers; `ranks` names them."""

    def __init__(
        self, message: str, *, ranks: tuple[int, ...] = (), where: str = "", fix: str = ""
    ) -> None:
        super().__init__(message, where=where, fix=fix)
        self.ranks = ranks


class JoinTimeout(WorkerError):
    """Some workers did not join in time."""


class PeerLost(WorkerError):
    """A worker is gone: it failed, was killed, or left."""


class RoundTimeout(WorkerError):
    """Some workers did not arrive at a round before its deadline."""


class MismatchedCalls(WorkerError):
    """Workers make different calls, so none of them can go on; all of them raise it."""


class Corrupt(WorkerError):
    """A worker's message is damaged, replayed, too long or not a valid frame."""


class GradientError(WorkerError):
    """A worker's gradient holds NaN or infinity, which a codec must not encode, clip or spread."""


class FunctionFailed(WorkerError):
    """A function that `launch` runs failed on a worker; `__cause__` is the worker's own exception."""


class StaleView(WorkerError):
    """A worker's message belongs to another view than this worker's."""
