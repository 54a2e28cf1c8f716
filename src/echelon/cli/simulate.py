"""`echelon simulate`: what would policies do on a cluster? On a virtual clock, with real gradients."""

from __future__ import annotations

import dataclasses
import shlex
import sys
import webbrowser
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from echelon.cluster.delay import DELAYS
from echelon.cluster.machine import usable_cores
from echelon.config.schema import RunSettings
from echelon.config.units import duration_s, rate_bytes_per_s
from echelon.errors import ConfigError
from echelon.observe.atomic import write_whole
from echelon.observe.run_folder import RunFolder
from echelon.plan.groups import parse_groups
from echelon.simulate.compare import Standing, compare, in_words
from echelon.simulate.outcome import SimulationResult
from echelon.simulate.page import page_html, profile_rows, show_reached, show_spread
from echelon.simulate.profile import Costs, Profile, VirtualLink, measure
from echelon.simulate.recorded import Replayed, replay_run
from echelon.simulate.setting import Setting
from echelon.simulate.sweep import check_policies, simulate_several
from echelon.zoo.dataset import DATASETS
from echelon.zoo.model import MODELS

_CLUSTER, _TRAINING, _TIMES, _OUTPUT = "The cluster", "Training", "How long things take", "Output"
_PLAIN = (
    "workers", "model", "data", "batch", "optimizer", "lr", "momentum", "weight_decay", "delay", "delayed",
    "seconds", "seed", "seeds", "test_samples", "train_samples",
)  # fmt: skip
_REPLAY_TAKES = {"replay", "runs", "lr", "json"}
# Options whose values another file checks under its own name for them.
_FLAGS = {
    "--evaluate-every-s": "--every",
    "links": "--link",
    "profile, compute_s": "--compute",
    "costs, queue_s": "--server-costs",
    "costs, apply_s": "--server-costs",
    "costs, hand_s": "--server-costs",
    "link, latency_s": "--latency",
    "link, bytes_per_s": "--link",
}


def _option(panel: str, help: str, *names: str, of: str = "", **more: Any) -> Any:
    """An option that may be left out; its default is that of the setting of that name."""
    if of:
        default = {field.name: field.default for field in dataclasses.fields(Setting)}[of]
        help = f"{help} Default: {f'{default:g}' if isinstance(default, float) else default}."
    return typer.Option(*names, help=help, rich_help_panel=panel, show_default=False, **more)


