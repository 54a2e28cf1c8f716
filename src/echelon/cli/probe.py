"""`echelon probe`: what machines and links are there, and what does a model cost on them?"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from echelon.config.units import show_bytes, show_seconds
from echelon.errors import ConfigError

if TYPE_CHECKING:
    from echelon.plan.job import JobProfile
    from echelon.plan.topology import Node
    from echelon.start.probe_result import Probed

_MACHINES: Any = {"rich_help_panel": "The machines", "show_default": False}
_JOB: Any = {"rich_help_panel": "The job"}
_OUTPUT: Any = {"rich_help_panel": "Output", "show_default": False}


def probe(
    workers: Annotated[
        int | None,
        typer.Option(min=1, help="How many. Default: one per node of the lab, else one.", **_MACHINES),
    ] = None,
    hosts: Annotated[
        str | None, typer.Option(metavar="HOSTS", help="Machines: a,b:2, or a file. By ssh.", **_MACHINES)
    ] = None,
    on: Annotated[
        str,
        typer.Option(metavar="LAUNCHER", help="What starts them (`echelon list launcher`).", **_MACHINES),
    ] = "local",
    lab: Annotated[
        str | None, typer.Option(help="An emulated cluster: a lab file, or a shipped one.", **_MACHINES)
    ] = None,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Threads per worker. Default: as a run has.", **_MACHINES)
    ] = None,
    timeout_s: Annotated[
        float, typer.Option(min=1, metavar="SECONDS", help="How long to wait for a machine.", **_MACHINES)
    ] = 60.0,
    model: Annotated[
        str | None,
        typer.Option(help="What to profile (`echelon list model`). Default: a fixed small step.", **_JOB),
    ] = None,
    data: Annotated[str, typer.Option(help="The data set whose samples it takes.", **_JOB)] = "digits",
    batch: Annotated[int, typer.Option(min=1, help="The batch of all workers together.", **_JOB)] = 64,
    optimizer: Annotated[str, typer.Option(help="sgd or adamw.", **_JOB)] = "sgd",
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="Write what was found here, as TOML, for --cluster.", **_OUTPUT),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else.", **_OUTPUT)] = False,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Measure again what the cache has.", **_OUTPUT)
    ] = False,
) -> None:
    """Measure machines and links: who is how fast, which links they share, what a model costs.

    A worker on every machine measures latency and bandwidth with every other one, both ways, alone and
    several at once, so that sites and shared uplinks are found; then its own speed, under its CPU quota.
    Nothing is told, nothing is guessed. Results are cached: computing for 7 days per machine and model,
    links for a day per set of machines; --fresh measures again.

    Examples:
      echelon probe --workers 4
      echelon probe --hosts a,b,c --model lenet --data mnist -o cluster.toml
      echelon probe --lab two-sites --model lenet
      echelon plan --cluster cluster.toml
    """
    # Imported here, so that `echelon --help` does not load torch.
    from echelon.observe.atomic import write_whole
    from echelon.plan.cluster_file import write_cluster
    from echelon.start.probe import ProbeAsked
    from echelon.start.probe import probe as carry_out

    if optimizer not in ("sgd", "adamw"):
        raise ConfigError(f"unknown optimizer {optimizer!r}", where="--optimizer", fix="give sgd or adamw")
    asked = ProbeAsked(
        workers=workers,
        on=on,
        hosts=hosts,
        lab=lab,
        threads=threads,
        model=model or "",
        data=data,
        batch=batch,
        optimizer=optimizer,
        fresh=fresh,
        timeout_s=timeout_s,
    )
    errors = Console(stderr=True, highlight=False)
    errors.print(Text(f"measuring takes about {asked.bound_s:g} s once all workers are connected"))
    with errors.status("") as status:

        def say(text: str) -> None:
            if errors.is_terminal:
                status.update(Text(text))
            else:
                errors.print(Text(text), soft_wrap=True)

        found = carry_out(asked, say)
    if out is not None:
        write_whole(out, write_cluster(found.topology, found.job, measured=found.measured()).encode())
    if json:
        typer.echo(msgspec.json.format(msgspec.json.encode(_as_json(found)), indent=2).decode())
    else:
        _print(found, Console(highlight=False))
    if out is not None:
        errors.print(Text(f"written to {out}; next: echelon plan --cluster {out}"), soft_wrap=True)
    if found.job is None and model is not None:
        raise typer.Exit(1)  # it fits nowhere


def _print(found: Probed, console: Console) -> None:
    console.print(node_table(found))
    said = [*found.reasons, *([_clock_sentence(found.topology.nodes)] if found.pairs else [])]
    for sentence in (*said, *(_job_sentences(found.job) if found.job else ())):
        console.print(Text(sentence), soft_wrap=True)
    for name, why in found.left_out.items():
        console.print(Text(f"left out: {name}: {why}", style="bold red"), soft_wrap=True)
    for note in found.notes:
        console.print(Text(f"note: {note}", style="yellow"), soft_wrap=True)
    for what, age_s in found.ages_s.items():
        console.print(Text(f"{what}: from the cache, {show_seconds(age_s)} old; --fresh measures again"))
    console.print(
        Text(f"measured in {show_seconds(found.took_s)}, {show_seconds(found.total_s)} with the start")
    )


def node_table(found: Probed) -> Table:
    """One line for each node."""
    table = Table(box=None, pad_edge=False, padding=(0, 1), collapse_padding=True)
    for heading in ("node", "site"):
        table.add_column(heading)
    figures = ["cores", "speed", "memory", "cache", "up", "down", "latency"]
    if found.job:
        figures.insert(4, "samples/s")
    for heading in figures:
        table.add_column(heading, justify="right")
    for node in found.topology.nodes:
        cells = [node.name, node.site, f"{node.cores:.3g}", f"{node.speed:.2f}"]
        cells.append(show_bytes(node.memory_bytes))
        cells.append(show_bytes(node.cache_bytes) if node.cache_bytes else "?")
        if found.job:
            cells.append(_samples_per_s(found.job, node, len(found.topology.nodes)))
        cells += [_rate(node.up_bytes_per_s), _rate(node.down_bytes_per_s), show_seconds(node.latency_s)]
        table.add_row(*(Text(cell, no_wrap=True) for cell in cells))
    return table


def _clock_sentence(nodes: Sequence[Node]) -> str:
    offsets = [node.clock_offset_s for node in nodes]
    return f"Clocks differ by at most {show_seconds(max(offsets) - min(offsets))}."


def _samples_per_s(job: JobProfile, node: Node, nodes: int) -> str:
    share = max(1, round(job.batch / nodes))
    cost = job.cost_on(node)
    return f"{share / max(1e-9, cost.at(share) + cost.apply_s):,.0f}"


def _rate(bytes_per_s: float) -> str:
    for unit, scale in (("gbit", 1e9), ("mbit", 1e6), ("kbit", 1e3)):
        if bytes_per_s * 8 >= scale:
            return "unlimited" if math.isinf(bytes_per_s) else f"{bytes_per_s * 8 / scale:.3g}{unit}"
    return f"{bytes_per_s * 8:.3g}bit"


def _job_sentences(job: JobProfile) -> list[str]:
    cost = job.cost
    return [
        f"{job.name}: forward and backward of s samples take {show_seconds(cost.fixed_s)} + "
        f"s * {show_seconds(cost.per_sample_s)} on the fastest node, the optimizer "
        f"{show_seconds(cost.apply_s)}.",
        f"Gradients have {show_bytes(job.gradient_bytes)}. A worker needs {show_bytes(job.base_bytes)} of "
        f"memory, and {show_bytes(job.sample_bytes)} for each sample of its share.",
    ]


def _as_json(found: Probed) -> dict[str, Any]:
    return {
        "topology": {
            "known": found.topology.known,
            "nodes": found.topology.nodes,
            "uplinks": found.topology.uplinks,
        },
        "job": found.job,
        "reasons": found.reasons,
        "notes": found.notes,
        "left_out": found.left_out,
        "pairs": found.pairs,
        "flows": found.flows,
        "reduce_bytes_per_s": {
            node.name: {str(size): rate for size, rate in each.reduce.bytes_per_s.items()}
            for node, each in zip(found.topology.nodes, found.nodes, strict=True)
        },
        "ages_s": found.ages_s,
        "took_s": found.took_s,
        "total_s": found.total_s,
    }
