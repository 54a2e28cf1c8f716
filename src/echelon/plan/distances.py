"""Which nodes are near each other? Distances from measurements, and clusters by distance.

A distance is the logarithm to base 2 of a factor: 0 between nodes of one site, 1 where a site's uplink
halves the rate or doubles the latency. What a node's own link explains does not count: a rate is compared
with the best rates of its sender and its receiver, a latency with the two nodes' own latencies. So a node
with a slow link is as near as others.

Clusters are merged by average distance, which noise of single measurements hardly changes, and are left
apart from the widest gap between a factor of 1.25 and a factor of 2 on.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise, takewhile
from statistics import fmean, median

import numpy as np
import numpy.typing as npt

from echelon.plan.measured import Flow, FlowsMeasured, PairMeasured

# Latency that no access link explains separates sites from here on. Below, schedulers and switches differ.
LEAST_LATENCY_S = 0.5e-3
_NEAR, _FAR = math.log2(1.25), 1.0
_OWN_LATENCY_S = 2e-3  # a node's own link may add so much; a node with more is elsewhere
_BEST = 0.75  # rates of at least this part of a node's best rate are taken as its best rates
_LEAST_FLOWS = 4

Matrix = npt.NDArray[np.float64]


def best_rates(rates: Mapping[Flow, float], end: int) -> dict[str, float]:
    """Each node's own link as a sender (end 0) or a receiver (end 1): the mean of its best rates."""
    found: dict[str, list[float]] = {}
    for flow, rate in rates.items():
        found.setdefault(flow[end], []).append(rate)
    least = {name: _BEST * max(own) for name, own in found.items()}
    return {name: fmean(rate for rate in own if rate >= least[name]) for name, own in found.items()}


def by_pairs(nodes: Sequence[str], pairs: Iterable[PairMeasured]) -> Matrix:
    """Distances by rate and latency; not-a-number where nothing was measured."""
    pairs = list(pairs)
    rates = {(pair.sender, pair.receiver): pair.bytes_per_s for pair in pairs}
    up, down = best_rates(rates, 0), best_rates(rates, 1)
    found: dict[Flow, list[float]] = {}
    for (sender, receiver), rate in rates.items():
        possible = min(up[sender], down[receiver])
        found.setdefault(_ordered(sender, receiver), []).append(math.log2(possible / rate))
    distances = {pair: fmean(several) for pair, several in found.items()}
    between = latencies(pairs)
    own = own_latencies(between)
    for pair, latency in between.items():
        explained = own[pair[0]] + own[pair[1]]
        if latency - explained >= LEAST_LATENCY_S:
            distances[pair] = max(distances[pair], math.log2(latency / max(explained, 1e-9)))
    return _matrix(nodes, distances)


def latencies(pairs: Iterable[PairMeasured]) -> dict[Flow, float]:
    """One way, the mean of both ways, by the two names in order."""
    found: dict[Flow, list[float]] = {}
    for pair in pairs:
        found.setdefault(_ordered(pair.sender, pair.receiver), []).append(pair.latency_s)
    return {pair: fmean(several) for pair, several in found.items()}


def own_latencies(between: Mapping[Flow, float]) -> dict[str, float]:
    """What each node's own link contributes to its latencies.

    With i's nearest node j and another near node k, i's part is (ij + ik - jk) / 2. Nodes that are far away
    say nothing, since their noise is larger than the part; without a near third node it is half of ij.
    A part of more than 2 ms, and twice that of most nodes, is no link to a switch.
    """
    near: dict[str, dict[str, float]] = {}
    for (one, other), latency in between.items():
        near.setdefault(one, {})[other] = latency
        near.setdefault(other, {})[one] = latency
    found = {}
    for name, to in near.items():
        nearest = min(to, key=lambda other: to[other])
        reach = to[nearest]
        thirds = [
            (reach + to[third] - near[nearest][third]) / 2
            for third in to
            if third != nearest
            and third in near[nearest]
            and max(to[third], near[nearest][third]) <= 3 * reach
        ]
        found[name] = min(max(median(thirds), 0.1 * reach), reach) if thirds else reach / 2
    most = max(_OWN_LATENCY_S, 2 * median(found.values())) if found else 0.0
    return {name: min(part, most) for name, part in found.items()}


