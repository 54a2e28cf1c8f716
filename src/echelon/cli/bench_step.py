"""`echelon bench step`: how long is a training step with DDP and with Echelon, and why?"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from echelon.cli.bench_display import BenchDisplay
from echelon.errors import ConfigError, LaunchError

if TYPE_CHECKING:
    from echelon.bench.step import StepComparison

_NAMES = {"ddp": "DDP", "echelon": "Echelon", "alone": "alone"}


def step(
    args: Annotated[
        list[str] | None, typer.Argument(metavar="[ARGS]", help="Arguments for the scripts.")
    ] = None,
    model: Annotated[
        str, typer.Option(metavar="NAME", help="The model, or several with commas, or all.")
    ] = "resnet18",
    script: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="A script in place of a model: with DDP (then a copy is adapted to Echelon), or with "
            "Echelon (then give --ddp-script too).",
            show_default=False,
        ),
    ] = None,
    ddp_script: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The same training with DDP.", show_default=False),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="How many workers. Default: 2, or one per node of the lab.",
            show_default=False,
        ),
    ] = None,
    lab: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Emulate this cluster (root).", show_default=False),
    ] = None,
    seconds: Annotated[float, typer.Option(metavar="S", help="How long to train each model.")] = 6.0,
    steps: Annotated[int, typer.Option(metavar="N", help="Steps of each turn of a script.")] = 100,
    json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Train with DDP and with Echelon in turns; compare the step times.

    Both sides train the same model on the same random batches, in the same
    processes, with their default settings. A third side trains without any
    communication: what a step would take if communication were free. With
    Echelon, batch normalisation spans all workers; with DDP it does not.

    Models: mlp, lenet, embedding, lstm, transformer, cnn, resnet18, alexnet, vgg16.

    With --script, two scripts run in turns and their optimizer steps are timed
    from outside. A script with DDP is adapted by the rules of `echelon adapt`;
    if these are not certain, give both scripts. Both must train equal batches.

    Examples:
      echelon bench step
      echelon bench step --model lstm,transformer --workers 2
      echelon bench step --model mlp --lab cluster.toml
      echelon bench step --script train_ddp.py -- --epochs 1
      echelon bench step --script train.py --ddp-script train_ddp.py
    """
    import dataclasses

    import msgspec

    with BenchDisplay(Console(stderr=True, highlight=False)) as display:
        if script is not None:
            found = [_scripts(script, ddp_script, tuple(args or ()), workers, lab, steps, display)]
        else:
            _refuse_without_script(ddp_script, args)
            found = _models(model, workers, lab, seconds, display)
    if json:
        told = [{**dataclasses.asdict(one), "ratio": one.ratio()} for one in found]
        typer.echo(msgspec.json.format(msgspec.json.encode(told), indent=2).decode())
        return
    console = Console(highlight=False)
    for one in found:
        _show(one, console)
    if len(found) > 1:
        ratios = sorted(one.ratio() for one in found)
        middle = ratios[len(ratios) // 2]
        console.print(
            f"Median of {len(found)} models: {middle:.2f} of DDP's time; largest {ratios[-1]:.2f}."
        )


def _refuse_without_script(ddp_script: Path | None, args: list[str] | None) -> None:
    if ddp_script is not None or args:
        raise ConfigError(
            "there is no script to compare with" if ddp_script else f"{args[0] if args else ''}: no script",
            where="--ddp-script" if ddp_script else "arguments",
            fix="give the script with Echelon: --script train.py",
        )


def _models(
    model: str, workers: int | None, lab: str | None, seconds: float, display: BenchDisplay
) -> list[StepComparison]:
    from echelon.bench.step import measure_step
    from echelon.bench.step_notes import StepRequest
    from echelon.bench.workloads import WORKLOADS, workload

    names = list(WORKLOADS) if model == "all" else [name.strip() for name in model.split(",")]
    for name in names:
        workload(name)
    if workers is not None and workers < 2:
        raise ConfigError("one worker has nobody to reduce with", where="--workers", fix="give 2 or more")
    count = workers if workers is not None or lab else 2
    return [
        measure_step(
            StepRequest(model=name, seconds=seconds), workers=count, lab=lab, progress=display.progress
        )
        for name in names
    ]


def _scripts(
    script: Path,
    ddp_script: Path | None,
    args: tuple[str, ...],
    workers: int | None,
    lab: str | None,
    steps: int,
    display: BenchDisplay,
) -> StepComparison:
    from echelon.bench.scripts import ScriptPair, measure_scripts, named

    for file in (script, ddp_script):
        if file is not None and not file.is_file():
            raise LaunchError(f"there is no script {file}", where=str(Path.cwd()), fix="give its path")
    count = workers if workers is not None or lab else 2
    with tempfile.TemporaryDirectory(prefix="echelon-bench-") as folder:
        ours, theirs, beside = script.resolve(), ddp_script, ""
        if theirs is None:
            ours, theirs = _adapted(script, Path(folder)), script
            beside = str(script.resolve().parent)
        pair = ScriptPair(
            ddp=theirs.resolve(),
            echelon=ours,
            args=args,
            beside=beside,
            steps=steps,
            workers=count,
            lab=str(Path(lab).resolve()) if lab else None,
        )
        return named(measure_scripts(pair, display.progress), script.name)


def _adapted(script: Path, folder: Path) -> Path:
    """A copy of a DDP script that trains with Echelon; ConfigError if the rules cannot make one."""
    from echelon.adapt.adapt import adapt
    from echelon.adapt.files import read_script

    text = read_script(script)
    fix = (
        f"adapt it by hand (echelon adapt {script}), then give both: "
        f"--script adapted.py --ddp-script {script}"
    )
    if "DistributedDataParallel" not in text.text:
        raise ConfigError(
            "this script does not use DistributedDataParallel: there is nothing to compare with",
            where=str(script),
            fix=f"give the same training with DDP: --script {script} --ddp-script ddp.py",
        )
    made = adapt(text, where=str(script))
    if made.needs_a_person or not made.changed:
        raise ConfigError("the rules cannot adapt this script for certain", where=str(script), fix=fix)
    copy = folder / script.name
    copy.write_text(made.text, encoding="utf-8")
    return copy


def _show(found: StepComparison, console: Console) -> None:
    from echelon.bench.step_words import difference, verdict

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("")
    parts = list(next(iter(found.sides.values())).parts)
    heads = ["step", *(["samples/s"] if found.batch else ["steps/s"]), *parts]
    for head in heads:
        table.add_column(head, justify="right", no_wrap=True)
    for side in ("ddp", "echelon", "alone"):
        if side not in found.sides:
            continue
        one = found.sides[side]
        rate = found.samples_per_s(side) if found.batch else 1 / one.step_s
        cells = [f"{part_s * 1e3:.2f} ms" for part_s in (one.step_s, *one.parts.values())]
        table.add_row(_NAMES[side], cells[0], f"{rate:.1f}", *cells[1:])
    console.print(table)
    console.print(Text(verdict(found), style="bold"), soft_wrap=True)
    for line in difference(found):
        console.print(Text(f"  {line}"), soft_wrap=True)
    console.print()
