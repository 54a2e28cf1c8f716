"""Which nodes form a group? By transfer cost and compute power, by equal power, or at random.

The first seed's Algorithm 1 (Wang et al., section III-A, "Homogeneous Group Separation") compares, for
workers i and j, the order of magnitude of the cost per byte from each one's predecessor in the list:
O(C_i,i-1) = O(C_j,j-1). Read literally it

- gives no group to the first two workers, nor to any worker that matches nobody;
- adds a worker once for each match, and keeps the group of the last one;
- depends on the order of the list: with two sites in turn every predecessor is far away, so that all
  workers look alike, and the first worker of a second site always counts as far away;
- returns groups by compute power, `group[]`, that it never fills.

What is meant: nodes whose links to each other cost the same order of magnitude form a group, and inside
it those that compute at the same order of magnitude. So here a node's order is that of its *cheapest* link,
and two nodes share a group if the link between them is of that order for both, directly or through others.

Orders of magnitude are not cut at powers of ten, where 0.99 and 1.01 would differ: values are of one order
if the largest is less than ten times the smallest and no gap between neighbours is √10 or more; otherwise
they are cut at the widest gap.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Literal

import numpy as np
import numpy.typing as npt

from echelon.plan.equal_power import Names, equal_power_groups
from echelon.plan.groups import Groups
from echelon.plan.job import JobProfile
from echelon.plan.topology import Topology

MAGNITUDE = 10.0
_GAP = math.sqrt(MAGNITUDE)
_UNEQUAL = 1.25  # speeds that differ by less than this factor are the same
_MESSAGE_BYTES = 1 << 20  # without a job: costs per byte are those of messages of this size
_MOST_VALUES = 4096

GroupingKind = Literal["none", "transfer", "transfer and power", "equal power", "random"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Grouping:
    """Groups of node names, and why. Every node is in exactly one; neighbours are next to each other."""

    groups: tuple[Names, ...]
    kind: GroupingKind
    reason: str

    def ranks(self, nodes: Sequence[str]) -> Groups:
        """The groups as ranks, for nodes by rank; nodes that do not take part are left out."""
        place = {name: rank for rank, name in enumerate(nodes)}
        found = (tuple(place[name] for name in group if name in place) for group in self.groups)
        return tuple(group for group in found if group)


def form_groups(
    topology: Topology, job: JobProfile | None = None, *, most: int | None = None, seed: int = 0
) -> Grouping:
    """Groups for all nodes, of at most `most` members; on one network only if `most` asks for them."""
    names = tuple(node.name for node in topology.nodes)
    speeds = compute_speeds(topology, job)
    by_cost = separate_by_transfer(topology, job)
    if len(by_cost) > 1:
        return _by_transfer(topology, by_cost, speeds, most)
    if most is None or len(names) <= most:
        return Grouping(groups=(names,), kind="none", reason=_no_groups(names, most))
    count = math.ceil(len(names) / most)
    if _unequal(speeds.values()):
        equal = equal_power_groups(names, [speeds[name] for name in names], count, most=most)
        totals = [sum(speeds[name] for name in group) for group in equal]
        reason = (
            f"The nodes share one network and differ in speed by a factor of "
            f"{max(speeds.values()) / min(speeds.values()):.1f}: {count} groups of equal power, "
            f"{min(totals):.3g} to {max(totals):.3g}, of at most {most} nodes."
        )
        return Grouping(groups=equal, kind="equal power", reason=reason)
    reason = (
        f"Nothing tells the nodes apart: {count} groups at random (seed {seed}), of at most {most} nodes."
    )
    return Grouping(groups=random_groups(names, count, seed=seed), kind="random", reason=reason)


def compute_speeds(topology: Topology, job: JobProfile | None = None) -> dict[str, float]:
    """How fast each node computes: an equal share of the job, or by its speed without a job."""
    if job is None:
        return {node.name: node.speed for node in topology.nodes}
    share = job.batch / len(topology.nodes)
    return {node.name: 1 / max(job.cost_on(node).at(share), 1e-12) for node in topology.nodes}


def separate_by_transfer(topology: Topology, job: JobProfile | None = None) -> tuple[Names, ...]:
    """Algorithm 1, first part: nodes whose links to each other cost the same order of magnitude."""
    names = [node.name for node in topology.nodes]
    if len(names) < 2:
        return (tuple(names),)
    orders = _orders(transfer_costs(topology, job))
    own = orders.min(axis=1)
    alike = (orders == own[:, None]) & (orders == own[None, :])
    left = set(range(len(names)))
    groups = []
    for first in range(len(names)):
        if first not in left:
            continue
        group, waiting = {first}, [first]
        while waiting:
            near = {int(at) for at in np.flatnonzero(alike[waiting.pop()])} & left - group
            group |= near
            waiting += near
        left -= group
        groups.append(tuple(names[at] for at in sorted(group)))
    return tuple(groups)


def separate_by_power(names: Sequence[str], speeds: Mapping[str, float]) -> tuple[Names, ...]:
    """Algorithm 1, second part: nodes that compute at the same order of magnitude; the fastest first."""
    limits = order_limits([speeds[name] for name in names])
    found: dict[int, list[str]] = {}
    for name in names:
        found.setdefault(sum(speeds[name] >= limit for limit in limits), []).append(name)
    return tuple(tuple(found[order]) for order in sorted(found, reverse=True))


def separate(topology: Topology, job: JobProfile | None = None) -> tuple[Names, ...]:
    """Algorithm 1 as it is meant: by transfer cost, then by order of magnitude of compute power."""
    speeds = compute_speeds(topology, job)
    by_cost = separate_by_transfer(topology, job)
    return tuple(part for group in by_cost for part in separate_by_power(group, speeds))


def random_groups(names: Sequence[str], count: int, *, seed: int = 0) -> tuple[Names, ...]:
    """`count` groups of sizes that differ by at most one, drawn by a seed; members in the given order.

    By the central limit theorem the mean power of groups of s nodes varies with 1/√s, so that large groups
    formed at random are alike even if nodes are not.
    """
    count = max(1, min(count, len(names)))
    order = list(range(len(names)))
    random.Random(seed).shuffle(order)
    dealt = [sorted(order[at::count]) for at in range(count)]
    return tuple(tuple(names[at] for at in group) for group in sorted(dealt))


def limit_size(
    groups: Sequence[Sequence[str]], most: int | None, speeds: Mapping[str, float] | None = None
) -> tuple[Names, ...]:
    """Cut groups of more than `most` into parts of equal power; in the given order without speeds."""
    out: list[Names] = []
    for group in groups:
        if most is None or len(group) <= most:
            out.append(tuple(group))
        elif speeds is not None and _unequal([speeds[name] for name in group]):
            powers = [speeds[name] for name in group]
            out += equal_power_groups(group, powers, math.ceil(len(group) / most), most=most)
        else:
            parts = math.ceil(len(group) / most)
            cuts = [len(group) * at // parts for at in range(parts + 1)]
            out += [tuple(group[start:stop]) for start, stop in pairwise(cuts)]
    return tuple(out)


def transfer_costs(topology: Topology, job: JobProfile | None = None) -> npt.NDArray[np.float64]:
    """Seconds per byte between each two nodes, the slower way, for a message of the job's ring.

    Between sites all members of the smaller site are taken to send at once, because in a sum they do.
    """
    nodes = topology.nodes
    message = max(job.gradient_bytes / len(nodes), 1.0) if job is not None else _MESSAGE_BYTES
    sites = topology.sites
    place = np.array([sites.index(node.site) for node in nodes])
    size = {site: sum(node.site == site for node in nodes) for site in sites}
    rate, late = np.full((len(sites),) * 2, math.inf), np.zeros((len(sites),) * 2)
    for one, start in enumerate(sites):
        for other, stop in enumerate(sites):
            crossed = topology.route(start, stop)
            slowest = min((uplink.bytes_per_s for uplink in crossed), default=math.inf)
            rate[one, other] = slowest / min(size[start], size[stop])
            late[one, other] = sum(uplink.latency_s for uplink in crossed)
    up = np.array([node.up_bytes_per_s for node in nodes])
    down = np.array([node.down_bytes_per_s for node in nodes])
    own = np.array([node.latency_s for node in nodes])
    rates = np.minimum(np.minimum(up[:, None], down[None, :]), rate[np.ix_(place, place)])
    costs = (own[:, None] + own[None, :] + late[np.ix_(place, place)]) / message + 1 / rates
    slower: npt.NDArray[np.float64] = np.maximum(costs, costs.T)
    return slower


def order_limits(values: Sequence[float]) -> list[float]:
    """Where orders of magnitude are cut, ascending; each value of an order is at least its limit."""
    ordered = sorted(set(values))
    if len(ordered) < 2 or ordered[0] <= 0:
        return []
    gaps = [large / small for small, large in pairwise(ordered)]
    if ordered[-1] < MAGNITUDE * ordered[0] and max(gaps) < _GAP:
        return []
    # Among gaps of the same width the one in the middle, so that equal steps are cut evenly.
    middle = (len(gaps) - 1) / 2
    cut = max(range(len(gaps)), key=lambda at: (round(gaps[at], 6), -abs(at - middle)))
    lower, upper = ordered[: cut + 1], ordered[cut + 1 :]
    return [*order_limits(lower), math.sqrt(lower[-1] * upper[0]), *order_limits(upper)]


def _orders(costs: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    """The order of magnitude of each cost, from 0 up; a node and itself get one that no pair has."""
    pairs = costs[np.triu_indices(len(costs), 1)]
    floor = max(float(pairs[pairs > 0].min()) if (pairs > 0).any() else 1.0, 1e-15)
    values = np.unique(np.maximum(pairs, floor))
    # Rounded values stand for a long list of them; gaps of √10 are far wider than what is lost.
    if len(values) > _MOST_VALUES:
        values = np.unique(np.exp(np.round(np.log(values), 3)))
    orders = np.searchsorted(order_limits(values.tolist()), np.maximum(costs, floor), side="right")
    np.fill_diagonal(orders, int(orders.max()) + 1)
    return orders


def _by_transfer(
    topology: Topology, by_cost: Sequence[Names], speeds: Mapping[str, float], most: int | None
) -> Grouping:
    by_power = [part for group in by_cost for part in separate_by_power(group, speeds)]
    groups = limit_size(by_power, most, speeds)
    inside, between = _inside_and_between(topology, by_cost)
    reason = (
        f"Bytes between groups cost {between / inside:.0f} times what they cost inside: "
        if inside
        else "Links differ by an order of magnitude: "
    ) + f"{len(by_cost)} groups by transfer cost"
    if len(by_power) > len(by_cost):
        reason += f", {len(by_power)} by order of magnitude of compute power inside them"
    if len(groups) > len(by_power):
        reason += f", {len(groups)} with at most {most} nodes"
    kind: GroupingKind = "transfer and power" if len(by_power) > len(by_cost) else "transfer"
    return Grouping(groups=groups, kind=kind, reason=reason + ".")


def _inside_and_between(topology: Topology, groups: Sequence[Names]) -> tuple[float, float]:
    """The median costs; 0 inside if every group has one member."""
    costs = transfer_costs(topology)
    home = {name: at for at, group in enumerate(groups) for name in group}
    at = np.array([home[node.name] for node in topology.nodes])
    same = at[:, None] == at[None, :]
    between = costs[~same]
    np.fill_diagonal(same, val=False)
    inside = costs[same]
    return (median(inside.tolist()) if inside.size else 0.0), median(between.tolist())


def _no_groups(names: Sequence[str], most: int | None) -> str:
    if len(names) == 1:
        return "One node needs no groups."
    few = f" of at most {most}" if most is not None else ""
    return f"All {len(names)} nodes reach each other at similar cost: one group{few}."


def _unequal(speeds: Iterable[float]) -> bool:
    values = list(speeds)
    return max(values) >= _UNEQUAL * min(values)
