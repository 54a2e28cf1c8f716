"""When did a stage compute which pass, and how long did it wait for other stages before?

Times of one batch are collected while it goes through the stage, and handed over together.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol, TypeAlias

import psutil  # type: ignore[import-untyped]

TimedPass: TypeAlias = tuple[str, int, int, int, int]
"""Kind, micro-batch; microseconds since the beginning, of waiting at first, and of the rest."""


class PassObserver(Protocol):
    """Records what a stage did."""

    def passed(self, begun: float, passes: list[TimedPass], memory_bytes: int, chunks: list[int]) -> None:
        """These passes took place since `begun`, on the performance counter, each in one of the chunks."""


class PassTimes:
    """Times the passes of a batch."""

    def __init__(self) -> None:
        self.begun = time.perf_counter()
        self.passes: list[TimedPass] = []
        self.chunks: list[int] = []  # of the passes
        self._waited_s = 0.0

    @contextmanager
    def of(self, kind: str, micro: int, chunk: int = 0) -> Iterator[None]:
        """The block is this pass; waiting in it counts as before it."""
        begun = time.perf_counter()
        self._waited_s = 0.0
        yield
        took_s = time.perf_counter() - begun - self._waited_s
        self.passes.append((kind, micro, _us(begun - self.begun), _us(self._waited_s), _us(took_s)))
        self.chunks.append(chunk)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """In the block, the stage waits for another."""
        begun = time.perf_counter()
        yield
        self._waited_s += time.perf_counter() - begun


def resident_bytes() -> int:
    """The memory that this process has."""
    return int(psutil.Process().memory_info().rss)


def _us(seconds: float) -> int:
    return max(0, round(seconds * 1e6))
