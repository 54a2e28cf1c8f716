"""How much later a transfer arrives than its link's rate and latency say: jitter and loss.

Every transfer of a worker draws from a generator of that worker and seed: first its jitter, from a
distribution of delays (`cluster/delays/`), then, with probability `loss` each time, whether it is lost and
sent again, which costs RETRANSMIT_S. A worker's transfers meet the same draws in order, under every policy.
"""

from __future__ import annotations

import random

from echelon.cluster.delay import DELAYS
from echelon.simulate.setting import Setting

# The least time after which Linux's TCP sends again what was not acknowledged.
RETRANSMIT_S = 0.2


class LateTransfers:
    """The draws of one run. Without jitter and loss nothing is drawn."""

    def __init__(self, setting: Setting, seed: int) -> None:
        self._jitter = DELAYS.build(setting.jitter, where="--jitter") if setting.jitter else None
        self._loss = setting.loss
        self.happen = self._jitter is not None or self._loss > 0
        self._draws = [
            random.Random(f"{seed}/{rank}/link") for rank in range(setting.workers if self.happen else 0)
        ]

    def next_s(self, rank: int) -> float:
        """How many seconds later the worker's next transfer arrives."""
        if not self.happen:
            return 0.0
        draw = self._draws[rank]
        late_s = self._jitter.sample(draw) if self._jitter is not None else 0.0
        while self._loss > 0 and draw.random() < self._loss:
            late_s += RETRANSMIT_S
        return late_s
