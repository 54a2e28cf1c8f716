"""How long does an average among some workers take? A ring's, over their slowest link.

With P members and n bytes: 2 (P-1) latency + 2 (P-1)/P n / bytes_per_s. See `comm/cost.py`; sums are
counted as free.
"""

from __future__ import annotations

from collections.abc import Iterable

from echelon.comm import cost
from echelon.simulate.scene import Scene


def ring_s(scene: Scene, members: Iterable[int]) -> float:
    """Seconds for one model's worth of bytes."""
    rates = [scene.bytes_per_s(rank) for rank in members]
    link = cost.Link(latency_s=scene.latency_s, seconds_per_byte=1 / min(rates))
    return cost.ring_work(len(rates), scene.learner.size_bytes).seconds(link, 0.0)
