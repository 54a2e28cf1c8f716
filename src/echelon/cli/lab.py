"""`echelon lab`: build, show, use and remove emulated clusters."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from echelon.cli.command import PlainCommand, PlainGroup
from echelon.errors import ConfigError, UnknownName

if TYPE_CHECKING:
    from echelon.cluster.lab.execute import NodeJob
    from echelon.cluster.lab.lab import Lab, NodeStatus

app = typer.Typer(
    cls=PlainGroup,
    no_args_is_help=True,
    help="Emulate a cluster on this machine: unequal CPUs, unequal links, faults. Needs Linux and root.",
    epilog="Example: `echelon lab up two-sites`. Labs that ship with Echelon: `echelon list labs`.",
)

_LAB_HELP = "A lab file, or the name of a shipped one: four-unequal, two-sites, seed1-table1."


@app.command(cls=PlainCommand)
def up(file: Annotated[str, typer.Argument(metavar="FILE", help=_LAB_HELP)]) -> None:
    """Build a lab and leave it up until `echelon lab down`.

    Examples:
      echelon lab up two-sites
      echelon lab exec two-sites --all -- python ddp_script.py
      echelon lab down two-sites
    """
    from echelon.cluster.lab.lab import Lab
    from echelon.cluster.lab.spec import read_lab

    spec = read_lab(file)
    lab = Lab.up(spec, run_id=spec.name, keep=True)
    console = Console(highlight=False)
    console.print(_nodes_table(lab))
    for line in (*_uplink_lines(lab), *(f"note: {note}" for note in lab.notes)):
        console.print(line, soft_wrap=True)
    console.print(f"\nlab {lab.name} is up; remove it with: echelon lab down {lab.name}", soft_wrap=True)


@app.command(cls=PlainCommand)
def status(
    file: Annotated[str | None, typer.Argument(metavar="FILE", help="One lab; all if omitted.")] = None,
) -> None:
    """Show the labs that are up, their nodes, and the processes in them.

    Examples:
      echelon lab status
      echelon lab status two-sites
    """
    from echelon.cluster.lab.lab import Lab

    console = Console(highlight=False)
    labs = Lab.all() if file is None else [Lab.find(_name_of(file))]
    if not labs:
        console.print("no lab is up")
    for lab in labs:
        console.print(_headline(lab), soft_wrap=True)
        console.print(_status_table(lab))


@app.command("exec", cls=PlainCommand)
def exec_(
    file: Annotated[str, typer.Argument(metavar="FILE", help="The lab's file, name or id.")],
    command: Annotated[list[str], typer.Argument(metavar="COMMAND", help="The program to run, after --.")],
    node: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Run it in this node. May be repeated.")
    ] = None,
    everywhere: Annotated[bool, typer.Option("--all", help="Run it in all nodes at once.")] = False,
    env: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="Set an environment variable. May be repeated."),
    ] = None,
    port: Annotated[
        int, typer.Option(min=1, max=65535, metavar="PORT", help="The value of MASTER_PORT.")
    ] = 29500,
    keep_going: Annotated[
        bool, typer.Option("--keep-going", help="Let the other nodes go on when one fails.")
    ] = False,
) -> None:
    """Run any program in one node, or in several at once, and wait for it.

    The program is started once per node, with RANK, NODE_RANK, WORLD_SIZE,
    LOCAL_RANK, MASTER_ADDR, MASTER_PORT and GLOO_SOCKET_IFNAME set. In its
    arguments {rank}, {world}, {node}, {address}, {master} and {port} are
    replaced.

    In one node the program uses this terminal. In several, each line begins
    with the node's name; the first failure ends the others and gives the exit
    code.

    Examples:
      echelon lab exec two-sites --all -- python ddp_script.py
      echelon lab exec two-sites --node east-0 -- bash
      echelon lab exec two-sites --all -- torchrun --nnodes {world} \\
          --node-rank {rank} --master-addr {master} ddp_script.py
    """
    from echelon.cluster.lab.execute import NodeJob, run_attached
    from echelon.cluster.lab.lab import Lab
    from echelon.comm.meet import secret

    if everywhere == bool(node):
        raise ConfigError(
            "both --node and --all are given" if everywhere else "neither --node nor --all is given",
            where="echelon lab exec",
            fix="give --all, or --node NAME once or more",
        )
    lab = Lab.find(_name_of(file))
    nodes = list(dict.fromkeys(node)) if node else [known.name for known in lab.spec.nodes]
    own = {**secret.for_workers(os.environ), **_variables(env or [])}
    job = NodeJob(command=command, nodes=nodes, env=own, port=port, keep_going=keep_going)
    raise typer.Exit(run_attached(lab, job).code if len(nodes) == 1 else _run_on_several(lab, job))


@app.command(cls=PlainCommand)
def down(
    file: Annotated[str | None, typer.Argument(metavar="FILE", help="The lab's file, name or id.")] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Remove all labs, also what is left of broken ones.")
    ] = False,
) -> None:
    """End all processes in a lab and remove it, also after a crash.

    Examples:
      echelon lab down two-sites
      echelon lab down --all
    """
    from echelon.cluster.lab.lab import take_down
    from echelon.cluster.lab.remove import remove_all

    if everything == (file is not None):
        raise ConfigError(
            "both a lab and --all are given" if everything else "no lab is given",
            where="echelon lab down",
            fix="give a lab's file, name or id, or --all",
        )
    removed = take_down(_name_of(file)) if file is not None else remove_all()
    console = Console(highlight=False)
    for lab in removed:
        console.print(
            f"removed lab {lab}" if file is None else f"removed lab {file} ({lab})", soft_wrap=True
        )
    if not removed:
        _check_known(file)
        console.print("no lab is up" if file is None else f"lab {file} is not up", soft_wrap=True)


def _run_on_several(lab: Lab, job: NodeJob) -> int:
    """Run a job and print each line with its node's name before it. Returns the exit code."""
    from echelon.cluster.lab.execute import run_job

    consoles = {"stdout": Console(highlight=False), "stderr": Console(highlight=False, stderr=True)}
    width = max(len(name) for name in job.nodes)

    def show(name: str, stream: str, line: str) -> None:
        consoles[stream].out(f"{name:{width}} | {line}", highlight=False)

    outcome = run_job(lab, job, show)
    if outcome.node:
        others = "" if job.keep_going else "; the command was ended on the other nodes"
        consoles["stderr"].out(
            f"{outcome.node} ended with exit code {outcome.code}{others}", highlight=False
        )
    return outcome.code


