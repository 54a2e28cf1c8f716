"""Virtual time: a queue of actions by time; actions for the same time run in the order of scheduling.

Nothing here reads a real clock, so a run is a function of its setting.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

Action = Callable[[], None]


class Clock:
    """A queue of actions by time. An action may schedule others, now or later."""

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, bool, Action]] = []
        self._scheduled = 0
        self._alive = 0

    def at(self, t: float, action: Action, *, background: bool = False) -> None:
        """Run an action at time t. Background actions, such as evaluations, do not keep a run alive."""
        if not t >= self.now:
            raise ValueError(f"cannot schedule an action for {t}: it is {self.now} already")
        self._scheduled += 1
        self._alive += not background
        heapq.heappush(self._due, (t, self._scheduled, background, action))

    def after(self, seconds: float, action: Action) -> None:
        """Run an action so many seconds from now."""
        self.at(self.now + seconds, action)

    def run(self, until: float) -> bool:
        """Run all actions due before `until`; False if only background actions were left before that."""
        while self._due and self._due[0][0] < until:
            if not self._alive:
                return False
            self.now, _, background, action = heapq.heappop(self._due)
            self._alive -= not background
            action()
        if not self._alive:
            return False
        self.now = until
        return True
