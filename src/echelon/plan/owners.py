"""Who sums, if workers are unequal: all of them, or only the fast ones? Pure.

Every message costs its worker some computing, which takes a slow worker longer. With m seconds a message
on the fastest worker, speeds s_i relative to it, latency alpha, beta seconds a byte, n bytes, P workers:

    all sum     a usual collective, each step of which waits for the slowest worker to send and to receive:
                alpha + 2 m / min s_i
    k sum       every other worker sends k messages and gets k back, each one that sums P - 1:
                2 alpha + 2 max(k m / min s_i, (P - 1) m / s_k) + n (1 + (P - 2) / k) beta

Few that sum are best for short buffers and very unequal workers; all are best for long buffers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from echelon.comm.schedule.cost import LinkCost, choose

# What a message costs a worker's processor, at both ends: the loop wakes up, reads or writes, and goes on.
MESSAGE_S = 0.2e-3
_WORTHWHILE = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class Owners:
    """The collective, what it is expected to take, and the ranks that sum for all; none if all sum."""

    collective: str
    ranks: tuple[int, ...]
    seconds: float
    instead_s: float


def fewer_owners(speeds: Sequence[float], length_bytes: float, link: LinkCost) -> Owners | None:
    """The way that costs slow workers least; None if it is not worth it."""
    size = len(speeds)
    if size < 3 or not length_bytes:
        return None
    fastest = max(speeds)
    relative = [speed / fastest for speed in speeds]
    slow_s = MESSAGE_S / min(relative)
    slowed = LinkCost(
        latency_s=link.latency_s + 2 * slow_s,
        seconds_per_byte=link.seconds_per_byte,
        message_s=2 * slow_s,
    )
    usual, _, _ = choose(size, round(length_bytes), link)
    other, costs, _ = choose(size, round(length_bytes), slowed)
    instead_s = costs[usual]
    by_speed = sorted(range(size), key=lambda rank: (-relative[rank], rank))
    taken_s = {
        count: 2 * link.latency_s
        + 2 * max(count * slow_s, (size - 1) * MESSAGE_S / relative[by_speed[count - 1]])
        + length_bytes * (1 + (size - 2) / count) * link.seconds_per_byte
        for count in range(1, size)
    }
    count = min(taken_s, key=lambda count: (taken_s[count], count))
    seconds = min(taken_s[count], costs[other])
    if seconds >= _WORTHWHILE * instead_s:
        return None
    if costs[other] <= taken_s[count]:
        return Owners(collective=other, ranks=(), seconds=seconds, instead_s=instead_s)
    chosen = tuple(sorted(by_speed[:count]))
    weights = ", ".join("1" if rank in chosen else "0" for rank in range(size))
    return Owners(
        collective=f"direct(weights=[{weights}])", ranks=chosen, seconds=seconds, instead_s=instead_s
    )
