"""Which samples of the pass are still to be drawn, and who draws which next?

A ledger holds the positions of the pass's order that no committed step has used. A step leases the first
`batch` of them, cut into one part for each full member. When the step commits, the parts that were in its
sum leave the ledger. A part whose holder was lost was not in the sum: it is still in the ledger, so
another step draws it. So every sample of a pass is in exactly one committed step.

All workers keep the same ledger by the same rules. Nobody asks anybody for samples.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from echelon.membership.view import MemberId
from echelon.plan.shares import split

Span = tuple[int, int]  # positions from the first to before the second
Parts = Mapping[MemberId, tuple[Span, ...]]


class Ledger(msgspec.Struct, frozen=True, kw_only=True):
    """The open positions of a pass; `open` is sorted, and no two spans touch.

    samples    the length of a pass
    batch      how many samples a step draws
    drop_last  whether a pass ends when fewer than a batch are left
    """

    samples: int
    batch: int
    open: tuple[Span, ...]
    pass_index: int = 0
    drop_last: bool = False

    @property
    def left(self) -> int:
        """How many samples are open."""
        return count(self.open)

    def draw(self, members: Sequence[MemberId], weights: Mapping[MemberId, float] | None = None) -> Parts:
        """The next batch in one part for each member, in their order.

        Samples that would be left over and are fewer than the members join this batch. If a batch has
        fewer samples than there are members, the last members draw none.
        """
        if not members:
            return {}
        size = min(self.batch, self.left)
        rest = self.left - size
        if 0 < rest < len(members) and not self.drop_last:
            size += rest
        few = len(members) > size
        drawing = members[:size] if few else members
        shares = split(size, [1.0 if weights is None else weights[member] for member in drawing])
        parts: dict[MemberId, tuple[Span, ...]] = dict.fromkeys(members, ())
        rest_of = self.open
        for member, share in zip(drawing, shares, strict=True):
            parts[member], rest_of = _cut(rest_of, share)
        return parts

    def after(self, used: Iterable[Span]) -> Ledger:
        """The ledger once a step with these samples has committed; if nothing is left, of the next pass."""
        rest = _without(self.open, used)
        left = count(rest)
        if left and not (self.drop_last and left < self.batch):
            return msgspec.structs.replace(self, open=rest)
        return msgspec.structs.replace(self, open=((0, self.samples),), pass_index=self.pass_index + 1)


def new_ledger(samples: int, batch: int, *, drop_last: bool = False) -> Ledger:
    """The ledger of a first pass."""
    if not 1 <= batch <= samples:
        raise ValueError(f"a batch of {batch} of {samples} samples")
    return Ledger(samples=samples, batch=batch, open=((0, samples),), drop_last=drop_last)


def count(spans: Iterable[Span]) -> int:
    """How many positions they have."""
    return sum(stop - start for start, stop in spans)


def used_by(parts: Parts) -> list[Span]:
    """The spans of all members."""
    return [span for spans in parts.values() for span in spans]


def _cut(spans: Sequence[Span], size: int) -> tuple[tuple[Span, ...], tuple[Span, ...]]:
    """The first `size` positions, and the others."""
    taken: list[Span] = []
    for index, (start, stop) in enumerate(spans):
        if not size:
            return tuple(taken), tuple(spans[index:])
        middle = min(stop, start + size)
        taken.append((start, middle))
        size -= middle - start
        if middle < stop:
            return tuple(taken), ((middle, stop), *spans[index + 1 :])
    return tuple(taken), ()


def _without(spans: Sequence[Span], used: Iterable[Span]) -> tuple[Span, ...]:
    """`spans` without the used positions, all of which must be in them."""
    rest: list[Span] = []
    taken = sorted(span for span in used if span[0] < span[1])
    at = 0
    for start, stop in spans:
        while at < len(taken) and taken[at][0] < stop:
            low, high = taken[at]
            if low < start or high > stop:
                raise ValueError(f"samples {low} to {high} are not open, or drawn twice")
            if start < low:
                rest.append((start, low))
            start = high
            at += 1
        if start < stop:
            rest.append((start, stop))
    if at < len(taken):
        raise ValueError(f"samples {taken[at][0]} to {taken[at][1]} are not open")
    return tuple(rest)
