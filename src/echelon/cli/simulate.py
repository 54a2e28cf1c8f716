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

from echelon.cli.churn import show_churn
from echelon.cli.options import Given, flag_of, with_options
from echelon.cluster.delay import DELAYS
from echelon.cluster.machine import usable_cores
from echelon.errors import ConfigError
from echelon.observe.atomic import write_whole
from echelon.observe.run_folder import RunFolder
from echelon.simulate.churn import ChurnSetting
from echelon.simulate.compare import Standing, compare, in_words
from echelon.simulate.outcome import SimulationResult
from echelon.simulate.page import page_html, profile_rows, show_reached, show_spread
from echelon.simulate.profile import Profile, measure
from echelon.simulate.recorded import Replayed, replay_run
from echelon.simulate.setting import Setting, SimulateSettings
from echelon.simulate.sweep import check_policies, simulate_several
from echelon.start.planning import PlanningAsked
from echelon.zoo.dataset import DATASETS
from echelon.zoo.model import MODELS

_PANELS = {
    **dict.fromkeys(["workers", "servers", "groups", "speed", "delay", "delayed"], "The cluster"),
    **dict.fromkeys(["sync", "model", "data", "batch", "optimizer", "lr", "momentum"], "Training"),
    **dict.fromkeys(["weight_decay", "seconds", "seed", "seeds", "no_gradients"], "Training"),
    **dict.fromkeys(
        ["compute", "server_costs", "link", "latency", "jitter", "loss"], "How long things take"
    ),
    **dict.fromkeys(["every", "test_samples", "train_samples", "until_accuracy", "jobs"], "Output"),
}
_OUTPUT: Any = {"rich_help_panel": "Output", "show_default": False}
_MANY: Any = {
    "rich_help_panel": "Many nodes: steps by prediction, without gradients",
    "show_default": False,
}
_CHURN: Any = {"rich_help_panel": "Losses: members by the rules, without gradients", "show_default": False}
_FOR_CHURN = ("workers", "seconds", "seed", "compute", "latency")
_FOR_MANY = ("model", "data", "batch", "seed")


@with_options(SimulateSettings, _PANELS)
def simulate(
    given: Given[SimulateSettings],
    json: Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else.", **_OUTPUT)] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            help="The page to write. Default: a new simulate-....html here; none with --json.",
            **_OUTPUT,
        ),
    ] = None,
    show: Annotated[bool, typer.Option("--open", help="Show the page in the browser.", **_OUTPUT)] = False,
    events: Annotated[
        Path | None,
        typer.Option(help="Write all events here, as JSON lines with policy and seed.", **_OUTPUT),
    ] = None,
    replay: Annotated[
        str | None,
        typer.Option(
            help="Simulate nothing. Feed what this run's server received to its policy again, and check "
            "that it decides the same.",
            metavar="RUN",
            **_OUTPUT,
        ),
    ] = None,
    runs: Annotated[
        Path, typer.Option(help="The folder of runs, for --replay and --like-run.", **_OUTPUT)
    ] = Path("runs"),
    churn: Annotated[
        list[str] | None,
        typer.Option(help='Workers are lost at random: "kill(rate=0.5)", "stop(rate=0.1)".', **_CHURN),
    ] = None,
    outage: Annotated[
        list[str] | None,
        typer.Option(help='Many are lost at once: "kill(at=10)", "cut(at=10, part=0.3)".', **_CHURN),
    ] = None,
    nodes: Annotated[
        int | None, typer.Option(help="Predict the steps of so many nodes, up to 10,000.", **_MANY)
    ] = None,
    like: Annotated[
        str | None,
        typer.Option(metavar="NODE", help="Nodes like this one. Default: the first.", **_MANY),
    ] = None,
    cluster: Annotated[
        str | None, typer.Option(help="The cluster file that has it, perhaps with [job].", **_MANY)
    ] = None,
    lab: Annotated[str | None, typer.Option(help="The lab that has it.", **_MANY)] = None,
    like_run: Annotated[
        str | None, typer.Option(metavar="RUN", help="The recorded run that has it.", **_MANY)
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="How many steps. Default: 100.", **_MANY)] = 100,
    noise: Annotated[
        float, typer.Option(min=0, max=2, help="How much computing varies. Default: 0.1.", **_MANY)
    ] = 0.1,
    grow: Annotated[
        bool, typer.Option("--grow", help="--batch is for each node, not for all together.", **_MANY)
    ] = False,
) -> None:
    """Compare sync policies on a virtual clock: real gradients, virtual time.

    All policies begin with the same weights and meet the same delays. The same
    seed gives the same result, to the bit.

    Examples:
      echelon simulate --sync full --sync async --delay "normal(0, 0.25)"
      echelon simulate --workers 25 --sync "smooth-switch(step=500)" --seeds 5
      echelon simulate --workers 1000 --sync async --no-gradients --compute 20ms
      echelon simulate --replay latest
      echelon simulate --nodes 1000 --like node-a --cluster cluster.toml
      echelon simulate --workers 100 --churn "kill(rate=0.5)" --seconds 60
    """
    settings = given.settings
    if churn or outage:
        others = {"--replay": replay, "--events": events, "--out": out, "--open": show, "--nodes": nodes}
        _refuse_unused(given, others)
        compute_s, link = settings.compute_s, settings.virtual_link
        setting_of_losses = ChurnSetting(
            workers=settings.workers,
            seconds=settings.seconds,
            seed=settings.seed,
            step_s=compute_s or 0.02,
            latency_s=link.latency_s,
        )
        show_churn(setting_of_losses, churn or [], outage or [], json=json)
        return
    if nodes is not None:
        _refuse_others(given, {"--replay": replay, "--events": events})
        machines = PlanningAsked(
            cluster=cluster,
            lab=lab,
            run=like_run,
            runs=str(runs),
            model=settings.model if "model" in given.names else None,
            data=settings.data,
            batch=settings.batch if "batch" in given.names else None,
        )
        from echelon.cli.scaling import ScalingAsked, show_scaling  # with numpy

        asked = ScalingAsked(
            nodes=nodes, like=like, steps=steps, noise=noise, seed=settings.seed, grow=grow
        )
        show_scaling(machines, asked, json=json, out=out, show=show)
        return
    _needs_nodes(
        {"--like": like, "--cluster": cluster, "--lab": lab, "--like-run": like_run, "--grow": grow}
    )
    if replay is not None:
        _check_replay(given, {"--out": out, "--open": show, "--events": events})
        _replay(RunFolder.find(replay, runs), settings.lr if "lr" in given.names else None, json)
        return
    setting, sources = _prepare(settings)
    outcome = _carry_out(setting, settings.sync, settings.jobs or usable_cores(), events)
    standings = compare(outcome, settings.until_accuracy)
    if json:
        _print_json(outcome, standings, sources)
    else:
        _print(outcome, standings, sources, settings.until_accuracy)
    page = out or (None if json else Path(_page_name(setting)))
    if page is not None:
        command = shlex.join(["echelon", *sys.argv[1:]])
        accuracy = settings.until_accuracy
        text = page_html(outcome, standings, command=command, sources=sources, until_accuracy=accuracy)
        write_whole(page, text.encode())
        _say(f"picture: {page}", to_stderr=json)
        if show and not webbrowser.open(page.resolve().as_uri()):
            _say("no browser could be started; open the file by hand", to_stderr=json)


