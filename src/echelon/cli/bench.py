"""`echelon bench`: strategies side by side on this machine."""

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

from echelon.bench.codecs import (
    Bench,
    Comparison,
    asked_codecs,
    compare_codecs,
    in_words,
    usual_codecs,
)
from echelon.bench.codecs_page import HEAD, codecs_html, rows_of
from echelon.config.units import rate_bytes_per_s, show_bytes, show_seconds
from echelon.errors import ConfigError
from echelon.observe.atomic import write_whole
from echelon.zoo.dataset import DATASETS
from echelon.zoo.model import MODELS

if TYPE_CHECKING:
    from echelon.codec.codec import Codec

app = typer.Typer(
    no_args_is_help=True,
    help="Compare strategies by experiment, on this machine.",
    epilog="What can be compared: codecs. See also `echelon simulate`, for policies.",
)

_QUICK: dict[str, Any] = {
    "model": "mlp(32, 1)", "data": "digits", "steps": 30, "lr": 0.05, "test_samples": 100,
}  # fmt: skip
_PLAIN = (
    "model",
    "data",
    "workers",
    "steps",
    "batch",
    "lr",
    "decay",
    "momentum",
    "seed",
    "seeds",
    "test_samples",
)
_PAGE, _FIGURES = "codecs.html", "codecs.json"


@app.callback()
def _bench() -> None:
    """Keep `codecs` a command of its own: typer would drop the name of the only one."""


def _option(help: str, *names: str, of: str = "", **more: Any) -> Any:
    """An option that may be left out; its default is that of the setting of that name."""
    if of:
        default = {field.name: field.default for field in dataclasses.fields(Bench)}[of]
        help = f"{help} Default: {f'{default:g}' if isinstance(default, float) else default}."
    return typer.Option(*names, help=help, show_default=False, **more)


@app.command()
def codecs(
    ctx: typer.Context,
    codecs: Annotated[
        str | None,
        _option('Which, with options: "fp16; top-k(ratio=0.01)". Default: all. See `echelon list codec`.'),
    ] = None,
    model: Annotated[str | None, _option("See `echelon list model`.", of="model")] = None,
    data: Annotated[str | None, _option("See `echelon list data`.", of="data")] = None,
    workers: Annotated[int | None, _option("How many emulated workers.", of="workers")] = None,
    steps: Annotated[int | None, _option("Steps of each training.", of="steps")] = None,
    batch: Annotated[int | None, _option("The batch of each worker.", of="batch")] = None,
    lr: Annotated[float | None, _option("The learning rate.", of="lr")] = None,
    decay: Annotated[
        float | None, _option("In the last part of the steps, the rate falls to 0.", of="decay")
    ] = None,
    momentum: Annotated[
        float | None, _option("Momentum: of SGD, or of a codec that has its own.", of="momentum")
    ] = None,
    seed: Annotated[int | None, _option("Of the weights and the order of samples.", of="seed")] = None,
    seeds: Annotated[
        int | None, _option("Train so often, with seeds from that one on; means are told.", of="seeds")
    ] = None,
    test_samples: Annotated[
        int | None, _option("Validate on so many test samples; 0 is all.", of="test_samples")
    ] = None,
    link: Annotated[
        str, _option("The rate at which the time on the wire is predicted. Default: 100mbit.")
    ] = "100mbit",
    quick: Annotated[
        bool, _option("A few seconds: mlp(32, 1) on digits, 30 steps, unless given.", "--quick")
    ] = False,
    out: Annotated[
        Path | None,
        _option(
            "The folder for the page and the figures. Default: a new bench-codecs-... here.",
            "--out",
            "-o",
            metavar="FOLDER",
        ),
    ] = None,
    show: Annotated[bool, _option("Show the page in the browser.", "--open")] = False,
) -> None:
    """Train a model with each codec: the bytes it saves, its time, its loss.

    Workers are emulated one after the other, in this process. Bytes are counted,
    coding is measured, the time on the wire is predicted from bytes and link.
    Trainings begin alike and see the same data.

    Examples:
      echelon bench codecs
      echelon bench codecs --quick
      echelon bench codecs --codecs "fp16; top-k(ratio=0.01); dgc(ratio=0.001)"
      echelon bench codecs --model lenet --data mnist --link 1gbit --workers 8
      echelon bench codecs --codecs "top-k; one-bit" --seeds 5
    """
    bench, chosen = _prepared(ctx.params)
    found = _carried_out(bench, chosen)
    folder = out or Path(f"bench-codecs-{datetime.now():%Y%m%d-%H%M%S}")
    page = folder / _PAGE
    command = shlex.join(["echelon", *sys.argv[1:]])
    _print(found)
    write_whole(page, codecs_html(found, command=command).encode())
    write_whole(folder / _FIGURES, msgspec.json.format(msgspec.json.encode(_figures(found, command))))
    _say(f"picture: {page}")
    _say(f"figures: {folder / _FIGURES}")
    if show and not webbrowser.open(page.resolve().as_uri()):
        _say("no browser could be started; open the file by hand")


def _prepared(given: Mapping[str, Any]) -> tuple[Bench, dict[str, Codec]]:
    """What is asked, checked before anything is loaded."""
    fields = dict(_QUICK) if given["quick"] else {}
    fields |= {name: given[name] for name in _PLAIN if given[name] is not None}
    bench = Bench(**fields, link_bytes_per_s=rate_bytes_per_s(given["link"], where="--link"))
    MODELS.build(bench.model, where="--model")
    DATASETS.build(bench.data, where="--data")
    texts = usual_codecs() if given["codecs"] is None else _listed(given["codecs"])
    return bench, asked_codecs(texts, bench.momentum)


def _listed(text: str) -> list[str]:
    texts = [one.strip() for one in text.split(";")]
    if not all(texts):
        raise ConfigError(
            f"{text!r} names no codec in some place",
            where="--codecs",
            fix='give codecs with ; between them: "fp16; one-bit"',
        )
    return texts


def _carried_out(bench: Bench, chosen: Mapping[str, Codec]) -> Comparison:
    console = Console(stderr=True)
    if not console.is_terminal:  # a line for each training: whoever reads a log sees that it goes on
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
