"""`echelon what-if`: what would a recorded run have taken, if something had been different?"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from echelon.codec.codec import CODECS
from echelon.comm.schedule.collective import COLLECTIVES
from echelon.config.units import show_bytes, show_seconds
from echelon.errors import ConfigError
from echelon.observe.run_folder import RunFolder
from echelon.plan.make import strategy_text
from echelon.plan.strategy import Prediction
from echelon.simulate.recorded_cluster import recorded_run
from echelon.simulate.recorded_job import RecordedJob
from echelon.simulate.what_if import WhatIf, WhatIfChanges
from echelon.simulate.what_if import what_if as changed_run
from echelon.sync.policy import POLICIES

_CHECKS: dict[str, Callable[..., object]] = {
    "collective": COLLECTIVES.build,
    "codec": CODECS.build,
    "sync": POLICIES.build,
}
_PLAIN: Any = {"show_default": False}


def what_if(
    run: Annotated[
        str, typer.Argument(metavar="RUN", help="A run's folder, its name under --runs, or 'latest'.")
    ] = "latest",
    add: Annotated[
        list[str] | None,
        typer.Option(metavar="NODE", help="One more node like this one; node-a:3 for three.", **_PLAIN),
    ] = None,
    drop: Annotated[
        list[str] | None, typer.Option(metavar="NODE", help="Without this node.", **_PLAIN)
    ] = None,
    link: Annotated[
        list[str] | None,
        typer.Option(
            metavar="LINK=RATE", help="east/west=1gbit between sites, node-a=1gbit of a node.", **_PLAIN
        ),
    ] = None,
    codec: Annotated[str | None, typer.Option(help="With this codec.", **_PLAIN)] = None,
    collective: Annotated[str | None, typer.Option(help="With this collective.", **_PLAIN)] = None,
    sync: Annotated[str | None, typer.Option(help="With this sync policy.", **_PLAIN)] = None,
    overlap: Annotated[str | None, typer.Option(help="backward or step.", **_PLAIN)] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else.", **_PLAIN)] = False,
    runs: Annotated[Path, typer.Option("--runs", help="The folder of runs.")] = Path("runs"),
) -> None:
    """Predict a recorded run with a change: a node more or less, another link or codec.

    Machines, links and the cost of a step are read from the run's record. The run as it was is
    predicted too, and what was measured corrects the prediction of the change.

    Examples:
      echelon what-if latest --add east-0
      echelon what-if latest --link east/west=1gbit --drop west-1
      echelon what-if latest --codec "top-k(ratio=0.01)"
    """
    folder = RunFolder.find(run, runs)
    chosen = _chosen({"codec": codec, "collective": collective, "sync": sync, "overlap": overlap})
    changes = WhatIfChanges(
        add=tuple(add or ()), drop=tuple(drop or ()), links=tuple(link or ()), chosen=tuple(chosen.items())
    )
    if changes == WhatIfChanges():
        raise ConfigError(
            "nothing is changed",
            where="echelon what-if",
            fix="give --add, --drop, --link, --codec, --collective, --sync or --overlap",
        )
    from echelon.plan.predict.predict import predict  # with numpy, which other commands do without

    recorded = recorded_run(folder)
    found = changed_run(recorded, changes, predict)
    if json:
        typer.echo(msgspec.json.format(msgspec.json.encode(_values(recorded, found)), indent=2).decode())
    else:
        _print(recorded, found, Console(highlight=False))


def _chosen(given: dict[str, str | None]) -> dict[str, str]:
    """The other choices; refuse what does not exist."""
    chosen = {name: value for name, value in given.items() if value is not None}
    for name, value in chosen.items():
        if name in _CHECKS:
            _CHECKS[name](value, where=f"--{name}")
        elif value not in ("backward", "step"):
            raise ConfigError(
                f"{value!r} is not an overlap", where="--overlap", fix="give backward or step"
            )
    return chosen


def _print(recorded: RecordedJob, found: WhatIf, console: Console) -> None:
    def say(text: str) -> None:
        console.print(Text(text), soft_wrap=True)

    say(f"run:     {recorded.job.name}, {strategy_text(recorded.strategy)}")
    say(f"changed: {strategy_text(found.strategy)}")
    for note in recorded.notes:
        say(f"note:    {note}")
    off = 100 * (found.recorded.step_s / found.measured_s - 1)
    say(
        f"\nThe recorded run took {show_seconds(found.measured_s)} for a step; it is predicted with "
        f"{show_seconds(found.recorded.step_s)} ({off:+.0f} %), so predictions are multiplied by "
        f"{found.calibration:.2f}.\n"
    )
    console.print(_table(recorded, found))
    faster = found.measured_s / found.expected_s
    verdict = f"{faster:.2f} times as fast" if faster >= 1 else f"{1 / faster:.2f} times as long"
    say(f"\nA step is expected to take {show_seconds(found.expected_s)}: {verdict}. Why: {found.reason}.")


def _table(recorded: RecordedJob, found: WhatIf) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("")
    for name in ("recorded", "changed", "difference"):
        table.add_column(name, justify="right")

    def row(name: str, old: float, new: float, show: Callable[[float], str]) -> None:
        difference = f"{100 * (new / old - 1):+.0f} %" if old > 0 else "–"
        table.add_row(name, show(old), show(new), difference)

    before, after = found.recorded, found.changed
    row("expected step", found.measured_s, found.expected_s, show_seconds)
    batch = recorded.job.batch
    row("samples/s", batch / found.measured_s, batch / found.expected_s, lambda rate: f"{rate:,.0f}")
    row("  predicted step", before.step_s, after.step_s, show_seconds)
    row("  computing", max(before.compute_s), max(after.compute_s), show_seconds)
    row("  not hidden", before.exposed_s, after.exposed_s, show_seconds)
    row("busiest link", _busiest(before), _busiest(after), show_bytes)
    row("workers", len(recorded.strategy.nodes), len(found.strategy.nodes), lambda count: f"{count:.0f}")
    return table


def _busiest(found: Prediction) -> float:
    return max(found.link_bytes.values(), default=0.0)


def _values(recorded: RecordedJob, found: WhatIf) -> dict[str, Any]:
    return {
        "run": recorded.job.name,
        "measured_s": found.measured_s,
        "calibration": found.calibration,
        "expected_s": found.expected_s,
        "recorded": found.recorded,
        "changed": found.changed,
        "strategy": found.strategy,
        "reason": found.reason,
        "notes": recorded.notes,
    }
