"""Virtual time: what is due next is done next, and what is due at once is done in the order of asking.

Nothing here looks at a real clock, so a run is a function of its setting.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

Action = Callable[[], None]


class Clock:
    """A queue of actions by time. An action may ask for others, now or later, never earlier."""

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, bool, Action]] = []
        self._asked = 0
        self._alive = 0

    def at(self, t: float, action: Action, *, aside: bool = False) -> None:
        """Do this at time t. What is done aside (looking on, say) does not count as something going on."""
        if not t >= self.now:
            raise ValueError(f"at {self.now} it is too late to ask for {t}")
        self._asked += 1
        self._alive += not aside
        heapq.heappush(self._due, (t, self._asked, aside, action))

    def after(self, seconds: float, action: Action) -> None:
        """Do this so many seconds from now."""
        self.at(self.now + seconds, action)

    def run(self, until: float) -> bool:
        """Do all that is due before `until`; False if nothing went on any more before that."""
        while self._due and self._due[0][0] < until:
            if not self._alive:
                return False
            self.now, _, aside, action = heapq.heappop(self._due)
            self._alive -= not aside
            action()
        if not self._alive:
            return False
        self.now = until
        return True
