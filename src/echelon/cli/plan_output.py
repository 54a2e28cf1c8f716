"""What `echelon plan` prints: the prediction, the tree, candidates, equations, and what would help."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from echelon.config.units import show_bytes, show_seconds
from echelon.observe.plan_tree import tree_lines
from echelon.observe.plan_view import view_of
from echelon.plan.make import strategy_text
from echelon.plan.optimal_shares import best_shares
from echelon.plan.plan import Plan
from echelon.plan.predict.predict import predict
from echelon.plan.predict.scaling import Improvement, what_helps
from echelon.plan.search import SearchResult, distinct
from echelon.plan.static_choice import static_choice
from echelon.plan.strategy import Prediction, RunStrategy
from echelon.plan.trials import SearchCandidate
from echelon.start.planning import Known

_LINKS = 6
_HELPS = 5
_WORTH = 0.005  # of the samples per second


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOutput:
    """All that was found out. `timed` are the candidates that were run, with the measured step."""

    known: Known
    result: SearchResult
    plan: Plan
    timed: tuple[tuple[SearchCandidate, float], ...] = ()
    keep: int = 3


def said(output: PlanOutput, console: Console) -> None:
    """Print everything."""
    for line in [*_job_lines(output), "", *_step_lines(output.result.best.prediction), ""]:
        console.print(Text(line), soft_wrap=True)
    view = view_of(msgspec.to_builtins(output.plan))
    for line in tree_lines(view) if view is not None else ():
        console.print(Text(line), soft_wrap=True)
    for title, table in (
        ("best candidates", _candidates(output)),
        ("timed", _timed(output)),
        ("links, bytes in a step", _links(output)),
        ("what would help", _helps(output)),
        ("equations (1) to (5) of the first seed, beside the prediction", _equations(output)),
    ):
        if table.row_count:
            console.print()
            console.print(Text(title, style="bold"))
            console.print(table)


def as_json(output: PlanOutput) -> dict[str, Any]:
    """The same as values."""
    return {
        "plan": output.plan,
        "predicted": output.result.best.prediction,
        "job": {"bound": output.result.kind.bound, "why": output.result.kind.why},
        "candidates": [
            {"strategy": one.strategy, "step_s": one.step_s, "why": one.why} for one in _best(output)
        ],
        "timed": [{"strategy": one.strategy, "step_s": seconds} for one, seconds in output.timed],
        "equations": [
            {"groups": name, "equation": equation, "cost_s": cost_s, "predicted_s": step_s}
            for name, equation, cost_s, step_s in equation_rows(output.known, output.result)
        ],
        "helps": helps(output),
        "left_out": output.result.left_out,
        "notes": output.known.notes,
        "known": output.known.topology.known,
    }


def _job_lines(output: PlanOutput) -> list[str]:
    topology, job, kind = output.known.topology, output.known.job, output.result.kind
    sites = len(topology.sites)
    nodes = f"{len(topology.nodes)} nodes" if len(topology.nodes) > 1 else "1 node"
    lines = [
        f"machines: {nodes}{f' on {sites} sites' if sites > 1 else ''}, {topology.known or 'as given'}",
        f"job:      {job.name}, batch {job.batch}, {show_bytes(job.gradient_bytes)} of gradients; a step "
        f"costs {show_seconds(job.cost.fixed_s)} and {show_seconds(job.cost.per_sample_s)} for each sample",
        f"limit:    {kind.why}",
    ]
    return lines + [f"note:     {note}" for note in output.known.notes]


def _step_lines(found: Prediction) -> list[str]:
    memory = max(found.memory_bytes, default=0.0)
    return [
        f"predicted: {show_seconds(found.step_s)} for a step, {found.samples_per_s:,.0f} samples/s, "
        f"efficiency {100 * found.efficiency:.0f} %",
        f"  computing {show_seconds(max(found.compute_s))}, communication that it does not hide "
        f"{show_seconds(found.exposed_s)}, optimizer {show_seconds(found.apply_s)}",
        *([f"  memory: up to {show_bytes(memory)} for a worker"] if memory else []),
        *([f"  bottleneck: {found.bottleneck}"] if found.bottleneck else []),
    ]


def _best(output: PlanOutput) -> list[SearchCandidate]:
    return distinct(output.result.candidates, output.keep)


def _candidates(output: PlanOutput) -> Table:
    table = _table("step", "strategy", "compared with the best")
    for one in _best(output):
        table.add_row(show_seconds(one.step_s), Text(strategy_text(one.strategy)), Text(one.why))
    return table


def _timed(output: PlanOutput) -> Table:
    table = _table("predicted", "measured", "strategy")
    for one, seconds in output.timed:
        table.add_row(show_seconds(one.step_s), show_seconds(seconds), Text(strategy_text(one.strategy)))
    return table


def _links(output: PlanOutput) -> Table:
    """The links between sites first, then the busiest of nodes."""
    table = _table("bytes", "link")
    nodes = {node.name for node in output.known.topology.nodes}
    counted = output.result.best.prediction.link_bytes.items()
    busiest = sorted(counted, key=lambda item: (item[0] in nodes, -item[1]))
    for name, count in busiest[:_LINKS]:
        if count > 0:
            table.add_row(show_bytes(count), Text(name))
    return table


def _helps(output: PlanOutput) -> Table:
    """What single changes would bring, but for those that bring nothing."""
    drawn = _table("step", "gain", "change")
    for one in helps(output)[:_HELPS]:
        if one.gain >= _WORTH:
            drawn.add_row(show_seconds(one.step_s), f"+{100 * one.gain:.0f} %", Text(one.what))
    return drawn


def helps(output: PlanOutput) -> list[Improvement]:
    """What one more node or a faster link would bring."""
    return what_helps(output.known.topology, output.known.job, output.result.best.strategy)


def _equations(output: PlanOutput) -> Table:
    table = _table("groups", "equation", "cost", "predicted step")
    for name, equation, cost_s, step_s in equation_rows(output.known, output.result):
        table.add_row(name, equation, show_seconds(cost_s), show_seconds(step_s))
    return table


def equation_rows(known: Known, result: SearchResult) -> list[tuple[str, str, float, float]]:
    """Each option of the equations, its cost, and the best step that is predicted for the same nodes."""
    nodes = known.topology.nodes
    share = max(1.0, known.job.batch / len(nodes))
    seconds = {node.name: known.job.cost_on(node).at(share) for node in nodes}
    orders = {name: int(math.log10(s / min(seconds.values())) + 1e-9) for name, s in seconds.items()}
    used = sorted(set(orders.values()))
    rows = []
    for option in static_choice(known.job, nodes).options:
        members = [name for name, order in orders.items() if order in used[: option.groups]]
        alone = [min(seconds, key=lambda name: seconds[name])]
        step_s = _predicted(known, result.candidates, members or alone)
        rows.append((option.name, option.equation, option.cost, step_s))
    return rows


def _predicted(known: Known, candidates: Sequence[SearchCandidate], members: list[str]) -> float:
    """The best step on exactly these nodes; if the search passed them over, with the best shares."""
    found = [one.step_s for one in candidates if set(one.strategy.nodes) == set(members)]
    if found:
        return min(found)
    job, topology = known.job, known.topology
    most = min(len(members), job.batch)
    shares = best_shares([job.cost_on(topology.node(name)) for name in members[:most]], job.batch)
    strategy = RunStrategy(nodes=tuple(members[:most]), shares=shares)
    return predict(topology, job, strategy).step_s


def _table(*heads: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for at, head in enumerate(heads):
        table.add_column(head, overflow="fold", no_wrap=at == 0)
    return table
