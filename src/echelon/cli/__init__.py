"""The command line: it reads options, calls the library and prints the result.

command.py   the classes of all commands: help without types for flags
options.py   turns a settings class into command-line options
run.py       echelon run, echelon train
resume.py    echelon resume
members.py   echelon join | invite | leave
adapt.py     echelon adapt
runs.py      echelon runs
config.py    echelon config show
listing.py   echelon list
lab.py       echelon lab up | status | exec | down
look.py      echelon trace, echelon report
check.py     echelon check
plan.py      echelon plan
plan_output.py what it prints
what_if.py   echelon what-if
simulate.py  echelon simulate
scaling.py   echelon simulate --nodes
churn.py     echelon simulate --churn, --outage
bench.py     echelon bench codecs
bench_step.py echelon bench step
bench_local.py echelon bench local
bench_display.py what goes on in a measurement
doctor.py    echelon doctor
probe.py     echelon probe
certs.py     echelon certs
"""

from __future__ import annotations

import os
import sys

import typer
from rich.console import Console
from rich.text import Text

from echelon.cli import bench, check, config, lab, listing, look, plan, run, runs, simulate, what_if
from echelon.cli.adapt import adapt
from echelon.cli.certs import certs
from echelon.cli.command import PlainCommand, PlainGroup
from echelon.cli.doctor import doctor
from echelon.cli.members import invite, join, leave
from echelon.cli.probe import probe
from echelon.cli.resume import resume
from echelon.config.allowed import ALLOW_VARIABLE
from echelon.errors import EchelonError

app = typer.Typer(
    name="echelon",
    cls=PlainGroup,
    help="Train PyTorch models on the machines you have: unequal, joined by unequal links.",
    epilog="First steps: `echelon train --workers 4`, then `echelon report`. If something does not work: "
    "`echelon doctor`.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",  # not markdown: it runs the lines of examples together
    context_settings={"help_option_names": ["-h", "--help"]},
)
run.register(app)
app.command("resume", cls=PlainCommand)(resume)
app.command("join", cls=PlainCommand)(join)
app.command("invite", cls=PlainCommand)(invite)
app.command("leave", cls=PlainCommand)(leave)
plan.register(app)
app.command("adapt", cls=PlainCommand)(adapt)
check.register(app)
app.command("runs", cls=PlainCommand)(runs.runs)
app.command("report", cls=PlainCommand)(look.report)
app.command("trace", cls=PlainCommand)(look.trace)
app.command("probe", cls=PlainCommand)(probe)
app.command("list", cls=PlainCommand)(listing.show)
app.command("simulate", cls=PlainCommand)(simulate.simulate)
app.command("what-if", cls=PlainCommand)(what_if.what_if)
app.add_typer(bench.app, name="bench")
app.add_typer(lab.app, name="lab")
app.add_typer(config.app, name="config")
app.command("doctor", cls=PlainCommand)(doctor)
app.command("certs", cls=PlainCommand)(certs)


@app.callback(invoke_without_command=True)
def _version(
    version: bool = typer.Option(False, "--version", help="Print the version and exit."),
    allow: list[str] = typer.Option(
        [],
        metavar="NAME",
        help="Code outside of Echelon that a file may name: module:name, or a strategy. May be repeated.",
    ),
) -> None:
    if allow:
        before = os.environ.get(ALLOW_VARIABLE, "")
        os.environ[ALLOW_VARIABLE] = " ".join(filter(None, [before, *allow]))  # for workers and servers too
    if version:
        from echelon import __version__

        typer.echo(__version__)
        raise typer.Exit


def main() -> None:
    """Run the command line. An EchelonError or OSError is printed without a traceback."""
    try:
        app(prog_name="echelon")
    except EchelonError as error:
        _print_error(f"{type(error).__name__}: {error}")
        sys.exit(2)
    except OSError as error:
        named = f" ({error.filename})" if error.filename else ""
        _print_error(f"{type(error).__name__}: {error.strerror or error}{named}")
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


def _print_error(text: str) -> None:
    Console(stderr=True).print(Text(text), soft_wrap=True)
