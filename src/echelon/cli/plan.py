"""`echelon plan`: what can these machines do with this job, how, and why? Before anything is trained."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.text import Text

from echelon.cli.command import PlainCommand
from echelon.errors import ConfigError
from echelon.observe.atomic import write_whole
from echelon.plan.plan_file import plan_text
from echelon.start.planned import strategies
from echelon.start.planning import PlanningAsked, machines_and_job, made_plan, timed_best
from echelon.zoo.dataset import DATASETS
from echelon.zoo.model import MODELS

if TYPE_CHECKING:
    from echelon.plan.group_rule import GroupRule
    from echelon.plan.plan import Plan
    from echelon.plan.trials import SearchCandidate
    from echelon.plan.ways import SearchSpace

_MACHINES: Any = {"rich_help_panel": "Which machines", "show_default": False}
_JOB: Any = {"rich_help_panel": "Which job", "show_default": False}
_SEARCH: Any = {"rich_help_panel": "What may be chosen", "show_default": False}
_OUTPUT: Any = {"rich_help_panel": "Output", "show_default": False}


def register(app: typer.Typer) -> None:
    """Add the command. Options of echelon go before SCRIPT, the script's own after it."""
    app.command(
        "plan",
        cls=PlainCommand,
        context_settings={"allow_interspersed_args": False, "ignore_unknown_options": False},
    )(plan)


def plan(
    script: Annotated[
        str | None, typer.Argument(metavar="SCRIPT", help="The training script; a few steps of it are run.")
    ] = None,
    args: Annotated[list[str] | None, typer.Argument(metavar="ARGS", help="Its arguments.")] = None,
    lab: Annotated[
        str | None, typer.Option(help="An emulated cluster: a lab file, or a shipped one.", **_MACHINES)
    ] = None,
    hosts: Annotated[
        str | None, typer.Option(help="Machines, which are probed: a:2,b:4, or a file.", **_MACHINES)
    ] = None,
    cluster: Annotated[
        str | None, typer.Option(help="A cluster file, as `echelon probe` writes it.", **_MACHINES)
    ] = None,
    run: Annotated[
        str | None, typer.Option(help="Machines and job as a recorded run shows them.", **_MACHINES)
    ] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help="So many workers on this machine.", **_MACHINES)
    ] = None,
    probe: Annotated[
        bool, typer.Option("--probe", help="Measure a lab, instead of believing its file.", **_MACHINES)
    ] = False,
    model: Annotated[
        str | None, typer.Option(help="A built-in model: see `echelon list model`.", **_JOB)
    ] = None,
    data: Annotated[str, typer.Option(help="Its data set. Default: digits.", **_JOB)] = "digits",
    batch: Annotated[
        int | None, typer.Option(min=1, help="The global batch. Default: the job's, else 64.", **_JOB)
    ] = None,
    inexact: Annotated[
        bool,
        typer.Option(
            "--inexact/--exact",
            help="Allow codecs and local(8), which change results. Default: --exact.",
            **_SEARCH,
        ),
    ] = False,
    most: Annotated[
        int | None, typer.Option("--most-workers", min=1, help="Use at most so many nodes.", **_SEARCH)
    ] = None,
    collective: Annotated[str | None, typer.Option(help="Only this collective.", **_SEARCH)] = None,
    groups: Annotated[
        str | None,
        typer.Option(
            metavar="RULE",
            help="Only groups that sum first: by-cost, equal-power(3), random(3), or their largest size.",
            **_SEARCH,
        ),
    ] = None,
    codec: Annotated[str | None, typer.Option(help="Only this codec.", **_SEARCH)] = None,
    time_best: Annotated[
        bool,
        typer.Option(
            "--time-best", help="Run the best few for some steps each, and keep the fastest.", **_SEARCH
        ),
    ] = False,
    keep: Annotated[
        int, typer.Option(min=1, help="How many of the best are shown and timed. Default: 3.", **_OUTPUT)
    ] = 3,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Write the plan here, for run --plan.", **_OUTPUT)
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else.", **_OUTPUT)] = False,
    runs: Annotated[Path, typer.Option(help="The folder of runs, for --run.", **_OUTPUT)] = Path("runs"),
) -> None:
    """Say what these machines can do with a job, how it is best run, and why.

    Nodes, shares, groups, collective and codec are chosen together, by the predicted
    time of a step. `echelon run --plan` follows a plan that was written with -o.

    Examples:
      echelon plan --lab two-sites --model lenet --batch 64
      echelon plan --lab four-unequal -o plan.toml train.py --epochs 10
      echelon plan --cluster cluster.toml --inexact
      echelon plan --hosts a:2,b:4 --model lenet --data mnist --time-best
      echelon plan --run latest --batch 256
      echelon plan --cluster cluster.toml --groups "equal-power(3)"
    """
    console, errors = Console(highlight=False), Console(stderr=True, highlight=False)
    asked = PlanningAsked(
        cluster=cluster,
        lab=lab,
        hosts=hosts,
        run=run,
        workers=workers,
        runs=str(runs),
        probe=probe,
        script=script,
        args=tuple(args or ()),
        model=model,
        data=data,
        batch=batch,
    )
    _check(asked, collective=collective, codec=codec)
    rule = _rule(groups, collective)

    def say(text: str) -> None:
        errors.print(Text(text), style="dim", soft_wrap=True)

    # The search needs numpy, and measuring torch: other commands shall begin without them.
    from echelon.cli.plan_output import PlanOutput, as_json, said
    from echelon.plan.group_rule import groups_by_rule
    from echelon.plan.predict.predict import predict
    from echelon.plan.search import search

    known = machines_and_job(asked, say)
    space = _space(collective, codec)
    if rule is not None:
        formed = groups_by_rule(rule, known.topology, known.job)
        space = replace(space, groups=formed.groups)
        known = replace(known, notes=(*known.notes, formed.reason))
    result = search(
        known.topology,
        known.job,
        predict=predict,
        exact=not inexact,
        most_workers=most,
        allowed=space,
        keep=keep,
    )
    timed: list[tuple[SearchCandidate, float]] = []
    if time_best:
        result, timed = timed_best(asked, known, result, say)
    found = made_plan(known, result)
    output = PlanOutput(known=known, result=result, plan=found, timed=tuple(timed), keep=keep)
    if json:
        typer.echo(msgspec.json.format(msgspec.json.encode(as_json(output)), indent=2).decode())
    else:
        said(output, console)
    _keep(asked, found, out, errors if json else console)


