"""`echelon simulate --nodes`: steps of many nodes like one, and the curve from one node to so many."""

from __future__ import annotations

import math
import shlex
import sys
import webbrowser
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from echelon.config.units import show_bytes, show_seconds
from echelon.errors import ConfigError, UnknownName
from echelon.observe.atomic import write_whole
from echelon.observe.page.charts import Series, line_chart
from echelon.observe.page.markup import about, figure, safe, section, table
from echelon.observe.page.scale import Axis, Point
from echelon.plan.job import JobProfile
from echelon.plan.predict.predict import predict, simulate_steps
from echelon.plan.predict.scaling import scaling_curve
from echelon.plan.shares import split
from echelon.plan.strategy import Prediction, RunStrategy
from echelon.plan.topology import Node, Topology
from echelon.simulate.page import document
from echelon.start.planning import PlanningAsked, machines_and_job

MOST_NODES = 10_000
_STEPS = (1, 2, 5)
Curve = Sequence[tuple[int, Prediction]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingAsked:
    """How many nodes, like which, for how many steps; `noise` is the spread of computing."""

    nodes: int
    like: str | None
    steps: int = 100
    noise: float = 0.1
    seed: int = 0
    grow: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaled:
    """The curve, and the steps of the largest number of nodes."""

    node: Node
    job: JobProfile
    curve: Curve
    step_s: tuple[float, ...]
    collective: str


def show_scaling(
    machines: PlanningAsked, asked: ScalingAsked, *, json: bool, out: Path | None, show: bool
) -> None:
    """Simulate, print, and write the page."""
    errors = Console(stderr=True, highlight=False)

    def say(text: str) -> None:
        errors.print(Text(text), style="dim", soft_wrap=True)

    known = machines_and_job(machines, say)
    found = scaled(known.topology, known.job, asked)
    if json:
        typer.echo(msgspec.json.format(msgspec.json.encode(_values(found)), indent=2).decode())
    else:
        _print(found, asked, Console(highlight=False))
    if out is not None:
        command = shlex.join(["echelon", *sys.argv[1:]])
        write_whole(out, scaling_html(found, asked, command).encode())
        say(f"picture: {out}")
        if show and not webbrowser.open(out.resolve().as_uri()):
            say("no browser could be started; open the file by hand")


def scaled(topology: Topology, job: JobProfile, asked: ScalingAsked) -> Scaled:
    """Simulate so many nodes, and predict the curve up to them."""
    if not 1 <= asked.nodes <= MOST_NODES:
        raise ConfigError(f"{asked.nodes} nodes", where="--nodes", fix=f"give 1 to {MOST_NODES}")
    name = asked.like or topology.nodes[0].name
    if name not in {node.name for node in topology.nodes}:
        raise UnknownName("node", name, [node.name for node in topology.nodes], where="--like")
    if not asked.grow and job.batch < asked.nodes:
        raise ConfigError(
            f"a batch of {job.batch} cannot be shared by {asked.nodes} nodes",
            where="--nodes",
            fix=f"give --batch {asked.nodes} or more, or --grow: {job.batch} samples on each node",
        )
    node = topology.node(name)
    curve = scaling_curve(node, job, _counts(asked.nodes), grow=asked.grow)
    many = tuple(replace(node, name=f"{name}-{at}") for at in range(asked.nodes))
    own = job.costs.get(name)
    like = replace(job, costs=dict.fromkeys((one.name for one in many), own)) if own is not None else job
    shares = (job.batch,) * asked.nodes if asked.grow else split(job.batch, [1.0] * asked.nodes)
    together = Topology(nodes=many)
    names = tuple(one.name for one in many)
    ways = [RunStrategy(nodes=names, shares=shares, collective=way) for way in ("auto", "hierarchical")]
    best = min(ways if asked.nodes > 3 else ways[:1], key=lambda way: predict(together, like, way).step_s)
    drawn = simulate_steps(together, like, best, steps=asked.steps, noise=asked.noise, seed=asked.seed)
    return Scaled(
        node=node,
        job=job,
        curve=[(count, _alike(one, name)) for count, one in curve],
        step_s=tuple(float(one) for one in drawn),
        collective=best.collective,
    )


def _alike(found: Prediction, name: str) -> Prediction:
    """All nodes are alike, so the first stands for each."""
    return replace(found, bottleneck=found.bottleneck.replace(f"{name}-0", "each node"))


def _counts(nodes: int) -> list[int]:
    """1, 2, 5, 10, ... up to so many."""
    counts = [step * 10**power for power in range(5) for step in _STEPS]
    return sorted({*(count for count in counts if count < nodes), nodes})


# What is said


def _print(found: Scaled, asked: ScalingAsked, console: Console) -> None:
    def say(text: str) -> None:
        console.print(Text(text), soft_wrap=True)

    middle, late = np.quantile(found.step_s, [0.5, 0.95])
    batch = found.job.batch * (asked.nodes if asked.grow else 1)
    say(
        f"{asked.nodes:,} nodes like {found.node.name}, {found.job.name}, batch {batch:,}, "
        f"{show_bytes(found.job.gradient_bytes)} of gradients, {found.collective}"
    )
    say(
        f"{asked.steps} steps: median {show_seconds(middle)}, 95 % within {show_seconds(late)}, "
        f"{batch / middle:,.0f} samples/s; each worker's computing varies by {100 * asked.noise:.0f} %\n"
    )
    console.print(_table(found))
    say(f"\n{verdict(found.curve)}")


def verdict(curve: Curve) -> str:
    """Where another node stops to bring something."""
    best, (_, most) = max(curve, key=lambda one: one[1].samples_per_s)[0], curve[-1]
    limit = f"; {most.bottleneck} limits it" if most.bottleneck else ""
    if best == curve[-1][0]:
        return f"Up to {best:,} nodes every step of the curve is faster{limit}."
    return f"{best:,} nodes have the most samples per second; more are slower{limit}."


def _rows(found: Scaled) -> list[list[str]]:
    alone = found.curve[0][1].samples_per_s
    return [
        [
            f"{count:,}",
            show_seconds(one.step_s),
            f"{one.samples_per_s:,.0f}",
            f"{one.samples_per_s / alone:,.1f}",
            f"{100 * one.efficiency:.0f} %",
            show_seconds(one.exposed_s),
            one.bottleneck,
        ]
        for count, one in found.curve
    ]


_HEADS = ("nodes", "step", "samples/s", "times one", "efficiency", "not hidden", "limited by")


def _table(found: Scaled) -> Table:
    drawn = Table(box=None, pad_edge=False, header_style="dim")
    for head in _HEADS:
        drawn.add_column(head, justify="left" if head == _HEADS[-1] else "right")
    for row in _rows(found):
        drawn.add_row(*row)
    return drawn


def _values(found: Scaled) -> dict[str, Any]:
    return {
        "like": found.node.name,
        "job": found.job.name,
        "batch": found.job.batch,
        "collective": found.collective,
        "steps_s": found.step_s,
        "curve": [{"nodes": count, "predicted": _small(one)} for count, one in found.curve],
        "says": verdict(found.curve),
    }


def _small(one: Prediction) -> dict[str, Any]:
    """Without what has an entry for each of thousands of nodes."""
    names = ("step_s", "samples_per_s", "efficiency", "exposed_s", "apply_s", "bottleneck")
    return {name: getattr(one, name) for name in names}


# The page


def scaling_html(found: Scaled, asked: ScalingAsked, command: str) -> str:
    """One self-contained page: the curve, the steps, the figures."""
    title = f"{found.job.name} on up to {asked.nodes:,} nodes like {found.node.name}"
    head = f'<header><h1>{safe(title)}</h1><p class="muted"><code>{safe(command)}</code></p></header>'
    first = found.curve[0][1].samples_per_s
    ideal = [(math.log10(count), math.log10(first * count)) for count, _ in found.curve]
    points = [(math.log10(count), math.log10(one.samples_per_s)) for count, one in found.curve]
    tips = [f"{count:,} nodes: {one.samples_per_s:,.0f} samples/s" for count, one in found.curve]
    chart = line_chart(
        [
            Series(look="raw", points=ideal),
            Series(look="rate", points=points, tips=tips, dots=True),
        ],
        _decades(points, 0, "nodes"),
        _decades(points + ideal, 1, "samples/s"),
        label="samples per second by the number of nodes",
        height=320,
    )
    grows = "the batch grows with the nodes" if asked.grow else "the batch stays"
    body = f'<p class="verdict">{safe(verdict(found.curve))}</p>'
    body += about(
        f"Both axes are logarithmic; {grows}. Pale line: every node would bring as much as the first."
    )
    body += figure(chart)
    figures = table(_HEADS, _rows(found), words={6})
    middle, late = np.quantile(found.step_s, [0.5, 0.95])
    steps = (
        f"<p>{asked.steps} steps of {asked.nodes:,} nodes: median {show_seconds(middle)}, 95 % within "
        f"{show_seconds(late)}. Each worker's computing varies by {100 * asked.noise:.0f} %, at random.</p>"
    )
    parts = [section("Scaling", body), section("Figures", figures), section("Steps", steps)]
    return document(title, head + "".join(parts))


def _decades(points: Sequence[Point], at: int, title: str) -> Axis:
    """A logarithmic axis with a tick at every power of ten."""
    values = [point[at] for point in points]
    low = math.floor(min(values) + 1e-9)
    last = max(math.floor(max(values) + 1e-9), low + 1)
    high = max(max(values), last) + 0.04 * (last - low)  # the last label needs room
    ticks = tuple(float(power) for power in range(low, last + 1))
    return Axis(
        low=low, high=high, ticks=ticks, labels=tuple(f"{10**tick:,.0f}" for tick in ticks), title=title
    )
