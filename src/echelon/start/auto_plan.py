"""Does a run make a plan by itself? Yes, if its machines and its job are known, and the user left it open.

The machines are known from a lab's file, or from a probe within a day; the job from an earlier run of the
same script on the same machines. Then the collective, the groups and the shares of the first steps are
searched for, among exact ways only. Who takes part stays as the user said: where a step would be faster
without a machine, that is a note. Overlap and factors stay as they are. Nothing here ends a run.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from echelon.cluster.lab.needs import has_netem
from echelon.cluster.lab.spec import LabSpec
from echelon.cluster.machine import usable_cores
from echelon.config.choices import flag
from echelon.config.resolve import Resolved
from echelon.config.schema import RunSettings, TrainSettings
from echelon.config.units import show_seconds
from echelon.errors import EchelonError
from echelon.plan.job import JobProfile
from echelon.plan.plan import Plan
from echelon.plan.told import topology_of_lab
from echelon.plan.topology import Topology
from echelon.start.earlier_run import ScriptJob, known_job
from echelon.start.known_links import cached_topology

if TYPE_CHECKING:
    from echelon.plan.trials import SearchCandidate

_OPEN = (
    "shares",
    "groups",
    "sync",
    "codec",
    "transport",
    "servers",
    "colocate_servers",
    "replicas",
    "speed",
    "delay",
)
_CLEARLY = 0.9
_WORTH = 0.03  # of a step: what is gained by leaving a machine out, to be told
_MOST_WORKERS = 256
_OFF = "--plan none starts without one"


def planned_by_itself(
    resolved: Resolved[RunSettings], plan: Plan, spec: LabSpec | None, job: ScriptJob
) -> tuple[Plan, list[str]]:
    """The plan with what a search finds, and notes; as it is where too little is known."""
    if not 1 < len(plan.workers) <= _MOST_WORKERS or not _left_open(resolved, plan):
        return plan, []
    earlier, problem = known_job(job, plan)
    if earlier is None or earlier.job is None:
        return plan, [problem] if problem else []
    known = _machines(resolved.settings, plan, spec)
    if known is None:
        return plan, []
    try:
        return _searched(resolved.settings, plan, known, earlier.job)
    except EchelonError as error:
        return plan, [f"no plan was made: {error.message}"]
    except (ArithmeticError, LookupError, ValueError) as error:  # figures in the cache that make no sense
        return plan, [f"no plan was made: {type(error).__name__}: {error}"]


def _left_open(resolved: Resolved[RunSettings], plan: Plan) -> bool:
    """Whether the user said nothing that a plan would decide, not even the default."""
    return plan.adapt_shares and all(resolved.origins.get(name, "default") == "default" for name in _OPEN)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Machines:
    """The topology with a node for each worker, named `names` by rank, and how it is known."""

    topology: Topology
    names: list[str]
    known: str


def _machines(settings: RunSettings, plan: Plan, spec: LabSpec | None) -> _Machines | None:
    """From the lab's file or an earlier probe; None if nothing is known, or names do not fit."""
    nodes = [worker.node for worker in plan.workers]
    names = _worker_names(nodes)
    if spec is not None:
        if len(set(nodes)) != len(nodes):
            return None  # workers share a node's quota and link
        emulated = spec.wants_latency and has_netem()
        topology = topology_of_lab(spec, cores=usable_cores(), latency_emulated=emulated)
        known = f"the file of lab {spec.name}"
    else:
        found = cached_topology(settings, nodes)
        if found is None:
            return None
        topology, known = found, "an earlier probe"
    there = {node.name: node for node in topology.nodes}
    if not set(names) <= set(there):
        return None
    kept = replace(topology, nodes=tuple(there[name] for name in names))
    return _Machines(topology=kept, names=names, known=known)


def _worker_names(nodes: list[str]) -> list[str]:
    """As a probe and a record name workers: by node, with a number where several share one."""
    return [
        node if nodes.count(node) == 1 else f"{node}-{nodes[:rank].count(node)}"
        for rank, node in enumerate(nodes)
    ]


