"""Assigns gradients to buckets. Pure: the same parameters give the same buckets on every worker.

Backward computes gradients from the last layer to the first, so buckets are filled and sent in that order.
The first is small, so that it is sent early. A bucket holds one type on one device.

Bucket size: most of the transfer time is hidden behind backward, except that of the last bucket. So small
buckets are better, as long as latency is a small part of their time. `sizes` computes the smallest such
size.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from echelon.comm.schedule.cost import LinkCost, choose

# In shared memory, or without a measured link: a reduction costs two short waits, 8 MiB take some ms.
FIRST_BYTES = 1 << 20
BUCKET_BYTES = 8 << 20

LEAST_BYTES = 256 << 10
MOST_BYTES = 16 << 20
_LATENCY_SHARE = 0.05
_IN_FLIGHT = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One parameter: its size, and its kind; a bucket holds one kind."""

    size_bytes: int
    kind: Hashable


def sizes(link: LinkCost | None, size: int, *, total_bytes: int | None = None) -> tuple[int, int]:
    """The bytes of the first bucket, and of the others, for `size` workers on these links.

    The smallest power of two n whose cheapest collective is at most 5 % slower than the bandwidth allows:

        min over collectives of its seconds for n  <=  1.05 * 2 (P-1)/P n beta

    For a ring that is n >= 20 P alpha/beta, for halving-doubling n >= 20 lg P P/(P-1) alpha/beta. Not less
    than 256 KiB nor more than 16 MiB; and a quarter of the model at most, if `total_bytes` is given, so
    that several are in flight at once. The first holds a quarter of the others. Powers of two, so that
    about the same links give the same buckets. Without a link (shared memory, or alone): 1 MiB, then 8 MiB.
    """
    if link is None or size == 1:
        return FIRST_BYTES, BUCKET_BYTES
    bucket_bytes = LEAST_BYTES
    while bucket_bytes < MOST_BYTES and not _latency_is_cheap(link, size, bucket_bytes):
        bucket_bytes *= 2
    if total_bytes is not None:
        while bucket_bytes > LEAST_BYTES and bucket_bytes * _IN_FLIGHT > total_bytes:
            bucket_bytes //= 2
    return max(LEAST_BYTES, bucket_bytes // 4), bucket_bytes


def _latency_is_cheap(link: LinkCost, size: int, length_bytes: int) -> bool:
    name, costs, _ = choose(size, length_bytes, link)
    on_the_wire_s = 2 * (size - 1) / size * length_bytes * link.seconds_per_byte
    return costs[name] <= (1 + _LATENCY_SHARE) * on_the_wire_s


def assign(
    items: Sequence[Item], *, first_bytes: int = FIRST_BYTES, bucket_bytes: int = BUCKET_BYTES
) -> list[list[int]]:
    """Indices of the items, bucket by bucket, in the order in which buckets are sent."""
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