def _check(asked: PlanningAsked, *, collective: str | None, codec: str | None) -> None:
    """Refuse what cannot be, before anything is measured."""
    asked.check()
    if asked.script and not Path(asked.script).is_file():
        raise ConfigError(
            f"there is no script {asked.script}",
            where=str(Path.cwd()),
            fix="give its path; options of echelon go before it, the script's own after it",
        )
    if asked.model:
        MODELS.build(asked.model, where="--model")
        DATASETS.build(asked.data, where="--data")
    for name, text in (("collective", collective), ("codec", codec)):
        if text is not None:
            try:
                strategies().strategies[name](text)
            except ConfigError as error:
                error.where = f"--{name}"
                raise


def _rule(groups: str | None, collective: str | None) -> GroupRule | None:
    """How groups are formed; None leaves it to the search."""
    if groups is None:
        return None
    if collective is not None:
        raise ConfigError(
            "--collective and --groups both say how workers sum", where="--groups", fix="give one of them"
        )
    from echelon.plan.group_rule import parse_group_rule

    return parse_group_rule(groups)


def _space(collective: str | None, codec: str | None) -> SearchSpace:
    """What the search may choose from."""
    from echelon.plan.ways import SearchSpace

    usual = SearchSpace()
    return SearchSpace(
        collectives=(collective,) if collective else usual.collectives,
        hierarchies=collective is None,
        codecs=(codec,) if codec else usual.codecs,
    )


def _keep(asked: PlanningAsked, found: Plan, out: Path | None, console: Console) -> None:
    """Write the plan, or say how it is kept; and how it is followed."""
    where = f"--lab {asked.lab} " if asked.lab else f"--hosts {asked.hosts} " if asked.hosts else ""
    target = asked.script or "SCRIPT"
    if out is None:
        console.print(Text("\nto keep the plan: give -o plan.toml"), soft_wrap=True)
        return
    write_whole(out, plan_text(found).encode())
    train = f"echelon train {where}--plan {out} --model {asked.model} --data {asked.data}"
    follow = train if asked.model else f"echelon run {where}--plan {out} {target}"
    console.print(Text(f"\nplan: {out}\nto follow it: {follow}"), soft_wrap=True)