def by_flows(nodes: Sequence[str], flows: Iterable[FlowsMeasured], alone: Mapping[Flow, float]) -> Matrix:
    """Distances by what flows lose when others send too; not-a-number where nothing tells.

    Only flows count that share neither their sender nor their receiver with another flow, so that what they
    lose, they lose to a line in between. They are compared with the flow that loses least among sets of as
    many flows, because many flows at a time also cost computing.
    """
    kept: dict[int, list[tuple[Flow, float]]] = {}
    for one in flows:
        senders = [sender for sender, _ in one.flows]
        receivers = [receiver for _, receiver in one.flows]
        for flow, rate in zip(one.flows, one.bytes_per_s, strict=True):
            single = senders.count(flow[0]) == 1 and receivers.count(flow[1]) == 1
            if single and flow in alone and len(one.flows) >= _LEAST_FLOWS:
                kept.setdefault(len(one.flows), []).append((flow, rate / alone[flow]))
    found: dict[Flow, list[float]] = {}
    for several in kept.values():
        best = best_rates({(str(at), ""): part for at, (_, part) in enumerate(several)}, 1)[""]
        for flow, part in several:
            found.setdefault(_ordered(*flow), []).append(math.log2(best / part))
    return _matrix(nodes, {pair: fmean(lost) for pair, lost in found.items()})


def clusters(nodes: Sequence[str], distances: Matrix) -> list[list[str]]:
    """The nodes in clusters, each in the given order; clusters with no measurement between stay apart."""
    count = len(nodes)
    known = ~np.isnan(distances)
    np.fill_diagonal(known, val=False)
    sums = np.where(known, distances, 0.0)
    counts = known.astype(np.float64)
    members: dict[int, list[int]] = {at: [at] for at in range(count)}
    means = _means(sums, counts)
    heights: list[tuple[float, int, int]] = []
    while len(members) > 1:
        one, other = (int(at) for at in np.unravel_index(np.argmin(means), means.shape))
        if not math.isfinite(means[one, other]):
            break
        heights.append((float(means[one, other]), one, other))
        members[one] += members.pop(other)
        for matrix in (sums, counts):
            matrix[one] += matrix[other]
            matrix[:, one] = matrix[one]
            matrix[other], matrix[:, other] = 0.0, 0.0
            matrix[one, one] = 0.0
        means[one] = means[:, one] = _means(sums[one], counts[one])
        means[other] = means[:, other] = math.inf
    limit = _cut([height for height, _, _ in heights])
    return _merged(nodes, takewhile(lambda merge: merge[0] < limit, heights))


def _means(sums: Matrix, counts: Matrix) -> Matrix:
    return np.where(counts > 0, sums / np.maximum(counts, 1), math.inf)


def _cut(heights: Sequence[float]) -> float:
    """The middle of the widest gap between `_NEAR` and `_FAR`."""
    inside = sorted(height for height in heights if _NEAR < height < _FAR)
    marks = [_NEAR, *inside, _FAR]
    gaps = [(right - left, (left + right) / 2) for left, right in pairwise(marks)]
    return max(gaps)[1]


def _merged(nodes: Sequence[str], merges: Iterable[tuple[float, int, int]]) -> list[list[str]]:
    home = list(range(len(nodes)))
    for _, one, other in merges:
        home = [home[one] if at == home[other] else at for at in home]  # `other`'s cluster joins `one`'s
    found: dict[int, list[str]] = {}
    for at, name in zip(home, nodes, strict=True):
        found.setdefault(at, []).append(name)
    return list(found.values())


def _ordered(one: str, other: str) -> Flow:
    return (one, other) if one <= other else (other, one)


def _matrix(nodes: Sequence[str], distances: Mapping[Flow, float]) -> Matrix:
    place = {name: at for at, name in enumerate(nodes)}
    out = np.full((len(nodes), len(nodes)), math.nan)
    for (one, other), distance in distances.items():
        out[place[one], place[other]] = out[place[other], place[one]] = max(distance, 0.0)
    return out
