"""What does a step take if gradients are not reduced in every step? Roughly, by family of policies.

    none        every worker for itself
    averaging   local(k), gossip, elastic-averaging: k steps alone, then weights travel once, and nothing
                hides it; all meet
    serving     async and others with servers: workers push gradients and pull weights without waiting for
                each other, as far as the servers' links and CPUs keep up
    levels      the inner policy inside groups, the outer one between them

A step is what a global batch takes: the batch, divided by the samples per second of all workers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from echelon.config.call import Call, parse_call
from echelon.plan.predict.flows import Floats, Phases, at_once, on_members, phases_of, served_phases
from echelon.plan.predict.network import CollectiveCost, SharedLinks
from echelon.plan.strategy import RunStrategy

PolicyKind = Literal["reduce", "none", "average", "serve", "levels"]
_AVERAGING = {"local": 8, "gossip": 1, "elastic-averaging": 4}
_ALONE = ("none", "hogwild")


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyCost:
    """How a policy communicates: its kind, and after how many steps weights are averaged."""

    kind: PolicyKind
    period: int = 1


def policy_of(sync: str) -> PolicyCost:
    """The kind of a policy by its name; one with servers if it is not known."""
    call = parse_call(sync)
    if call.name == "full":
        return PolicyCost(kind="reduce")
    if call.name in _ALONE:
        return PolicyCost(kind="none")
    if call.name in _AVERAGING:
        return PolicyCost(kind="average", period=_period(call, _AVERAGING[call.name]))
    if call.name == "levels":
        outer = str(call.options.get("outer", call.args[1] if len(call.args) > 1 else "local(8)"))
        return PolicyCost(kind="levels", period=policy_of(outer).period)
    return PolicyCost(kind="serve")


def _period(call: Call, usual: int) -> int:
    given = call.options.get("period", call.args[0] if call.args else usual)
    return max(1, int(given)) if isinstance(given, int | float) else usual


def inside_phases(strategy: RunStrategy, collective: str = "ring") -> Phases:
    """All groups reduce at the same time, each for itself."""
    return at_once([on_members(phases_of(collective, len(group)), group) for group in strategy.groups])


def between_phases(strategy: RunStrategy) -> Phases:
    """The groups' first members reduce."""
    first = [group[0] for group in strategy.groups]
    return on_members(phases_of("ring", len(first)), first)


def serving_cycle_s(
    alone_s: Floats, network: SharedLinks, bytes_moved: float, moving_s: Callable[[CollectiveCost], Floats]
) -> Floats:
    """Seconds from one step of a worker to its next, if servers take what comes.

    A worker computes, then moves its gradients and weights, alone on its links. Servers get behind if all
    workers together load a link or a CPU for longer than that: then all slow down alike.
    """
    servers = max(1, len(network.server_nodes))
    cost = network.of(served_phases(network.size, servers))
    rates = np.array([min(node.up_bytes_per_s, node.down_bytes_per_s) for node in network.nodes])
    own_s = 2 * bytes_moved / rates
    cycle_s = alone_s + np.where(np.isfinite(own_s), own_s, 0.0)
    busy_s = max(
        float((cost.link_s_per_byte * bytes_moved).max(initial=0.0)), float(moving_s(cost).max(initial=0.0))
    )
    mean_s = network.size / float((1 / cycle_s).sum())
    return cycle_s * max(1.0, busy_s / mean_s)
