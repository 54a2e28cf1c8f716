"""Every strategy that a search tries, with its prediction: no strategy is predicted twice.

Shares are the exact best ones of `best_shares`, in up to three forms: by speed; by speed and the
optimizer's time, which a slow node needs before its next step; and by speed and link, so that a worker
whose last gradients take longer on its link gets fewer samples. `polish` then corrects them by what the
predictor says of waiting.

Predictions are counted by what they cost, so that a search of many nodes stays within a budget.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from echelon.errors import PlanError
from echelon.plan.bound import Predictor
from echelon.plan.job import ComputeCost, JobProfile
from echelon.plan.optimal_shares import best_shares, most_share
from echelon.plan.shares import split
from echelon.plan.strategy import Prediction, RunStrategy
from echelon.plan.subsets import Members
from echelon.plan.topology import Node, Topology
from echelon.plan.ways import Way

_POLISHINGS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchCandidate:
    """A strategy, what a step of it would take, and a sentence on how it compares."""

    strategy: RunStrategy
    prediction: Prediction
    why: str = ""

    @property
    def step_s(self) -> float:
        """What a step would take."""
        return self.prediction.step_s


class Trials:
    """Predicts strategies, and remembers them in the order in which they were tried."""

    def __init__(
        self,
        topology: Topology,
        job: JobProfile,
        predict: Predictor,
        *,
        shares: Literal["auto", "equal", "by-speed"] = "auto",
    ) -> None:
        self.topology = topology
        self.job = job
        self.work = 0
        self.best: SearchCandidate | None = None
        self._predict = predict
        self._rule = shares
        self._tried: dict[RunStrategy, SearchCandidate] = {}
        self._shares: dict[tuple[str, ...], list[tuple[int, ...]]] = {}
        self._costs: dict[str, ComputeCost] = {}

    @property
    def candidates(self) -> list[SearchCandidate]:
        """All of them, the best first; of equal ones those that were tried first, which are simpler."""
        return sorted(self._tried.values(), key=_step_s)

    @property
    def best_s(self) -> float:
        """The step of the best strategy so far."""
        return self.best.step_s if self.best is not None else math.inf

    def shares_of(self, members: Members) -> list[tuple[int, ...]]:
        """The forms of shares for these nodes; empty if their memory does not hold the batch."""
        names = tuple(node.name for node in members)
        known = self._shares.get(names)
        if known is None:
            known = self._shares[names] = self._find_shares(members)
        return known

    def bound_s(self, members: Members) -> float:
        """No strategy on these nodes is faster: computing takes as long, even with parts of samples."""
        costs = self._costs_of(members)
        per_s = sum(1 / cost.per_sample_s for cost in costs if cost.per_sample_s > 0)
        fixed = sum(cost.fixed_s / cost.per_sample_s for cost in costs if cost.per_sample_s > 0)
        free = any(cost.per_sample_s <= 0 for cost in costs)
        level_s = 0.0 if free else (self.job.batch + fixed) / per_s
        return max(level_s, *(cost.at(1) for cost in costs))

    def take(
        self, members: Members, ways: Sequence[Way], *, all_shares: bool = True
    ) -> SearchCandidate | None:
        """Predict these ways, with each form of shares or only the first; returns the best of them."""
        forms = self.shares_of(members) if all_shares else self.shares_of(members)[:1]
        best: SearchCandidate | None = None
        for way in ways:
            for shares in forms:
                by_name = dict(zip((node.name for node in members), shares, strict=True))
                found = self.take_strategy(_strategy(way, by_name))
                if best is None or _step_s(found) < _step_s(best):
                    best = found
        return best

    def settle(self, members: Members, candidate: SearchCandidate) -> None:
        """Correct the shares by what the prediction says of waiting, and use them first from then on."""
        if self._rule != "auto":
            return
        settled = self.polish(candidate).strategy
        by_name = dict(zip(settled.nodes, settled.shares, strict=True))
        names = tuple(node.name for node in members)
        shares = tuple(by_name[name] for name in names)
        self._shares[names] = list(dict.fromkeys([shares, *self.shares_of(members)]))

    def take_strategy(self, strategy: RunStrategy) -> SearchCandidate:
        """Predict a strategy as it is."""
        found = self._tried.get(strategy)
        if found is None:
            self.work += work_of(len(strategy.nodes))
            prediction = self._predict(self.topology, self.job, strategy)
            found = self._tried[strategy] = SearchCandidate(strategy=strategy, prediction=prediction)
            if self.best is None or _step_s(found) < _step_s(self.best):
                self.best = found
        return found

    def polish(self, candidate: SearchCandidate) -> SearchCandidate:
        """Shift samples from those whom the others wait for to those who wait, while that helps."""
        for _ in range(_POLISHINGS if self._rule == "auto" else 0):
            strategy, said = candidate.strategy, candidate.prediction
            if len(strategy.nodes) == 1 or len(said.wait_s) != len(strategy.nodes):
                break
            nodes = [self.topology.node(name) for name in strategy.nodes]
            costs = self._costs_of(nodes)
            slack = [wait + cost for wait, cost in zip(said.wait_s, said.compute_s, strict=True)]
            shares = best_shares(
                costs,
                self.job.batch,
                most=[most_share(self.job, node) for node in nodes],
                after_s=[max(slack) - one for one in slack],
            )
            if shares == strategy.shares:
                break
            found = self.take_strategy(replace(strategy, shares=shares))
            if _step_s(found) >= _step_s(candidate):
                break
            candidate = found
        return candidate

    def _costs_of(self, members: Sequence[Node]) -> list[ComputeCost]:
        for node in members:
            if node.name not in self._costs:
                self._costs[node.name] = self.job.cost_on(node)
        return [self._costs[node.name] for node in members]

    def _find_shares(self, members: Members) -> list[tuple[int, ...]]:
        costs = self._costs_of(members)
        most = [most_share(self.job, node) for node in members]
        if self._rule != "auto":
            return self._asked_shares(members, most)
        forms: list[list[float] | None] = [None, [cost.apply_s for cost in costs]]
        links = link_seconds(self.topology, self.job, members)
        if links:
            forms.append([cost.apply_s + link for cost, link in zip(costs, links, strict=True)])
        try:
            found = [best_shares(costs, self.job.batch, most=most, after_s=form) for form in forms]
        except PlanError:  # too many for the batch, or too little memory
            return []
        return list(dict.fromkeys(found))

    def _asked_shares(self, members: Members, most: Sequence[int]) -> list[tuple[int, ...]]:
        """Equal shares, or in proportion to speed, if memory holds them."""
        equal = self._rule == "equal"
        weights = [1.0 if equal else 1 / cost.at(1) for cost in self._costs_of(members)]
        if len(members) > self.job.batch:
            return []
        shares = split(self.job.batch, weights)
        return [shares] if all(one <= limit for one, limit in zip(shares, most, strict=True)) else []


def work_of(workers: int) -> int:
    """What a prediction costs, about 0.1 ms each: a part for each worker, and as much as 40 besides."""
    return 40 + workers


def _step_s(candidate: SearchCandidate) -> float:
    """To nine digits, so that rounding does not decide between equal strategies."""
    return float(f"{candidate.step_s:.9g}")


def link_seconds(topology: Topology, job: JobProfile, members: Members) -> list[float]:
    """What each node's last gradients need to reach the others, beyond the quickest; empty if equal."""
    if len(members) == 1 or not job.layers:
        return []
    last = max(job.layers, key=lambda layer: layer.ready_at).size_bytes
    sites = list(dict.fromkeys(node.site for node in members))
    rates: dict[str, float] = {}
    latencies_s: dict[str, float] = {}
    for site in sites:
        routes = [topology.route(site, other) for other in sites]
        rates[site] = min((uplink.bytes_per_s for route in routes for uplink in route), default=math.inf)
        latencies_s[site] = max(sum(uplink.latency_s for uplink in route) for route in routes)
    seconds = [
        last / min(node.up_bytes_per_s, node.down_bytes_per_s, rates[node.site])
        + node.latency_s
        + latencies_s[node.site]
        for node in members
    ]
    least = min(seconds)
    return [one - least for one in seconds] if max(seconds) > least else []


def _strategy(way: Way, shares: dict[str, int]) -> RunStrategy:
    return RunStrategy(
        nodes=way.arrangement.nodes,
        shares=tuple(shares[name] for name in way.arrangement.nodes),
        groups=way.arrangement.groups,
        collective=way.arrangement.collective,
        codec=way.codec,
        overlap=way.overlap,
        factors=way.factors,
        sync=way.sync,
        servers=way.servers,
    )