def simulate(
    ctx: typer.Context,
    sync: Annotated[
        list[str] | None,
        _option(
            _TRAINING,
            "A policy. Several are compared with the first. See `echelon list sync`. Default: full.",
            metavar="POLICY",
        ),
    ] = None,
    workers: Annotated[int | None, _option(_CLUSTER, "How many workers.", of="workers")] = None,
    servers: Annotated[int, _option(_CLUSTER, "There is always one virtual server.")] = 1,
    groups: Annotated[
        str | None, _option(_CLUSTER, "Groups of workers, for policies with levels: 4,4, or 0,1;2,3.")
    ] = None,
    speed: Annotated[str | None, _option(_CLUSTER, "A speed in (0, 1] per worker: 1,0.5,0.5,0.25.")] = None,
    delay: Annotated[
        str | None, _option(_CLUSTER, 'Hold workers up at every step: "normal(0, 0.25)" seconds.')
    ] = None,
    delayed: Annotated[
        float | None, _option(_CLUSTER, "The fraction of workers that are delayed.", of="delayed")
    ] = None,
    model: Annotated[str | None, _option(_TRAINING, "See `echelon list model`.", of="model")] = None,
    data: Annotated[str | None, _option(_TRAINING, "See `echelon list data`.", of="data")] = None,
    batch: Annotated[int | None, _option(_TRAINING, "The batch of each worker.", of="batch")] = None,
    optimizer: Annotated[
        str | None, _option(_TRAINING, "sgd or adamw.", of="optimizer", metavar="NAME")
    ] = None,
    lr: Annotated[float | None, _option(_TRAINING, "The learning rate.", of="lr")] = None,
    momentum: Annotated[float | None, _option(_TRAINING, "The momentum of sgd.", of="momentum")] = None,
    weight_decay: Annotated[float | None, _option(_TRAINING, "The decay.", of="weight_decay")] = None,
    seconds: Annotated[float | None, _option(_TRAINING, "Virtual seconds per run.", of="seconds")] = None,
    seed: Annotated[int | None, _option(_TRAINING, "The first seed.", of="seed")] = None,
    seeds: Annotated[int | None, _option(_TRAINING, "How many seeds.", of="seeds")] = None,
    no_gradients: Annotated[
        bool, _option(_TRAINING, "Learn nothing; only the times are of interest.", "--no-gradients")
    ] = False,
    compute: Annotated[
        str | None, _option(_TIMES, "A gradient: 20ms, or a number of seconds. Measured if not given.")
    ] = None,
    server_costs: Annotated[
        str | None,
        _option(
            _TIMES,
            "What a push, an update, and weights for a worker cost the server: 1ms,2ms,1ms. "
            "Measured if not given.",
            metavar="QUEUE,APPLY,HAND",
        ),
    ] = None,
    link: Annotated[
        str | None, _option(_TIMES, "A rate such as 100mbit for all, or one per worker. Default: 1gbit.")
    ] = None,
    latency: Annotated[
        str | None, _option(_TIMES, "The links' latency, such as 5ms. Default: 0.1ms.")
    ] = None,
    every: Annotated[
        str | None, _option(_OUTPUT, "Evaluate every so many virtual seconds. Default: 20 times.")
    ] = None,
    test_samples: Annotated[
        int | None, _option(_OUTPUT, "Evaluate on so many test samples; 0 is all.", of="test_samples")
    ] = None,
    train_samples: Annotated[
        int | None, _option(_OUTPUT, "The train loss is of so many samples.", of="train_samples")
    ] = None,
    until_accuracy: Annotated[
        float | None, _option(_OUTPUT, "Also tell when this test accuracy was reached, e.g. 0.95.")
    ] = None,
    json: Annotated[bool, _option(_OUTPUT, "Print JSON, and nothing else.", "--json")] = False,
    out: Annotated[
        Path | None,
        _option(
            _OUTPUT,
            "Where to write the page. Default: a new simulate-....html here; none with --json.",
            "--out",
            "-o",
        ),
    ] = None,
    show: Annotated[bool, _option(_OUTPUT, "Show the page in the browser.", "--open")] = False,
    events: Annotated[
        Path | None, _option(_OUTPUT, "Write all events here, as JSON lines with policy and seed.")
    ] = None,
    jobs: Annotated[
        int | None, _option(_OUTPUT, "Processes at once; results are the same. Default: the usable cores.")
    ] = None,
    replay: Annotated[
        str | None,
        _option(
            _OUTPUT,
            "Simulate nothing: feed what this run's server was told to its policy again, and see whether "
            "it decides the same.",
            metavar="RUN",
        ),
    ] = None,
    runs: Annotated[Path, _option(_OUTPUT, "Where runs are kept.")] = Path("runs"),
) -> None:
    """Run policies on a virtual clock: real gradients, virtual time, one machine.

    All policies begin with the same weights and meet the same delays. The same
    seed gives the same result, to the bit.

    Examples:
      echelon simulate --sync full --sync async --delay "normal(0, 0.25)"
      echelon simulate --workers 25 --sync "smooth-switch(step=500)" --seeds 5
      echelon simulate --workers 1000 --sync async --no-gradients --compute 20ms
      echelon simulate --replay latest
    """
    given = ctx.params
    if replay is not None:
        _replay(ctx, RunFolder.find(replay, runs), lr, json)
        return
    try:
        setting, sources = _prepared(given)
    except ConfigError as error:
        error.where = _FLAGS.get(error.where, error.where)
        raise
    outcome = _carried_out(setting, sync or ["full"], _jobs(jobs), events)
    standings = compare(outcome, until_accuracy)
    if json:
        _print_json(outcome, standings, sources)
    else:
        _print(outcome, standings, sources, until_accuracy)
    page = out or (None if json else Path(_page_name(setting)))
    if page is not None:
        command = shlex.join(["echelon", *sys.argv[1:]])
        text = page_html(
            outcome, standings, command=command, sources=sources, until_accuracy=until_accuracy
        )
        write_whole(page, text.encode())
        _say(f"picture: {page}", to_stderr=json)
        if show and not webbrowser.open(page.resolve().as_uri()):
            _say("no browser could be started; open the file by hand", to_stderr=json)


