"""How long it takes to average weights among workers, and to send one worker's weights to all of them.

An average is a ring reduction over the slowest link. With P members and n bytes:

    average    2 (P-1) latency + 2 (P-1)/P n / bytes_per_s; see `comm/schedule/cost.py`; sums cost nothing
    broadcast  the shorter of two, as in `comm/schedule/spread.py`:
               along a tree    lg P latency + lg P n / bytes_per_s
               in pieces       (lg P + P-1) latency + 2 (P-1)/P n / bytes_per_s
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


def spread_s(virtual: VirtualWorkers, members: Sequence[int]) -> float:
    """Seconds until all members have the weights of one of them."""
    size = len(members)
    steps = (size - 1).bit_length()
    bytes_s = virtual.learner.size_bytes / min(virtual.bytes_per_s(rank) for rank in members)
    along_tree_s = steps * (virtual.latency_s + bytes_s)
    in_pieces_s = (steps + size - 1) * virtual.latency_s + 2 * (size - 1) / size * bytes_s
    return min(along_tree_s, in_pieces_s)
