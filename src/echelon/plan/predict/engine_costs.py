"""What does Echelon's own software cost? Measured on single workers and single links, never on whole runs.

The thread that moves bytes runs inside the worker's CPU quota. So communication costs CPU time, and on a
node with a small quota that time is missing for computing. Costs are CPU seconds on the node with speed
1; a node with speed s and c cores (at most 1) needs c / s times as much.

A quota of q cores grants q T of CPU time in each period T. After a wait the budget of a period is there at
once, and the next one follows after T/2 on average. A burst of c seconds of CPU time therefore takes about

    max(c, c/q - T (1 - q/2))

of wall time, and c/q if no wait was before it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecCost:
    """How much smaller a codec makes gradients, what it costs, and how encoded gradients travel.

    gather: everyone gets everyone's; scatter: parts are added by their owners; sum: like gradients
    """

    smaller: float
    encode_s_per_byte: float = 1e-9
    read_s_per_byte: float = 1e-9
    travels: Literal["gather", "scatter", "sum"] = "scatter"


CODECS: Mapping[str, CodecCost] = {
    "fp16": CodecCost(smaller=2.0, encode_s_per_byte=0.3e-9, read_s_per_byte=0.3e-9),
    "bf16": CodecCost(smaller=2.0, encode_s_per_byte=0.3e-9, read_s_per_byte=0.3e-9),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCosts:
    """CPU seconds of the engine on the node with speed 1, unless another unit is named.

    step_s            of a step, apart from its parameters and buckets: hooks, records, waiting threads
    parameter_s       for each parameter of a step
    bucket_s          to fill, start and land a bucket, apart from its bytes
    fill_s_per_byte   to copy gradients into a bucket
    message_s         for a message, at each of its ends
    byte_s            for a byte, at each of its ends, by the rate of the link: pairs of bytes per second
                      and seconds per byte
    unwoken           which part of byte_s is left for bytes that arrive while a quota stops the worker:
                      they are read together, after one wake-up
    latency_s         wall time between two steps of a collective, apart from the CPU time of their messages
    exchange_s        of an exchange of statistics, apart from its messages
    settle_s          with overlap="step": for each bucket that is applied by itself
    period_s          of CPU quotas
    burst_s           how much a link can send at once after a pause, in seconds at its rate
    memory_bytes_per_s  how fast workers of one node exchange bytes
    flops_per_s       how fast rows are multiplied, for factors
    codecs            by name
    """

    step_s: float = 0.45e-3
    parameter_s: float = 25e-6
    bucket_s: float = 80e-6
    fill_s_per_byte: float = 0.15e-9
    message_s: float = 40e-6
    byte_s: tuple[tuple[float, float], ...] = (
        (5.8e6, 2.6e-9),
        (11.7e6, 4.9e-9),
        (23e6, 5.5e-9),
        (59e6, 5.0e-9),
        (119e6, 0.8e-9),
    )
    unwoken: float = 0.5
    latency_s: float = 60e-6
    exchange_s: float = 150e-6
    settle_s: float = 260e-6
    period_s: float = 0.02
    burst_s: float = 0.0
    memory_bytes_per_s: float = 4e9
    flops_per_s: float = 2e10
    codecs: Mapping[str, CodecCost] = field(default_factory=lambda: dict(CODECS))

    def byte_costs_s(self, bytes_per_s: Floats) -> Floats:
        """Seconds per byte on links of these rates, between the nearest measured ones by the logarithm."""
        known = sorted(self.byte_s)
        rates = np.log([rate for rate, _ in known])
        asked = np.log(np.clip(bytes_per_s, known[0][0], known[-1][0]))
        return np.interp(asked, rates, [seconds for _, seconds in known])


def burst_s(cpu_s: float, quota: float, period_s: float = 0.02) -> float:
    """The wall time of a burst of CPU work under a quota, after a wait of at least a period."""
    if quota >= 1:
        return cpu_s
    return max(cpu_s, cpu_s / quota - slack_s(quota, period_s))


def slack_s(quota: float, period_s: float) -> float:
    """How much earlier a burst ends than its share of the CPU would let it, if the budget was full."""
    return period_s * (1 - quota / 2) if quota < 1 else 0.0
