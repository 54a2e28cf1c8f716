"""How long does an average among some workers take, and giving all of them one's weights?

An average is a ring's, over their slowest link. With P members and n bytes:

    average   2 (P-1) latency + 2 (P-1)/P n / bytes_per_s; see `comm/cost.py`; sums are counted as free
    spread    the shorter of two, as in `comm/spread.py`:
              along a tree    lg P latency + lg P n / bytes_per_s
              in pieces       (lg P + P-1) latency + 2 (P-1)/P n / bytes_per_s
"""

from __future__ import annotations

from collections.abc import Sequence

from echelon.comm.schedule import cost
from echelon.simulate.scene import Stage


def ring_s(scene: Stage, members: Sequence[int]) -> float:
    """Seconds for one model's worth of bytes."""
    rates = [scene.bytes_per_s(rank) for rank in members]
    link = cost.LinkCost(latency_s=scene.latency_s, seconds_per_byte=1 / min(rates))
    return cost.ring_work(len(rates), scene.learner.size_bytes).seconds(link, 0.0)


def spread_s(scene: Stage, members: Sequence[int]) -> float:
    """Seconds until all members have the weights of one of them."""
    size = len(members)
    steps = (size - 1).bit_length()
    bytes_s = scene.learner.size_bytes / min(scene.bytes_per_s(rank) for rank in members)
    along_tree_s = steps * (scene.latency_s + bytes_s)
    in_pieces_s = (steps + size - 1) * scene.latency_s + 2 * (size - 1) / size * bytes_s
    return min(along_tree_s, in_pieces_s)
