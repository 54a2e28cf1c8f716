"""Is a worker that has ended started again?

Yes, `tries` times in a row. The count begins anew when the slot's worker has made progress, so a machine
whose workers are killed now and then keeps them. A worker whose script raised the same error twice in the
same place is not started again: it would raise it a third time. If most members raise the same error, the
script is wrong, and the run ends with that error.

A worker that was left out because it was stuck has mostly made progress before. It is started again unless
it was left out more than `tries` times, each time within a few rounds.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection

from echelon.membership.view import MemberId

SAME_FAILURE = 2
WELL_ROUNDS = 100


class RespawnRule:
    """Counts the failures of every slot."""

    def __init__(self, tries: int = 3) -> None:
        self._tries = tries
        self._in_a_row: dict[tuple[str, int], int] = defaultdict(int)
        self._left_out: dict[tuple[str, int], int] = defaultdict(int)
        self._last: dict[tuple[str, int], tuple[str, int]] = {}
        self._raised: dict[str, set[MemberId]] = defaultdict(set)

    def failed(self, member: MemberId, failure: str, step: int) -> None:
        """A process has ended; `failure` is empty for a signal."""
        self._in_a_row[member.place] += 1
        if failure:
            known, times = self._last.get(member.place, ("", 0))
            self._last[member.place] = failure, times + 1 if known == failure else 1
            self._raised[failure].add(member)

    def left_out(self, member: MemberId, rounds: int) -> None:
        """A worker was left out after its process had taken part in so many rounds."""
        before = 0 if rounds >= WELL_ROUNDS else self._left_out[member.place]
        self._left_out[member.place] = before + 1

    def progressed(self, member: MemberId) -> None:
        """A worker of this slot has taken part in a step."""
        self._in_a_row.pop(member.place, None)

    def refusal(self, member: MemberId) -> str:
        """Why the slot's worker is not started again; empty if it is."""
        failure, times = self._last.get(member.place, ("", 0))
        if times >= SAME_FAILURE:
            return f"it failed {times} times with {failure}"
        if self._in_a_row[member.place] > self._tries:
            return f"it ended {self._in_a_row[member.place]} times without taking part in a step"
        if self._left_out[member.place] > self._tries:
            return f"it was left out {self._left_out[member.place]} times, each time after a few steps"
        return ""

    def common(self, members: Collection[MemberId]) -> str:
        """The failure that more than half of these members had, at least two of them; empty if none."""
        for failure, who in self._raised.items():
            places = {member.place for member in who}
            hit = sum(member.place in places for member in members)
            if hit >= 2 and 2 * hit > len(members):
                return failure
        return ""

    def forget_failures(self) -> None:
        """A step was taken: failures before it say nothing about the whole."""
        self._raised.clear()
