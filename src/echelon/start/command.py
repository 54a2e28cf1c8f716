"""How one worker is started."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerCommand:
    """Start `argv` in `env`. If `program` is given, a fork that runs it will do as well."""

    rank: int
    node: str
    argv: Sequence[str]
    env: Mapping[str, str]
    program: Sequence[str] = ()