# What is asked


def _prepared(given: Mapping[str, Any]) -> tuple[Setting, dict[str, str]]:
    """The setting with its profile, and what of that is given; measures what is not."""
    _check(given)
    plain = {name: given[name] for name in _PLAIN if given[name] is not None}
    setting = Setting(
        **plain,
        speeds=RunSettings(speed=given["speed"]).speeds,
        links=tuple(rates) if len(rates := _rates(given["link"])) > 1 else (),
        evaluate_every_s=None if given["every"] is None else duration_s(given["every"], where="--every"),
        gradients=not given["no_gradients"],
    )
    if given["groups"]:
        setting = dataclasses.replace(setting, groups=parse_groups(given["groups"], setting.workers))
    MODELS.build(setting.model, where="--model")
    DATASETS.build(setting.data, where="--data")
    if setting.delay:
        DELAYS.build(setting.delay, where="--delay")
    check_policies(setting, given["sync"] or ["full"])
    profile = _profile(setting, given, rates)
    measured = "measured on this machine"
    return dataclasses.replace(setting, profile=profile), {
        "compute": measured if given["compute"] is None else "given",
        "costs": measured if given["server_costs"] is None else "given",
        "link": "assumed" if given["link"] is None and given["latency"] is None else "given",
    }


def _check(given: Mapping[str, Any]) -> None:
    if given["optimizer"] not in (None, "sgd", "adamw"):
        raise ConfigError(
            f"{given['optimizer']!r} is not an optimizer", where="--optimizer", fix="give sgd or adamw"
        )
    if given["servers"] != 1:
        raise ConfigError(
            f"{given['servers']} servers: the virtual clock has exactly one",
            where="--servers",
            fix="leave it out; policies that need a server have it",
        )
    delayed = given["delayed"]
    if delayed is not None and not 0 <= delayed <= 1:
        raise ConfigError(f"{delayed:g} is not a fraction", where="--delayed", fix="give 0 to 1")
    accuracy = given["until_accuracy"]
    if accuracy is not None and not 0 < accuracy <= 1:
        raise ConfigError(f"{accuracy:g} is not an accuracy", where="--until-accuracy", fix="give 0 to 1")


def _rates(text: str | None) -> list[float]:
    return [rate_bytes_per_s(part, where="--link") for part in text.split(",")] if text else []


def _profile(setting: Setting, given: Mapping[str, Any], rates: Sequence[float]) -> Profile:
    latency_s = VirtualLink().latency_s
    if given["latency"] is not None:
        latency_s = duration_s(given["latency"], where="--latency")
    link = VirtualLink(latency_s=latency_s, bytes_per_s=rates[0] if rates else VirtualLink().bytes_per_s)
    compute_s = None if given["compute"] is None else duration_s(given["compute"], where="--compute")
    costs = None if given["server_costs"] is None else _costs(given["server_costs"])
    if compute_s is not None and costs is not None:
        return Profile(compute_s=compute_s, costs=costs, link=link)
    with Console(stderr=True).status("measuring how long a gradient takes"):
        return measure(setting, compute_s=compute_s, costs=costs, link=link)


def _costs(text: str) -> Costs:
    parts = [duration_s(part, where="--server-costs") for part in text.split(",")]
    if len(parts) != 3:
        raise ConfigError(
            f"{text!r} are not three durations",
            where="--server-costs",
            fix="give what a push, an update, and weights cost: 1ms,2ms,1ms",
        )
    return Costs(queue_s=parts[0], apply_s=parts[1], hand_s=parts[2])


def _jobs(asked: int | None) -> int:
    if asked is not None and asked < 1:
        raise ConfigError(f"{asked} processes", where="--jobs", fix="give at least 1")
    return asked or usable_cores()


def _page_name(setting: Setting) -> str:
    what = "-".join(text.partition("(")[0] for text in (setting.model, setting.data))
    return f"simulate-{datetime.now():%Y%m%d-%H%M%S}-{what}.html"


# What is done


