"""`echelon doctor`: checks whether machines are ready for training, and says how to fix problems."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.text import Text

from echelon.cluster.checkup.finding import Finding
from echelon.errors import ConfigError

_COLOURS = {"ok": "green", "note": "yellow", "problem": "bold red"}


def doctor(
    peer: Annotated[
        str | None,
        typer.Option(
            metavar="HOST",
            help="Another machine that will take part: find the network interface that leads there.",
        ),
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(min=1, max=65535, metavar="PORT", help="Check that workers can use this port."),
    ] = None,
    hosts: Annotated[
        str | None,
        typer.Option(
            metavar="HOSTS", help="Check these machines, and all pairs of them: a:2,b:4, or a file."
        ),
    ] = None,
    on: Annotated[
        str | None,
        typer.Option(metavar="LAUNCHER", help="What starts processes there. Default: ssh."),
    ] = None,
    timeout_s: Annotated[
        float, typer.Option(min=1, metavar="SECONDS", help="How long to wait for a machine to answer.")
    ] = 30.0,
    json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Check whether this machine is ready for training, and say how to fix problems.

    With --hosts: whether a run on those machines will work. Each is asked for versions, cores, memory
    and clock, and each tries to connect to each other one.

    Examples:
      echelon doctor
      echelon doctor --peer other-machine --port 29500
      echelon doctor --hosts a:2,b:4
    """
    if hosts is not None or on not in (None, "local"):
        if peer is not None:
            raise ConfigError("--peer is for this machine alone", where="--peer", fix="leave it out")
        _check_machines("ssh" if on in (None, "local") else on, hosts, port, timeout_s, json)
        return
    # Imported here, so that `echelon --help` does not load them.
    from echelon.cluster.checkup.data import data_sets
    from echelon.cluster.checkup.emulation import emulation
    from echelon.cluster.checkup.hardware import hardware
    from echelon.cluster.checkup.installed import versions
    from echelon.cluster.checkup.network import network, ports
    from echelon.cluster.interfaces import interfaces
    from echelon.cluster.machine import describe_machine

    machine = describe_machine()
    findings = [
        *versions(),
        *hardware(machine),
        *network(peer),
        *ports(port),
        *emulation(),
        *data_sets(),
    ]
    problems = [finding for finding in findings if finding.level == "problem"]
    if json:
        answer = {
            "ready": not problems,
            "findings": findings,
            "machine": machine,
            "interfaces": interfaces(),
        }
        typer.echo(msgspec.json.format(msgspec.json.encode(answer), indent=2).decode())
    else:
        _print(findings)
    if problems:
        raise typer.Exit(1)


def _check_machines(on: str, hosts: str | None, port: int | None, timeout_s: float, json: bool) -> None:
    from echelon.start.doctor import MachinesAsked, check_machines
    from echelon.start.hosts import read_hosts

    named = read_hosts(hosts) if hosts else []
    asked = MachinesAsked(on=on, hosts=named, port=port or 0, timeout_s=timeout_s)
    errors = Console(stderr=True, highlight=False)
    count = f"{_count(len(named), 'machine')}" if named else f"the machines of {on}"
    errors.print(Text(f"checking {count}, for at most {asked.bound_s:g} s"), soft_wrap=True)
    with errors.status("") as status:

        def say(text: str) -> None:
            if errors.is_terminal:
                status.update(Text(text))
            else:
                errors.print(Text(text), soft_wrap=True)

        checked = check_machines(asked, say)
    problems = any(finding.level == "problem" for finding in checked.findings)
    if json:
        answer = {
            "ready": not problems,
            "findings": checked.findings,
            "machines": {
                node: {"introduction": said, "description": checked.descriptions.get(node)}
                for node, said in checked.introductions.items()
            },
            "attempts": checked.attempts,
        }
        typer.echo(msgspec.json.format(msgspec.json.encode(answer), indent=2).decode())
    else:
        _print(checked.findings, topics=True)
    if problems:
        raise typer.Exit(1)


def _print(findings: list[Finding], *, topics: bool = False) -> None:
    console = Console(highlight=False)
    for line in (*_lines(findings, console.width), *_verdict(findings, console.width, topics=topics)):
        console.print(line, soft_wrap=True)


def _lines(findings: list[Finding], width: int) -> Iterator[Text]:
    """One line per finding, under the title of its topic; a note's remedy is on the line below."""
    indent = 2 + 9 + max(len(finding.subject) for finding in findings) + 2
    topic = ""
    for finding in findings:
        if finding.topic != topic:
            topic = finding.topic
            yield Text(topic, style="bold")
        said = _wrapped(finding.text, width - indent)
        if finding.level == "note" and finding.fix:
            said += _wrapped(f"fix: {finding.fix}", width - indent)
        yield Text.assemble(
            "  ",
            (f"{finding.level:9}", _COLOURS[finding.level]),
            f"{finding.subject:{indent - 11}}",
            ("\n" + " " * indent).join(said),
        )


def _verdict(findings: list[Finding], width: int, *, topics: bool) -> Iterator[Text]:
    """The problems with their remedies, or that there are none; with `topics`, each says which machine."""
    problems = [finding for finding in findings if finding.level == "problem"]
    notes = sum(finding.level == "note" for finding in findings)
    said = f", {_count(notes, 'note')}" if notes else ""
    if not problems:
        yield Text(f"\nready{said}", style="bold green")
        return
    yield Text(f"\n{_count(len(problems), 'problem')}{said}", style=_COLOURS["problem"])
    for finding in problems:
        name = (
            f"{finding.topic}, {finding.subject}"
            if topics and finding.topic != "connections"
            else finding.subject
        )
        what = _wrapped(f"{name}: {finding.text}", width - 4)
        fix = _wrapped(f"fix: {finding.fix}", width - 4)
        yield Text("  " + "\n    ".join(what + fix))


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, max(width, 20), break_on_hyphens=False)


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"