# What is asked


def _prepare(settings: SimulateSettings) -> tuple[Setting, dict[str, str]]:
    """The setting with its profile, and which parts of that were given. Measures the others."""
    setting = settings.setting()
    MODELS.build(setting.model, where="--model")
    DATASETS.build(setting.data, where="--data")
    if setting.delay:
        DELAYS.build(setting.delay, where="--delay")
    if setting.jitter:
        DELAYS.build(setting.jitter, where="--jitter")
    check_policies(setting, settings.sync)
    measured = "measured on this machine"
    return dataclasses.replace(setting, profile=_profile(setting, settings)), {
        "compute": measured if settings.compute is None else "given",
        "costs": measured if settings.server_costs is None else "given",
        "link": "assumed" if settings.link is None and settings.latency is None else "given",
    }


def _profile(setting: Setting, settings: SimulateSettings) -> Profile:
    compute_s, costs, link = settings.compute_s, settings.costs, settings.virtual_link
    if compute_s is not None and costs is not None:
        return Profile(compute_s=compute_s, costs=costs, link=link)
    with Console(stderr=True).status("measuring how long a gradient takes"):
        return measure(setting, compute_s=compute_s, costs=costs, link=link)


def _check_replay(given: Given[SimulateSettings], others: Mapping[str, object]) -> None:
    """Refuse options that a replay does not use."""
    flags = [flag_of(name) for name in given.names if name != "lr"]
    flags += [flag for flag, value in others.items() if value]
    for flag in flags:
        raise ConfigError(
            f"{flag} is not for a replay: all is as it was in the run", where=flag, fix="leave it out"
        )


def _refuse_others(given: Given[SimulateSettings], others: Mapping[str, object]) -> None:
    """Refuse options that a prediction of many nodes does not use."""
    flags = [flag_of(name) for name in given.names if name not in _FOR_MANY]
    for flag in [*flags, *(flag for flag, value in others.items() if value)]:
        raise ConfigError(f"{flag} is not for --nodes", where=flag, fix="leave one of the two out")


def _refuse_unused(given: Given[SimulateSettings], others: Mapping[str, object]) -> None:
    """Refuse options that a simulation of losses does not use."""
    flags = [flag_of(name) for name in given.names if name not in _FOR_CHURN]
    for flag in [*flags, *(flag for flag, value in others.items() if value)]:
        raise ConfigError(
            f"{flag} is not for --churn and --outage", where=flag, fix="leave one of the two out"
        )


def _needs_nodes(given: Mapping[str, object]) -> None:
    """Refuse options that only --nodes uses."""
    for flag, value in given.items():
        if value:
            raise ConfigError(f"{flag} is for --nodes", where=flag, fix="give --nodes 1000 too")


def _page_name(setting: Setting) -> str:
    what = "-".join(text.partition("(")[0] for text in (setting.model, setting.data))
    return f"simulate-{datetime.now():%Y%m%d-%H%M%S}-{what}.html"


# What is done


def _carry_out(
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


def _replay(folder: RunFolder, lr: float | None, json: bool) -> None:
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
