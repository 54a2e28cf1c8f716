"""What a plan's file says about machines and links: sites, speeds and rates of the topology. Pure."""

from __future__ import annotations

import math
from dataclasses import replace

from echelon.cluster.lab.spec import show_rate
from echelon.config.units import show_seconds
from echelon.plan.plan import Plan, PlannedUplink, WorkerPlan
from echelon.plan.topology import Node, Topology


def placed(plan: Plan, topology: Topology) -> Plan:
    """The plan with what the topology knows about its nodes; others stay as they are."""
    known = {node.name: node for node in topology.nodes}
    workers = tuple(
        _placed(worker, known[worker.node]) if worker.node in known else worker for worker in plan.workers
    )
    uplinks = tuple(
        PlannedUplink(
            between=uplink.between,
            rate="" if math.isinf(uplink.bytes_per_s) else show_rate(uplink.bytes_per_s),
            latency=show_seconds(uplink.latency_s) if uplink.latency_s > 0 else "",
        )
        for uplink in topology.uplinks
    )
    return replace(plan, workers=workers, uplinks=uplinks)


def _placed(worker: WorkerPlan, node: Node) -> WorkerPlan:
    return replace(
        worker,
        site=node.site,
        node_speed=node.speed,
        link=show_link(node.up_bytes_per_s, node.down_bytes_per_s),
        memory="" if math.isinf(node.memory_bytes) else f"{math.ceil(node.memory_bytes / 2**20)}MiB",
    )


def show_link(up_bytes_per_s: float, down_bytes_per_s: float) -> str:
    """A node's link as text; empty if it is unlimited."""
    if math.isinf(up_bytes_per_s) and math.isinf(down_bytes_per_s):
        return ""
    up, down = (
        "unlimited" if math.isinf(rate) else show_rate(rate) for rate in (up_bytes_per_s, down_bytes_per_s)
    )
    return up if up == down else f"{up} up, {down} down"
