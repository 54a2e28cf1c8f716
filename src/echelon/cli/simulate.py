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

from echelon.cli.options import Given, flag_of, with_options
from echelon.cluster.delay import DELAYS
from echelon.cluster.machine import usable_cores
from echelon.errors import ConfigError
from echelon.observe.atomic import write_whole
from echelon.observe.run_folder import RunFolder
from echelon.simulate.compare import Standing, compare, in_words
from echelon.simulate.outcome import SimulationResult
from echelon.simulate.page import page_html, profile_rows, show_reached, show_spread
from echelon.simulate.profile import Profile, measure
from echelon.simulate.recorded import Replayed, replay_run
from echelon.simulate.setting import Setting, SimulateSettings
from echelon.simulate.sweep import check_policies, simulate_several
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
    runs: Annotated[Path, typer.Option(help="The folder of runs, for --replay.", **_OUTPUT)] = Path("runs"),
) -> None:
    """Compare sync policies on a virtual clock: real gradients, virtual time.

    All policies begin with the same weights and meet the same delays. The same
    seed gives the same result, to the bit.

    Examples:
      echelon simulate --sync full --sync async --delay "normal(0, 0.25)"
      echelon simulate --workers 25 --sync "smooth-switch(step=500)" --seeds 5
      echelon simulate --workers 1000 --sync async --no-gradients --compute 20ms
      echelon simulate --replay latest
    """
    settings = given.settings
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
