"""`echelon bench local`: which way of using this machine trains most samples a second?"""

from __future__ import annotations

import shlex
import sys
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from echelon.cli.bench_display import BenchDisplay
from echelon.observe.atomic import check_writable, write_whole

if TYPE_CHECKING:
    from echelon.bench.local import LocalTable

_FIGURES = "local.json"


def local(
    model: Annotated[
        str, typer.Option(metavar="NAME", help="The model, or several with commas, or all.")
    ] = "lenet,mlp,alexnet,vgg16",
    batch: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="The batch of the whole machine. Default: four times that of `echelon bench step`.",
            show_default=False,
        ),
    ] = None,
    turns: Annotated[int, typer.Option(metavar="N", help="How often each way is timed.")] = 5,
    json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            metavar="FOLDER",
            help="The folder for the figures. Default: a new bench-local-... here.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Train a model in every way that one machine offers; compare samples/s.

    Torch as it is divides each operation among threads. Other ways divide the
    batch: among replicas in the threads of one process, among processes, or
    both; or they compute it in chunks that fit the cache. All train the same
    batch, and take turns: rows are medians, ratios are to torch as it is.

    Models: mlp, lenet, embedding, lstm, transformer, cnn, resnet18, alexnet, vgg16.

    `--local auto` of `echelon train` and `echelon run` takes the best way.

    Examples:
      echelon bench local
      echelon bench local --model lenet --batch 256
      echelon bench local --model all --turns 3
    """
    import msgspec

    from echelon.bench.local import measure_local
    from echelon.bench.workloads import WORKLOADS, workload

    names = list(WORKLOADS) if model == "all" else [name.strip() for name in model.split(",")]
    for name in names:
        workload(name)
    folder = out or Path(f"bench-local-{datetime.now():%Y%m%d-%H%M%S}")
    check_writable(folder, where="--out")
    console = Console(highlight=False)
    found = []
    for name in names:
        with BenchDisplay(Console(stderr=True, highlight=False)) as display:
            table = measure_local(name, batch=batch, turns=turns, progress=display.progress)
        found.append(table)
        if not json:
            _show(table, console)
    told = {"command": shlex.join(["echelon", *sys.argv[1:]]), "models": [_figures(one) for one in found]}
    text = msgspec.json.format(msgspec.json.encode(told), indent=2)
    write_whole(folder / _FIGURES, text)
    if json:
        typer.echo(text.decode())
    else:
        console.print(Text(f"figures: {folder / _FIGURES}"), soft_wrap=True)


def _figures(found: LocalTable) -> dict[str, Any]:
    return {
        "model": found.model,
        "batch": found.batch,
        "cores": found.cores,
        "numa_nodes": found.numa_nodes,
        "turns": found.turns,
        "ways": [
            {
                "way": str(row.way),
                "options": row.way,
                "samples_per_s": row.rate,
                "least": row.least,
                "most": row.most,
                "ratio": found.ratio(row),
                "left_out": row.left_out,
            }
            for row in found.rows
        ],
    }


def _show(found: LocalTable, console: Console) -> None:
    cores = f"{found.cores} core{'s' if found.cores > 1 else ''}"
    nodes = f", {found.numa_nodes} NUMA nodes" if found.numa_nodes > 1 else ""
    console.print(f"{found.model}, batch {found.batch}, {cores}{nodes}; median of {found.turns} turns")
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("way")
    for head in ("samples/s", "least to most", "of torch as it is"):
        table.add_column(head, justify="right", no_wrap=True)
    for row in found.rows:
        name = f"{row.way}{' (torch as it is)' if row is found.usual else ''}"
        if row.left_out:
            table.add_row(name, "-", "", Text(row.left_out, overflow="fold"))
            continue
        table.add_row(
            name, f"{row.rate:.1f}", f"{row.least:.1f} to {row.most:.1f}", f"{found.ratio(row):.2f}"
        )
    console.print(table)
    best = found.best
    console.print(
        Text(f"Most samples/s: {best.way}, {found.ratio(best):.2f} of torch as it is.", style="bold")
    )
    console.print()
