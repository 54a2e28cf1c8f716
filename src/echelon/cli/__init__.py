"""The command line: doors only, no logic of their own.

options.py   turns settings into command-line options
run.py       echelon run, echelon train
config.py    echelon config show
listing.py   echelon list
lab.py       echelon lab up | status | exec | down
look.py      echelon trace, echelon report
simulate.py  echelon simulate
bench.py     echelon bench codecs
doctor.py    echelon doctor
"""

from __future__ import annotations

import sys

import typer
from rich.console import Console
from rich.text import Text

from echelon.cli import bench, config, lab, listing, look, run, simulate
from echelon.cli.doctor import doctor
from echelon.errors import EchelonError

app = typer.Typer(
    name="echelon",
    help="Train PyTorch models on the machines you have: unequal, joined by unequal links.",
    epilog="First steps: `echelon train --workers 4`, then `echelon report`. Problems: `echelon doctor`.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    rich_markup_mode="rich",  # not markdown: it runs the lines of examples together
    context_settings={"help_option_names": ["-h", "--help"]},
)
run.register(app)
app.command("simulate")(simulate.simulate)
app.add_typer(bench.app, name="bench")
app.command("list")(listing.show)
app.command("trace")(look.trace)
app.command("report")(look.report)
app.add_typer(lab.app, name="lab")
app.add_typer(config.app, name="config")
app.command("doctor")(doctor)


@app.callback(invoke_without_command=True)
def _version(version: bool = typer.Option(False, "--version", help="Print the version and exit.")) -> None:
    if version:
        from echelon import __version__

        typer.echo(__version__)
        raise typer.Exit


def main() -> None:
    """Run the command line; an error that explains itself is printed without a traceback."""
    try:
        app(prog_name="echelon")
    except EchelonError as error:
        _tell(f"{type(error).__name__}: {error}")
        sys.exit(2)
    except OSError as error:
        named = f" ({error.filename})" if error.filename else ""
        _tell(f"{type(error).__name__}: {error.strerror or error}{named}")
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


def _tell(text: str) -> None:
    Console(stderr=True).print(Text(text), soft_wrap=True)
