"""What does a step take this worker from batch to batch, without waiting for others? Tells the launcher.

A worker that is left out as too slow (membership/slow.py) goes on alone, with the batches after, so that
its steps show when it is well again. Then it comes back between two steps of the pass that it was in.
"""

from __future__ import annotations

import time

from echelon.train.changes import MemberChanges
from echelon.train.clock import StepClock
from echelon.train.loader import SharedLoader


class OwnCycles:
    """The cycles of one worker; a step over several batches is one cycle."""

    def __init__(self, changes: MemberChanges, clock: StepClock) -> None:
        self._changes = changes
        self._clock = clock
        self._loader: SharedLoader | None = None
        self._began = self._waited_s = 0.0
        self._step = self._drawn = 0

    def ended(self, loader: SharedLoader) -> tuple[float, int] | None:
        """The loop asks for a batch: the seconds and samples of the cycle, if a step was taken in it."""
        steps, loader_before = self._clock.step - self._step, self._loader
        if loader is not loader_before or not loader.draws_to_train or steps < 1:
            return None
        self._loader = None
        waited_s = self._clock.waited_s - self._waited_s
        own_s, share = time.perf_counter() - self._began - waited_s, loader.share_drawn - self._drawn
        if steps > 1 or own_s <= 0 or share <= 0:
            return None
        if not self._changes.is_out:
            self._changes.progress.cycled(own_s, share)
        return own_s, share

    def begins(self, loader: SharedLoader) -> None:
        """What comes before the next batch is done; a cycle that goes on is not begun anew."""
        if self._loader is not loader or loader.share_drawn < self._drawn:
            self._loader = loader
            self._began, self._waited_s = time.perf_counter(), self._clock.waited_s
            self._step, self._drawn = self._clock.step, loader.share_drawn
