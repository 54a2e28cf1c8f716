"""`echelon bench`: measurements, compared, on this machine."""

from __future__ import annotations

import dataclasses
import shlex
import sys
import webbrowser
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from echelon.bench.codecs import Bench, Comparison, asked_codecs, compare_codecs, in_words
from echelon.bench.codecs_page import HEAD, codecs_html, rows_of
from echelon.bench.settings import QUICK, BenchSettings
from echelon.cli.bench_local import local
from echelon.cli.bench_step import step
from echelon.cli.command import PlainCommand, PlainGroup
from echelon.cli.options import Given, with_options
from echelon.config.units import show_bytes, show_seconds
from echelon.observe.atomic import check_writable, write_whole
from echelon.zoo.dataset import DATASETS
from echelon.zoo.model import MODELS

if TYPE_CHECKING:
    from echelon.codec.codec import Codec

app = typer.Typer(
    cls=PlainGroup,
    no_args_is_help=True,
    help="Measure on this machine: steps against DDP, ways to use its cores, and codecs.",
    epilog="Examples: `echelon bench step`, `echelon bench codecs --quick`. "
    "To compare sync policies: `echelon simulate`.",
)

_PAGE, _FIGURES = "codecs.html", "codecs.json"


@with_options(BenchSettings, {})
def codecs(
    given: Given[BenchSettings],
    quick: Annotated[
        bool,
        typer.Option(
            "--quick",
            help="A few seconds: mlp(32, 1) on digits, 30 steps, unless other values are given.",
        ),
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            metavar="FOLDER",
            help="The folder for the page and the figures. Default: a new bench-codecs-... here.",
        ),
    ] = None,
    show: Annotated[bool, typer.Option("--open", help="Show the page in the browser.")] = False,
) -> None:
    """Train a model with each codec; compare bytes, time and loss.

    Workers are emulated one after the other, in this process. Bytes are counted,
    coding is measured, the time on the wire is predicted from bytes and link.
    All trainings start with the same weights and see the same data.

    Examples:
      echelon bench codecs
      echelon bench codecs --quick
      echelon bench codecs --codecs "fp16; top-k(ratio=0.01); dgc(ratio=0.001)"
      echelon bench codecs --model lenet --data mnist --link 1gbit --workers 8
      echelon bench codecs --codecs "top-k; one-bit" --seeds 5
    """
    settings = dataclasses.replace(QUICK, **given.values()) if quick else given.settings
    bench = settings.bench()
    MODELS.build(bench.model, where="--model")
    DATASETS.build(bench.data, where="--data")
    folder = out or Path(f"bench-codecs-{datetime.now():%Y%m%d-%H%M%S}")
    check_writable(folder, where="--out")
    found = _carry_out(bench, asked_codecs(settings.codec_texts(), bench.momentum))
    page = folder / _PAGE
    command = shlex.join(["echelon", *sys.argv[1:]])
    _print(found)
    write_whole(page, codecs_html(found, command=command).encode())
    write_whole(folder / _FIGURES, msgspec.json.format(msgspec.json.encode(_figures(found, command))))
    _say(f"picture: {page}")
    _say(f"figures: {folder / _FIGURES}")
    if show and not webbrowser.open(page.resolve().as_uri()):
        _say("no browser could be started; open the file by hand")


app.command("step", cls=PlainCommand)(step)
app.command("local", cls=PlainCommand)(local)
app.command("codecs", cls=PlainCommand)(codecs)
app.command("codec", cls=PlainCommand, hidden=True)(codecs)


def _carry_out(bench: Bench, chosen: Mapping[str, Codec]) -> Comparison:
    console = Console(stderr=True)
    if not console.is_terminal:  # a line for each training, so that a log shows progress
        began: dict[str, None] = {}

        def tell(text: str, step: int) -> None:
            if text not in began:
                began[text] = None
                console.print(f"training with {text} ({len(began)} of {len(chosen)})", highlight=False)

        return compare_codecs(bench, chosen, tell)
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
    )
    with bar:
        task = bar.add_task("", total=bench.steps * bench.seeds * len(chosen))
        places = {text: index for index, text in enumerate(chosen)}

        def progress(text: str, step: int) -> None:
            bar.update(task, completed=places[text] * bench.steps * bench.seeds + step, description=text)

        return compare_codecs(bench, chosen, progress)


def _print(found: Comparison) -> None:
    console = Console(highlight=False)
    bench = found.bench
    for name, value, known in (
        ("gradient", show_bytes(found.gradient_bytes), "counted"),
        ("computed in", show_seconds(found.compute_s), "measured, one thread"),
        ("link", f"{show_bytes(bench.link_bytes_per_s)}/s", "given; steps at it are predicted"),
    ):
        console.print(Text(f"{name + ':':13}{value} ({known})"), soft_wrap=True)
    console.print()
    console.print(_table(rows_of(found)))
    console.print()
    for sentence in in_words(found):
        console.print(Text(sentence), soft_wrap=True)


def _table(rows: Sequence[Sequence[str]]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column(HEAD[0], overflow="fold")  # a codec's options are part of its name
    for name in HEAD[1:]:
        table.add_column(name.replace(" step", "\nstep"), justify="right", no_wrap=True)
    for row in rows:
        *others, differs = row
        table.add_row(*map(Text, others), Text(differs.replace(" (", "\n(")))
    return table


def _figures(found: Comparison, command: str) -> dict[str, Any]:
    return {
        "command": command,
        "says": in_words(found),
        "bench": found.bench,
        "compute_s": found.compute_s,
        "gradient_bytes": found.gradient_bytes,
        "exact_bytes": found.exact_bytes,
        "codecs": [
            {
                "codec": one.codec,
                "smaller": found.smaller(one),
                "sent_bytes": one.sent_bytes,
                "encode_s": one.encode_s,
                "decode_s": one.decode_s,
                "predicted_wire_s": found.wire_s(one),
                "predicted_step_s": found.step_s(one),
                "loss": one.loss,
                "worse": found.worse(one),
                "losses": one.losses,
                "spread": found.spread(one),
                "broke_at": one.broke_at,
                "curve": one.curve,
            }
            for one in found.trials
        ],
    }


def _say(text: str) -> None:
    Console().print(Text(text), soft_wrap=True)
