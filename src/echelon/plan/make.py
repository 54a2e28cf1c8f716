"""How the result of a search becomes the plan of a run, with one sentence for each choice.

A reason names the best strategy that differs in the choice, and what it would take, so that a reader sees
what the choice is worth.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from echelon.config.units import show_seconds
from echelon.plan.job import JobProfile
from echelon.plan.plan import (
    Plan,
    PlanCandidate,
    PlannedMemory,
    PlanRequest,
    PredictedStep,
    make_plan,
)
from echelon.plan.search import SearchResult, distinct
from echelon.plan.strategy import RunStrategy
from echelon.plan.topology import Topology
from echelon.plan.trials import SearchCandidate

_CANDIDATES = 8  # named in the plan; a search predicts hundreds
_NAMES = 6


def plan_of(
    result: SearchResult, topology: Topology, job: JobProfile, asked: PlanRequest, *, run: str
) -> Plan:
    """The plan of the best strategy; what the search does not choose is as asked."""
    strategy = result.best.strategy
    speeds = _by_node(asked.speeds, topology)
    never = "never" if asked.factors == "auto" else asked.factors
    request = replace(
        asked,
        shares=",".join(str(share) for share in strategy.shares),
        speeds=tuple(speeds[name] for name in strategy.nodes) if speeds else asked.speeds,
        groups=strategy.groups,
        collective=carried_out(result.best),
        codec=strategy.codec,
        overlap=strategy.overlap,
        factors=asked.factors if strategy.factors else never,
        sync=strategy.sync,
    )
    plan = make_plan(run, strategy.nodes, request, cores=1)
    workers = tuple(
        replace(worker, threads=asked.threads or max(1, int(topology.node(worker.node).cores)))
        for worker in plan.workers
    )
    return replace(
        plan,
        workers=workers,
        servers=_server_nodes(strategy, topology),
        adapt_shares=asked.shares == "auto",
        batch=job.batch,
        predicted_step_s=result.best.step_s,
        predicted=predicted_step(result.best),
        left_out=result.left_out,
        candidates=_candidates(result),
        memory=_memory(job),
        reasons=_reasons(result, topology, asked),
    )


def carried_out(candidate: SearchCandidate) -> str:
    """The collective that the prediction was made with; `auto` if it differs from bucket to bucket."""
    strategy, used = candidate.strategy, candidate.prediction.collectives
    return used[0] if strategy.collective == "auto" and len(used) == 1 else strategy.collective


def _memory(job: JobProfile) -> PlannedMemory | None:
    """What the job needs, rounded down: a plan that just fits shall not be refused for rounding."""
    if not job.base_bytes and not job.sample_bytes:
        return None
    return PlannedMemory(
        worker=f"{int(job.base_bytes) >> 20}MiB", sample=f"{int(job.sample_bytes) >> 10}KiB"
    )


def predicted_step(candidate: SearchCandidate) -> PredictedStep:
    """What the plan keeps of a prediction."""
    said = candidate.prediction
    return PredictedStep(
        step_s=said.step_s,
        samples_per_s=said.samples_per_s,
        efficiency=said.efficiency,
        compute_s=max(said.compute_s),
        exposed_s=said.exposed_s,
        bottleneck=said.bottleneck,
    )


def strategy_text(strategy: RunStrategy) -> str:
    """A strategy in a line: `3 nodes (a, b, c), shares 4,2,1, ring, overlap step`."""
    count = len(strategy.nodes)
    if count == 1:
        return f"{strategy.nodes[0]} alone"
    parts = [f"{count} nodes ({_some(strategy.nodes)})"]
    if count <= _NAMES:
        parts.append("shares " + ",".join(str(share) for share in strategy.shares))
    parts += [strategy.collective, f"overlap {strategy.overlap}"]
    if strategy.factors:
        parts.append("factors")
    if strategy.codec != "none":
        parts.append(f"codec {strategy.codec}")
    if strategy.sync != "full":
        parts.append(f"sync {strategy.sync}")
    if strategy.servers:
        parts.append(f"{strategy.servers} servers")
    return ", ".join(parts)


def _by_node(speeds: Sequence[float], topology: Topology) -> dict[str, float]:
    """The emulated speeds by node, if there is one for each node."""
    if len(speeds) != len(topology.nodes):
        return {}
    return {node.name: speed for node, speed in zip(topology.nodes, speeds, strict=True)}


def _server_nodes(strategy: RunStrategy, topology: Topology) -> tuple[str, ...]:
    """The nodes with the best links have the servers."""

    def rate(name: str) -> float:
        node = topology.node(name)
        return min(node.up_bytes_per_s, node.down_bytes_per_s)

    return tuple(sorted(strategy.nodes, key=rate, reverse=True)[: strategy.servers])


def _candidates(result: SearchResult) -> tuple[PlanCandidate, ...]:
    others = distinct(result.candidates, _CANDIDATES + 1)[1:]
    return tuple(
        PlanCandidate(text=strategy_text(other.strategy), step_s=other.step_s, why=other.why)
        for other in others
    )


def _reasons(result: SearchResult, topology: Topology, asked: PlanRequest) -> dict[str, str]:
    strategy = result.best.strategy
    reasons = {
        "job": f"bound by {_GERUND[result.kind.bound]}: {result.kind.why}",
        "nodes": _nodes_reason(result, topology),
        "shares": _shares_reason(result),
        "threads": "as asked" if asked.threads else "each node's cores",
    }
    if len(strategy.nodes) == 1:
        return reasons
    for choice in ("collective", "overlap", "factors", "codec", "sync"):
        reasons[choice] = _choice_reason(result, choice)
    if strategy.collective == "auto" and result.best.prediction.collectives:
        used = " and ".join(result.best.prediction.collectives)
        reasons["collective"] = (
            f"{used}, which auto becomes here{reasons['collective'].removeprefix('auto')}"
        )
    if strategy.servers:
        reasons["servers"] = (
            f"{strategy.servers} for {len(strategy.nodes)} workers: with fewer, the servers' links would "
            "be slower than the workers'"
        )
    return reasons


_GERUND = {"compute": "computing", "memory": "memory", "communication": "communication"}


def _nodes_reason(result: SearchResult, topology: Topology) -> str:
    used, there = len(result.best.strategy.nodes), len(topology.nodes)
    if used == there:
        return "all nodes bring more than they cost" if used > 1 else "the only node"
    how = "every set of nodes was compared" if result.complete else "groups and single nodes were compared"
    return f"{used} of {there}: {how}, and the others are slower by prediction or cannot take part"


def _shares_reason(result: SearchResult) -> str:
    best = result.best
    if len(best.strategy.nodes) == 1:
        return "the whole batch"
    equal = [
        candidate
        for candidate in result.candidates
        if max(candidate.strategy.shares) - min(candidate.strategy.shares) <= 1
        and set(candidate.strategy.nodes) == set(best.strategy.nodes)
    ]
    if max(best.strategy.shares) - min(best.strategy.shares) <= 1:
        return "equal, as the workers then arrive together"
    said = "by speed and link, within memory, so that all arrive together"
    return f"{said}; equal ones would take {_compared(equal[0], best)}" if equal else said


def _choice_reason(result: SearchResult, choice: str) -> str:
    """The choice, and the best strategy on the same nodes that chooses otherwise."""
    best = result.best
    value = getattr(best.strategy, choice)
    nodes = set(best.strategy.nodes)
    others = [
        candidate
        for candidate in result.candidates
        if set(candidate.strategy.nodes) == nodes and getattr(candidate.strategy, choice) != value
    ]
    text = {True: "sent where smaller", False: "not sent"}.get(value, str(value))
    if not others:
        return f"{text}: nothing else was allowed or worth trying"
    other = getattr(others[0].strategy, choice)
    otherwise = {True: "sending them", False: "sending gradients"}.get(other, str(other))
    return f"{text}; {otherwise} would take {_compared(others[0], best)}"


def _compared(other: SearchCandidate, best: SearchCandidate) -> str:
    more = 100 * (other.step_s / best.step_s - 1)
    return f"{show_seconds(other.step_s)} instead of {show_seconds(best.step_s)} (+{more:.1f} %)"


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:_NAMES]) + (", ..." if len(names) > _NAMES else "")