def _name_of(text: str) -> str:
    """The name of the lab that a path, a name or an id means."""
    from echelon.cluster.lab.spec import read_lab

    return read_lab(text).name if Path(text).is_file() or text.endswith(".toml") else text


def _check_known(text: str | None) -> None:
    """Accept a lab that is not up; refuse a name that no lab has."""
    from echelon.cluster.lab.lab import Lab
    from echelon.cluster.lab.spec import shipped_labs

    if text is not None and not Path(text).is_file() and text not in shipped_labs():
        raise UnknownName("lab", text, {*shipped_labs(), *(lab.name for lab in Lab.all())})


def _variables(given: list[str]) -> dict[str, str]:
    variables = {}
    for text in given:
        key, equals, value = text.partition("=")
        if not key or not equals:
            raise ConfigError(f"{text!r} is not KEY=VALUE", where="--env", fix="write --env KEY=VALUE")
        variables[key] = value
    return variables


def _nodes_table(lab: Lab) -> Table:
    from echelon.cluster.lab.spec import show_rate
    from echelon.config.units import show_seconds

    columns = ["node", "site", "cpu", "link", "latency", "jitter", "loss", "address"]
    nodes = lab.spec.nodes
    absent = {
        "latency": not lab.spec.wants_latency,
        "jitter": not any(node.jitter_s for node in nodes),
        "loss": not any(node.loss for node in nodes),
    }
    columns = [column for column in columns if not absent.get(column)]
    table = Table(*columns, box=None, pad_edge=False)
    for node, seat in zip(lab.spec.nodes, lab.seats, strict=True):
        cells = {
            "node": seat.node,
            "site": seat.site,
            "cpu": _cpu(seat.speed),
            "link": show_rate(node.link_bytes_per_s),
            "latency": _latency(node.latency_s, lab),
            "jitter": show_seconds(node.jitter_s) if node.jitter_s else "none",
            "loss": f"{100 * node.loss:g} %" if node.loss else "none",
            "address": seat.address,
        }
        table.add_row(*(cells[column] for column in columns))
    return table


def _uplink_lines(lab: Lab) -> list[str]:
    from echelon.cluster.lab.spec import show_rate
    from echelon.config.units import show_seconds

    return [
        f"uplink {uplink.name}: {show_rate(uplink.rate_bytes_per_s)}"
        + (f", latency {_latency(uplink.latency_s, lab)}" if uplink.latency_s else "")
        + (f", jitter {show_seconds(uplink.jitter_s)}" if uplink.jitter_s else "")
        + (f", loss {100 * uplink.loss:g} %" if uplink.loss else "")
        for uplink in lab.spec.uplinks
    ]


def _status_table(lab: Lab) -> Table:
    table = Table("node", "site", "cpu", "address", "processes", box=None, pad_edge=False)
    for node in lab.status():
        processes = Text("\n".join(f"{pid} {command[:100]}" for pid, command in node.processes.items()))
        table.add_row(node.seat.node, node.seat.site, _cpu_now(node), node.seat.address, processes)
    return table


def _headline(lab: Lab) -> str:
    since = time.strftime("%H:%M:%S", time.localtime(lab.state.created))
    if lab.state.kept:
        whose = "stays until `echelon lab down`"
    elif lab.in_use:
        whose = f"of run {lab.state.run_id}, process {lab.state.maker_pid}"
    else:
        whose = f"left behind by run {lab.state.run_id}; remove it with: echelon lab down {lab.id}"
    return f"lab {lab.name} ({lab.id}), up since {since}, {whose}"


def _cpu(cores: float | None) -> str:
    return "unlimited" if cores is None else f"{cores:.3g}"


def _cpu_now(node: NodeStatus) -> str:
    """The limit now; also that of the file, if it is not in force."""
    if node.cpu is None and node.seat.speed is not None:
        return f"unlimited; {_cpu(node.seat.speed)} later"
    return _cpu(node.cpu)


def _latency(seconds: float, lab: Lab) -> str:
    from echelon.config.units import show_seconds

    if not seconds:
        return "none"
    return show_seconds(seconds) if lab.latency_emulated else f"{show_seconds(seconds)}, not emulated"
