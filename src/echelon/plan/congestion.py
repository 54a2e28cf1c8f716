"""Do gradients travel slower than before? Then links should be measured again. Pure.

After the last worker has arrived, a step goes on until its gradients have travelled: the tail. Its usual
length is the median of the first steps. It is another network if the median of the last steps is half as
long again, by more than a tenth of a step, or if it is half as short; twice in a row, so that one busy
moment does not count. After an alarm the new tail is the usual one, and the next alarm may not come before
twice as many steps have passed, so that a network that never rests is not measured all the time.
"""

from __future__ import annotations

from collections import deque
from statistics import median

_WINDOW = 8
_LONGER, _SHORTER = 1.5, 0.5
_OF_A_STEP = 0.1
_FIRST_PAUSE, _LONGEST_PAUSE = 32, 4096  # reports


class TailWatch:
    """Tails and steps in, alarms out. All workers that see the same numbers agree."""

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=_WINDOW)
        self._usual_s: float | None = None
        self._seen = 0
        self._pause = 0
        self._next_pause = _FIRST_PAUSE
        self._suspected = False

    def reset(self) -> None:
        """Gradients travel in another way: the usual tail is another one."""
        self._recent.clear()
        self._usual_s = None
        self._seen = 0
        self._suspected = False

    def take(self, tail_s: float, step_s: float) -> bool:
        """Whether the tails of the last steps show another network."""
        self._recent.append(tail_s)
        self._seen += 1
        self._pause = max(0, self._pause - 1)
        if self._seen % _WINDOW:
            return False
        now_s = median(self._recent)
        if self._usual_s is None:
            self._usual_s = now_s
            return False
        other = abs(now_s - self._usual_s) > _OF_A_STEP * step_s and not (
            _SHORTER * self._usual_s <= now_s <= _LONGER * self._usual_s
        )
        alarm = other and self._suspected and not self._pause
        self._suspected = other
        if alarm:
            self._pause = self._next_pause
            self._next_pause = min(_LONGEST_PAUSE, 2 * self._next_pause)
            self.reset()
        return alarm
