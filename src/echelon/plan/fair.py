"""Which rate does each of several flows get, if all send at the same time? Max-min fair sharing.

The rates of all flows grow together until a link is full; its flows keep their rate, the others grow on.
Long TCP flows of similar latency come close to this.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from echelon.plan.measured import Flow
from echelon.plan.topology import Topology

_Line = tuple[str, str]  # a node's link with its direction, or an uplink with the site that it leaves


def fair_rates(topology: Topology, flows: Sequence[Flow]) -> tuple[float, ...]:
    """Bytes per second of each flow."""
    lines = [_lines(topology, *flow) for flow in flows]
    free = {line: rate for path in lines for line, rate in path.items()}
    rates = [math.inf] * len(flows)
    growing = {at for at, path in enumerate(lines) if path}
    while growing:
        users: dict[_Line, int] = {}
        for at in growing:
            for line in lines[at]:
                users[line] = users.get(line, 0) + 1
        fullest = min(users, key=lambda line: free[line] / users[line])
        level = max(0.0, free[fullest] / users[fullest])
        for at in [at for at in growing if fullest in lines[at]]:
            growing.remove(at)
            rates[at] = level
            for line in lines[at]:
                free[line] -= level if math.isfinite(level) else 0.0
    return tuple(rates)


def _lines(topology: Topology, sender: str, receiver: str) -> dict[_Line, float]:
    """Everything that a flow passes, with its rate; nothing if a node sends to itself."""
    if sender == receiver:
        return {}
    one, other = topology.node(sender), topology.node(receiver)
    lines = {(one.name, "up"): one.up_bytes_per_s, (other.name, "down"): other.down_bytes_per_s}
    here = one.site
    for uplink in topology.route(one.site, other.site):
        lines[uplink.name, f"from {here}"] = uplink.bytes_per_s
        here = uplink.between[1] if uplink.between[0] == here else uplink.between[0]
    return lines