def _searched(
    settings: RunSettings, plan: Plan, machines: _Machines, job: JobProfile
) -> tuple[Plan, list[str]]:
    from echelon.plan.make import predicted_step  # with numpy, which takes a while to import
    from echelon.plan.predict.predict import predict
    from echelon.plan.search import search
    from echelon.plan.ways import SearchSpace

    space = SearchSpace(
        collectives=(settings.collective,) if settings.collective != "auto" else SearchSpace().collectives,
        hierarchies=settings.collective == "auto",
        overlaps=(settings.overlap,),
        factors=(False,),
        all_nodes=True,
    )
    found = search(machines.topology, job, predict=predict, allowed=space)
    # Without a clear gain `auto` stays: it chooses by the links and speeds that the run itself measures.
    usual = [one for one in found.candidates if one.strategy.collective == "auto"]
    best = usual[0] if usual and found.best.step_s > _CLEARLY * usual[0].step_s else found.best
    if len(best.strategy.nodes) != len(plan.workers):
        return plan, []  # some cannot take part; the run itself will say so
    shares = dict(zip(best.strategy.nodes, best.strategy.shares, strict=True))
    workers = tuple(
        replace(worker, weight=float(shares[name]))
        for worker, name in zip(plan.workers, machines.names, strict=True)
    )
    collective, groups = _arrangement(best, plan, machines.names)
    made = replace(
        plan,
        workers=workers,
        collective=collective,
        groups=groups,
        predicted=predicted_step(best),
        predicted_step_s=best.step_s,
        reasons={
            **plan.reasons,
            "shares": "planned for the first steps; then they follow the workers' measured speeds",
            "plan": f"made before the start, from {machines.known} and an earlier run of this job",
        },
    )
    notes = [
        f"planned from {machines.known} and an earlier run of this job: {_said(made)}; "
        f"predicted step {show_seconds(best.step_s)} ({_OFF})"
    ]
    free = search(machines.topology, job, predict=predict, allowed=replace(space, all_nodes=False)).best
    return made, [*notes, *_without(free, best, settings)]


def _arrangement(
    best: SearchCandidate, plan: Plan, names: list[str]
) -> tuple[str, tuple[tuple[int, ...], ...]]:
    """The collective and groups for the ranks as they are.

    Flat ways are predicted for workers in the order of their sites. If ranks have another order, `auto`
    stays: then workers are arranged by the links that they measure. With `auto`, speeds count as well.
    """
    strategy = best.strategy
    rank_of = {name: rank for rank, name in enumerate(names)}
    if strategy.groups:
        groups = tuple(tuple(rank_of[strategy.nodes[at]] for at in group) for group in strategy.groups)
        return strategy.collective, groups
    in_order = list(strategy.nodes) == names
    return (strategy.collective if in_order else plan.collective), plan.groups


def _said(plan: Plan) -> str:
    weights = [round(weight) for weight in plan.weights]
    if len(weights) > 8:
        shares = f"shares {min(weights)} to {max(weights)}"
    else:
        shares = "shares " + ",".join(map(str, weights))
    return f"{shares}, {plan.collective.partition('(')[0]}" + (
        f" in {len(plan.groups)} groups" if "(" in plan.collective and plan.groups else ""
    )


def _without(free: SearchCandidate, best: SearchCandidate, settings: RunSettings) -> list[str]:
    """A sentence if a step would be faster without some machines, and how to leave them out."""
    out = [name for name in best.strategy.nodes if name not in free.strategy.nodes]
    gain = best.step_s / free.step_s - 1 if free.step_s > 0 else math.inf
    if not out or gain < _WORTH:
        return []
    names = ", ".join(out[:4]) + (f" and {len(out) - 4} more" if len(out) > 4 else "")
    where = f"--lab {settings.lab}" if settings.lab else f"--hosts {settings.hosts}"
    where = where if settings.lab or settings.hosts else f"--workers {len(best.strategy.nodes)}"
    job = "SCRIPT"
    if isinstance(settings, TrainSettings):
        job = f'--model "{settings.model}" --data "{settings.data}" --batch {settings.batch}'
    return [
        f"by prediction, steps would be {100 * gain:.0f} % faster without {names}: "
        f"echelon plan {where} -o plan.toml {job}, then {flag('plan')} plan.toml"
    ]
