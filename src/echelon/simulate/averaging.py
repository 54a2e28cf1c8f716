"""How long it takes to average weights among workers, and to send one worker's weights to all of them.

An average is a ring reduction over the slowest link. With P members and n bytes:

    average    2 (P-1) latency + 2 (P-1)/P n / bytes_per_s; see `comm/schedule/cost.py`; sums cost nothing
    broadcast  the shorter of two, as in `comm/schedule/spread.py`:
               along a tree    lg P latency + lg P n / bytes_per_s
               in pieces       (lg P + P-1) latency + 2 (P-1)/P n / bytes_per_s

With jitter or loss, each message of these schedules draws how late it is, and a worker sends on only what
has arrived: after a round of a ring, worker i is late by e_i = max(e_i, e_(i-1) + draw of i-1), and the
whole is as late as its latest worker. A ring draws 2 P (P-1) times.
"""

from __future__ import annotations

from collections.abc import Sequence

from echelon.comm.schedule import cost
from echelon.simulate.virtual import VirtualWorkers


def ring_s(virtual: VirtualWorkers, members: Sequence[int]) -> float:
    """Seconds for averaging one model among the members."""
    rates = [virtual.bytes_per_s(rank) for rank in members]
    link = cost.LinkCost(latency_s=virtual.latency_s, seconds_per_byte=1 / min(rates))
    return cost.ring_work(len(rates), virtual.learner.size_bytes).seconds(link, 0.0)


def ring_late_s(virtual: VirtualWorkers, members: Sequence[int]) -> float:
    """How much later than `ring_s` the average is, this time."""
    if not virtual.has_late_links:
        return 0.0
    return max(_around(virtual, members, [0.0] * len(members), 2 * (len(members) - 1)))


def spread_s(virtual: VirtualWorkers, members: Sequence[int]) -> float:
    """Seconds until all members have the weights of one of them."""
    return min(_ways_to_spread_s(virtual, members))


def _ways_to_spread_s(virtual: VirtualWorkers, members: Sequence[int]) -> tuple[float, float]:
    """Along a tree, and in pieces."""
    size = len(members)
    steps = (size - 1).bit_length()
    bytes_s = virtual.learner.size_bytes / min(virtual.bytes_per_s(rank) for rank in members)
    along_tree_s = steps * (virtual.latency_s + bytes_s)
    in_pieces_s = (steps + size - 1) * virtual.latency_s + 2 * (size - 1) / size * bytes_s
    return along_tree_s, in_pieces_s


def spread_late_s(virtual: VirtualWorkers, members: Sequence[int]) -> float:
    """How much later than `spread_s` that is, this time."""
    if not virtual.has_late_links:
        return 0.0
    late = [0.0]
    while len(late) < len(members):  # all that have the weights send them to as many others
        senders = members[: min(len(late), len(members) - len(late))]
        sent = [late[at] + virtual.late_s(rank) for at, rank in enumerate(senders)]
        late = [*sent, *late[len(sent) :], *sent]  # a sender goes on when its message has arrived
    along_tree_s, in_pieces_s = _ways_to_spread_s(virtual, members)
    return max(late if along_tree_s <= in_pieces_s else _around(virtual, members, late, len(members) - 1))


def _around(
    virtual: VirtualWorkers, members: Sequence[int], late: Sequence[float], rounds: int
) -> Sequence[float]:
    """How late each member is after so many rounds of a ring, in which each sends to the next one."""
    for _ in range(rounds):
        sent = [own + virtual.late_s(rank) for own, rank in zip(late, members, strict=True)]
        late = [max(own, sent[at - 1]) for at, own in enumerate(late)]
    return late
