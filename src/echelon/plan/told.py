"""What a lab's file tells about its machines, as a planner sees it.

A lab states CPU quotas and rates, and nothing else differs: all its nodes are one machine. Speed 1 is a
whole core of that machine, where a job is profiled without a quota; a worker of a lab computes with one
thread, so that a quota above one core does not make it faster.

A lab's rates are those of the wire. A topology's rates are those of payload, as a probe measures them.
"""

from __future__ import annotations

import math

from echelon.cluster.lab.spec import LabSpec
from echelon.plan.topology import Node, Topology, Uplink

PAYLOAD = 0.95
"""The part of a wire's rate that a TCP stream carries as payload: the rest are headers."""


def topology_of_lab(
    spec: LabSpec, *, cores: float = 1.0, latency_emulated: bool = True, memory_bytes: float = math.inf
) -> Topology:
    """The topology that a lab's file describes.

    cores             of the machine that emulates it: what a node without a quota has
    latency_emulated  whether the kernel emulates latencies; without it they are 0, as in the lab
    memory_bytes      what a worker may use
    """
    kept = 1.0 if latency_emulated else 0.0
    return Topology(
        nodes=tuple(
            Node(
                name=node.name,
                site=node.site,
                speed=min(node.cpu or 1.0, 1.0),
                cores=node.cpu or cores,
                memory_bytes=memory_bytes,
                up_bytes_per_s=_payload(node.link_bytes_per_s),
                down_bytes_per_s=_payload(node.link_bytes_per_s),
                latency_s=kept * node.latency_s,
            )
            for node in spec.nodes
        ),
        uplinks=tuple(
            Uplink(
                between=uplink.between,
                bytes_per_s=_payload(uplink.rate_bytes_per_s),
                latency_s=kept * uplink.latency_s,
            )
            for uplink in spec.uplinks
        ),
        known=f"told by lab {spec.name}",
    )


def _payload(wire_bytes_per_s: float | None) -> float:
    return math.inf if wire_bytes_per_s is None else PAYLOAD * wire_bytes_per_s
