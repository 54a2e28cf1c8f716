"""Do steps go on? If not, since when, and which worker is missing? Pure: events and a clock in.

Silence alone is no fault: a script evaluates, saves, or has ended its loop. Then nobody is blamed. A worker
is missing if others say that they wait for it, or if it is still in a step that others ended well before.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from echelon.observe.events import AnyEvent, StepEnded, WorkersAwaited
from echelon.observe.spans import length_s

_LEAST_S = 3.0  # shorter silence is not worth a word
_SILENT_STEPS = 5  # usual steps without a word from anyone
_AWAITED_STEPS = 2  # usual steps in which workers say that they wait for others
_RENEWED_S = 6.0  # a worker that waits says so every two seconds: after three missing words it has gone on
_BEHIND_S = 1.0  # workers write their events a few times a second: less does not tell who is behind
_USUAL_OF = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Stall:
    """No worker has ended a step for so long; `missing` are the workers to blame, if that is known.

    `doing`: what they are doing, as far as they answered.
    """

    seconds: float
    missing: tuple[int, ...] = ()
    doing: str = ""

    def __str__(self) -> str:
        silence = f"no step for {_rounded(self.seconds)}"
        several = len(self.missing) > 1
        blame = f"{ranks(self.missing)} {'are' if several else 'is'} missing" if self.missing else ""
        told = "; ".join(text for text in (blame, self.doing) if text)
        return f"{silence}: {told}" if told else silence


class StallWatch:
    """Follows the steps of a run. `now` is the reader's clock, in seconds.

    A worker that waits may write its last step late, so silence counts from when a step ended, not from
    when it was read. The quickest event tells how far the workers' clock is from the reader's. That clock
    may be set; but no step ended before the last one was read.
    """

    def __init__(self) -> None:
        self._heard_at: float | None = None
        self._read_at = -math.inf
        self._ahead_s = math.inf
        self._lengths_s: deque[float] = deque(maxlen=_USUAL_OF)
        self._last: dict[int, StepEnded] = {}
        self._waits: dict[int, tuple[float, WorkersAwaited]] = {}

    def take(self, event: AnyEvent, now: float) -> None:
        """Take an event into account."""
        self._ahead_s = min(self._ahead_s, now - event.t)
        match event:
            case StepEnded():
                self._hear(event.t, now)
                self._lengths_s.append(length_s(event))
                self._last[event.rank] = event
                _, wait = self._waits.get(event.rank, (0.0, None))
                if wait is not None and event.t >= wait.t:
                    del self._waits[event.rank]
            case WorkersAwaited():
                if self._heard_at is None:
                    self._hear(event.since, now)
                self._waits[event.rank] = (now, event)
            case _:
                pass

    def _hear(self, t: float, now: float) -> None:
        at = min(now, max(t + self._ahead_s, self._read_at))
        self._heard_at = at if self._heard_at is None else max(self._heard_at, at)
        self._read_at = now

    def silence_s(self, rank: int, now: float) -> float:
        """How long a worker has ended no step while others did; 0 if it is not behind them."""
        own = self._last.get(rank)
        if own is None or self._heard_at is None:
            return 0.0
        behind_s = max(event.t for event in self._last.values()) - own.t
        return behind_s + now - self._heard_at if behind_s > self._limit_s(_SILENT_STEPS) else 0.0

    def look(self, now: float) -> Stall | None:
        """The stall that goes on now, if one does."""
        if self._heard_at is None:
            return None
        seconds = now - self._heard_at
        waits = [wait for seen, wait in self._waits.values() if now - seen < _RENEWED_S]
        if seconds < self._limit_s(_AWAITED_STEPS if waits else _SILENT_STEPS):
            return None
        missing = _awaited(waits) if waits else self._behind()
        doing = "; ".join(dict.fromkeys(wait.doing for wait in waits if wait.doing))
        return Stall(seconds=seconds, missing=missing, doing=doing)

    def _limit_s(self, steps: int) -> float:
        usual_s = median(self._lengths_s) if self._lengths_s else 0.0
        return max(_LEAST_S, steps * usual_s)

    def _behind(self) -> tuple[int, ...]:
        """Those that have not ended a step which others have, longer ago than it takes to write events."""
        if not self._last:
            return ()
        newest = max(self._last.values(), key=lambda event: (event.step, event.t))
        return tuple(
            rank
            for rank, event in sorted(self._last.items())
            if event.step < newest.step and newest.t - event.t > _BEHIND_S
        )


def _awaited(waits: Sequence[WorkersAwaited]) -> tuple[int, ...]:
    """Those that are waited for and do not wait themselves; nobody if all wait for each other."""
    awaited = {rank for wait in waits for rank in wait.awaited}
    return tuple(sorted(awaited - {wait.rank for wait in waits}))


def ranks(numbers: Sequence[int]) -> str:
    """Workers in a sentence: 'rank 3', 'ranks 1, 2 and 5'."""
    if len(numbers) == 1:
        return f"rank {numbers[0]}"
    *most, last = numbers
    return f"ranks {', '.join(map(str, most))} and {last}"


def _rounded(seconds: float) -> str:
    """Whole seconds: tenths would flicker."""
    return f"{int(seconds)} s" if seconds < 60 else f"{int(seconds // 60)} min {int(seconds % 60)} s"