def _carried_out(
    setting: Setting, policies: Sequence[str], jobs: int, events: Path | None
) -> SimulationResult:
    console = Console(stderr=True)
    if not console.is_terminal:
        return simulate_several(setting, policies, jobs=jobs, events=events)
    bar = Progress(
        TextColumn("{task.completed:,.0f} of {task.total:,.0f} virtual seconds"),
        BarColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
    )
    with bar:
        task = bar.add_task("", total=setting.seconds * len(policies) * setting.seeds)
        reached: dict[int, float] = {}

        def progress(number: int, seconds: float) -> None:
            reached[number] = seconds
            bar.update(task, completed=sum(reached.values()))

        return simulate_several(setting, policies, jobs=jobs, events=events, progress=progress)


def _replay(ctx: typer.Context, folder: RunFolder, lr: float | None, json: bool) -> None:
    for parameter in ctx.command.params:
        name = parameter.name or ""
        if name not in _REPLAY_TAKES and ctx.params.get(name) not in (parameter.default, [], ()):
            flag = parameter.opts[0]
            raise ConfigError(
                f"{flag} is not for a replay: all is as it was in the run", where=flag, fix="leave it out"
            )
    found = replay_run(folder, lr)
    if json:
        _echo_json({**_replayed(found), "mismatch": str(found.mismatch) if found.mismatch else None})
    else:
        _say(f"{found.policy}: {found.arrivals:,} arrivals, {found.decisions:,} decisions in {found.run}")
        _say("all are decided as recorded" if found.same else f"the first that differs: {found.mismatch}")
    if not found.same:
        raise typer.Exit(1)


def _replayed(found: Replayed) -> dict[str, Any]:
    return {
        "run": found.run,
        "policy": found.policy,
        "arrivals": found.arrivals,
        "decisions": found.decisions,
        "same": found.same,
    }


# What is said


def _print(
    outcome: SimulationResult,
    standings: Sequence[Standing],
    sources: Mapping[str, str],
    accuracy: float | None,
) -> None:
    console = Console(highlight=False)
    for name, value, known in profile_rows(outcome.setting, outcome.profile, sources):
        console.print(Text(f"{name + ':':12}{value} ({known})"), soft_wrap=True)
    if outcome.setting.gradients:
        console.print()
        console.print(_learning_table(standings))
    console.print()
    console.print(_pace_table(standings, outcome.setting.seeds, accuracy))
    console.print()
    for sentence in in_words(outcome, standings):
        console.print(Text(sentence), soft_wrap=True)


def _learning_table(standings: Sequence[Standing]) -> Table:
    table = _table("policy", "")
    for name in ("at the end", "on average", "difference"):
        table.add_column(name, justify="right")
    for one in standings:
        for index, (name, found, percent) in enumerate(
            [
                ("test accuracy %", one.test_accuracy, True),
                ("test loss", one.test_loss, False),
                ("train loss", one.train_loss, False),
            ]
        ):
            table.add_row(
                Text(one.policy if not index else ""),
                name,
                show_spread(found.end, percent=percent),
                show_spread(found.average, percent=percent),
                "" if one is standings[0] else show_spread(found.difference, percent=percent, sign=True),
            )
    return table


def _pace_table(standings: Sequence[Standing], seeds: int, accuracy: float | None) -> Table:
    table = _table("policy")
    names = ["gradients", "applied", "dropped", "updates", "staleness", "waiting"]
    for name in names + ([f"to {100 * accuracy:g} %"] if accuracy is not None else []):
        table.add_column(name, justify="right")
    for one in standings:
        cells = [f"{count:,.0f}" for count in (one.gradients, one.applied, one.dropped, one.updates)]
        cells += [f"{one.staleness_mean:.1f}", f"{100 * one.waiting_share:.0f} %"]
        if accuracy is not None:
            cells.append(show_reached(one, seeds))
        table.add_row(Text(one.policy), *cells)
    return table


def _table(*words: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for word in words:
        table.add_column(word, overflow="fold")  # a policy's options are part of its name
    return table


def _print_json(
    outcome: SimulationResult, standings: Sequence[Standing], sources: Mapping[str, str]
) -> None:
    _echo_json(
        {
            "says": in_words(outcome, standings),
            "policies": standings,
            "profile": outcome.profile,
            "known": sources,
            "setting": outcome.setting,
            "runs": outcome.runs,
        }
    )


def _echo_json(value: Any) -> None:
    typer.echo(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())


def _say(text: str, *, to_stderr: bool = False) -> None:
    Console(stderr=to_stderr).print(Text(text), soft_wrap=True)
