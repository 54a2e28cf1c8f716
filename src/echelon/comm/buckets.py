"""Which gradients travel together. Pure: the same parameters give the same buckets on every worker.

Backward produces gradients from the last layer to the first, so buckets are filled in that order and
can leave in it. The first is small, to leave early. A bucket holds one type on one device.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

FIRST_BYTES = 1 << 20
BUCKET_BYTES = 8 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One parameter: its size, and what it may share a bucket with."""

    size_bytes: int
    kind: Hashable


def assign(
    items: Sequence[Item], *, first_bytes: int = FIRST_BYTES, bucket_bytes: int = BUCKET_BYTES
) -> list[list[int]]:
    """Indices of the items, bucket by bucket, in the order in which buckets leave."""
    buckets: list[list[int]] = []
    open_of: dict[Hashable, int] = {}
    filled: list[int] = []
    for index in reversed(range(len(items))):
        item = items[index]
        at = open_of.get(item.kind)
        limit = first_bytes if at == 0 else bucket_bytes
        if at is None or (filled[at] and filled[at] + item.size_bytes > limit):
            at = open_of[item.kind] = len(buckets)
            buckets.append([])
            filled.append(0)
        buckets[at].append(index)
        filled[at] += item.size_bytes
    return buckets
