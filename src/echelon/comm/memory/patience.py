"""How does a thread wait for workers of its machine? It spins briefly, then sleeps.

While it waits it does this worker's part in what others may wait for. It notices a worker that is gone at
once, reports long waits to the watch, and names at its deadline who is awaited.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from echelon.comm.future import LONG_S
from echelon.comm.memory.bell import Bells
from echelon.comm.memory.cores import cores
from echelon.comm.wire import blame
from echelon.comm.wire.watch import Watch
from echelon.errors import EchelonError

SPIN_S = 200e-6
_HOLD_S = 20e-6  # of that, without giving the core to other processes
_SCARCE_SPIN_S = 10e-6  # where others need the core to publish what this worker waits for
_SHORT_SLEEP_S = 1e-3
_LONG_SLEEP_S = 5e-3
_OWN_THREADS = "echelon-"  # they wait beside a training thread, which needs the interpreter


class Check(Protocol):
    """Raises if workers of the view are gone, so that these ranks cannot be waited for."""

    def __call__(self, ranks: Sequence[int] | None = None) -> None:
        """Without ranks: if any worker is gone."""


class PeerWait:
    """A thread that is blocked on an operation with this tag; `behind` gives the ranks it waits for."""

    ended = False

    def __init__(self, tag: int, behind: Callable[[], list[int]], required: Sequence[int]) -> None:
        self.tag = tag
        self.thread = threading.get_ident()
        self._behind = behind
        self._required = required

    def awaited(self) -> set[int]:
        """The workers that are behind."""
        return set(self._behind())

    def requires(self, rank: int) -> bool:
        """Whether it cannot end without that worker."""
        return rank in self._required

    def lacks(self, rank: int) -> bool:
        """There are no messages in flight in memory."""
        return False


class Patience:
    """The waits of one worker for some others.

    ranks      their ranks in the view, by position
    meanwhile  called while this worker waits
    """

    def __init__(
        self, ranks: Sequence[int], names: Sequence[str], me: str, *, bells: Bells, check: Check
    ) -> None:
        self._ranks = tuple(ranks)
        self._names = names
        self._me = me
        self._bells = bells
        self._check = check
        self.meanwhile: Callable[[], None] = _nothing
        self.watch: Watch | None = None
        self._spin_s = SPIN_S if len(ranks) <= cores() else _SCARCE_SPIN_S

    def until_none(
        self,
        behind: Callable[[], list[int]],
        *,
        tag: int,
        limit_s: float,
        endless: bool = True,
        required: Sequence[int] = (),
    ) -> None:
        """Wait until no position is behind, at most so long.

        `required`: positions without which it cannot end; all, if none are given. `endless`: only the
        operation or its deadline ends the wait, not a timeout of the script.
        """
        late = behind()
        if not late:
            return
        begun = time.perf_counter()
        spin_s = self._spin_s
        if threading.current_thread().name.startswith(_OWN_THREADS):
            spin_s = _SCARCE_SPIN_S
        spins = spin_s > _HOLD_S
        hold_s = _HOLD_S if spins and not self._bells.shares_core(late) else 0.0
        while time.perf_counter() - begun <= hold_s:
            if not behind():
                return
        end: Callable[[], None] | None = None
        sleep_s = _SHORT_SLEEP_S
        try:
            while late := behind():
                self.meanwhile()
                waited = time.perf_counter() - begun
                if waited <= spin_s:
                    os.sched_yield()
                    continue
                self._look(late, behind, waited, limit_s)
                if waited > LONG_S and end is None:
                    sleep_s = _LONG_SLEEP_S
                    end = self._report(behind, tag, endless, required)
                self._bells.sleep(sleep_s, behind)
                if spins:
                    self._bells.note_core()  # sleepers may wake on another one
        finally:
            if end is not None:
                end()

    def _report(
        self, behind: Callable[[], list[int]], tag: int, endless: bool, required: Sequence[int]
    ) -> Callable[[], None]:
        """Tell the watch of a long wait; returns what ends the report."""
        if self.watch is None:
            return _nothing
        needed = [self._ranks[at] for at in required or range(len(self._ranks))]
        wait = PeerWait(tag, lambda: [self._ranks[at] for at in behind()], needed)
        return self.watch.report(wait, LONG_S, endless=endless) or _nothing

    def _look(
        self, late: list[int], behind: Callable[[], list[int]], waited_s: float, limit_s: float
    ) -> None:
        """Raise if a worker that is behind is gone or late. One that is not behind may have left."""
        try:
            self._check([self._ranks[at] for at in late])
        except EchelonError:
            if behind():
                raise
        if waited_s > limit_s and (late := behind()):
            ranks = [self._ranks[at] for at in late]
            doing = self.watch.about(ranks) if self.watch is not None else ""
            error = blame.late(self._names, late, limit_s, self._me, doing)
            error.ranks = tuple(ranks)
            raise error


def _nothing() -> None:
    """There is nothing else to do."""
