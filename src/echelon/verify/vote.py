"""Which of several workers' values is the right one, and who has another? Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Vote:
    """The outcome of a vote. Members are counted from 0.

    source    the first member with the most common value; of equally common ones, with the first member's
    others    the members with another value
    majority  whether more than half of the members have the source's value
    """

    source: int
    others: tuple[int, ...]
    majority: bool


def vote(values: Sequence[Hashable]) -> Vote:
    """Count equal values."""
    count = Counter(values)
    first = {value: index for index, value in reversed(list(enumerate(values)))}
    right = max(count, key=lambda value: (count[value], -first[value]))
    others = tuple(index for index, value in enumerate(values) if value != right)
    return Vote(first[right], others, 2 * count[right] > len(values))
