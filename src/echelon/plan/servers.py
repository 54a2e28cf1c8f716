"""How many parameter servers should there be? As many as keep them from being slower than the workers.

Each of P workers sends n bytes and gets n bytes in a step. With s servers each of them takes and gives
P n / s, on its own link, so s grows linearly with P where links are alike; every further server costs each
worker one more message (Li et al. 2014: the number of servers grows with that of workers).

    seconds = max(n / worker's rate, P n / (s * server's rate)) + s * latency
"""

from __future__ import annotations

from collections.abc import Sequence

from echelon.plan.job import JobProfile
from echelon.plan.topology import Node, Topology

_NEAR = 1.02  # fewer servers, if that costs no more than this


def best_servers(topology: Topology, job: JobProfile, members: Sequence[Node]) -> int:
    """The fewest servers whose exchange is within 2 % of the quickest; the best links have them."""
    seconds = [serving_seconds(topology, job, members, servers) for servers in range(1, len(members) + 1)]
    quickest = min(seconds)
    return 1 + next(index for index, one in enumerate(seconds) if one <= _NEAR * quickest)


def serving_seconds(topology: Topology, job: JobProfile, members: Sequence[Node], servers: int) -> float:
    """What the exchange of all gradients takes with so many servers, on the nodes with the best links."""
    rates = sorted((min(node.up_bytes_per_s, node.down_bytes_per_s) for node in members), reverse=True)
    sites = {node.site for node in members}
    between = [
        (uplink.bytes_per_s, uplink.latency_s)
        for one in sites
        for other in sites
        for uplink in topology.route(one, other)
    ]
    slowest = min([rates[-1], *(rate for rate, _ in between)])
    latency_s = max(node.latency_s for node in members) * 2 + max(
        (late for _, late in between), default=0.0
    )
    size = job.gradient_bytes
    worker_s = size / slowest
    server_s = len(members) * size / (servers * rates[servers - 1])
    return max(worker_s, server_s) + servers * latency_s
