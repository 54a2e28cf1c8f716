"""`echelon adapt`: says which lines of a training script to change and why, and changes them."""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from rich.console import Console
from rich.text import Text

if TYPE_CHECKING:
    from echelon.adapt.adapt import Adapted
    from echelon.adapt.finding import ScriptFinding

_COLOURS = {"change": "green", "check": "bold red", "note": "yellow"}
_LINES = {"+": "green", "-": "red", "@": "cyan"}


def adapt(
    script: Annotated[Path, typer.Argument(metavar="SCRIPT", help="The training script.")],
    write: Annotated[bool, typer.Option("--write", help="Change the script; no copy is kept.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print findings and diff as JSON.")] = False,
) -> None:
    """Say which lines of a training script to change for several workers, and why.

    The script is read, never run. Scripts without any library, with
    DistributedDataParallel, with accelerate and with Lightning Fabric are
    known. The diff goes to standard output, the reasons to standard error.
    Each finding is a change that the diff makes, something to check by hand,
    or a note.

    Exit codes: 0 if the diff is all, or nothing has to change; 1 if something
    has to be checked by hand; 2 if the file is not a script that can be read.

    Examples:
      echelon adapt train.py
      echelon adapt train.py --write
      echelon adapt train.py > train.patch
      echelon adapt train.py --json
    """
    # Imported here, so that `echelon --help` does not load them.
    from echelon.adapt.adapt import adapt as adapted
    from echelon.adapt.files import read_script, write_script
    from echelon.adapt.patch import unified

    text = read_script(script)
    result = adapted(text, where=str(script))
    mark = "\ufeff" * text.mark
    diff = unified(mark + text.text, mark + result.text, _patch_name(script))
    if write and result.changed:
        write_script(script, text, result.text)
    if json:
        typer.echo(msgspec.json.format(msgspec.json.encode(_answer(script, result, diff, write))))
    else:
        console = Console(stderr=True, highlight=False)
        for line in _explained(script, result.findings, console.width):
            console.print(line, soft_wrap=True)
        if not write:
            _show(diff, text.encoding)
        console.print(_verdict(result, write), soft_wrap=True)
    if result.needs_a_person:
        raise typer.Exit(1)


def _patch_name(script: Path) -> str:
    """The script's name in the patch: from here if it is below, else to be applied in its own folder."""
    relative = os.path.relpath(script)
    return script.name if relative.startswith("..") else Path(relative).as_posix()


def _answer(script: Path, result: Adapted, diff: str, write: bool) -> dict[str, object]:
    findings = [
        {name: getattr(one, name) for name in ("line", "rule", "level", "what", "why", "fix")}
        for one in result.findings
    ]
    return {
        "script": str(script),
        "findings": findings,
        "needs_a_person": result.needs_a_person,
        "written": write and result.changed,
        "diff": diff,
    }


def _explained(script: Path, findings: tuple[ScriptFinding, ...], width: int) -> Iterator[Text]:
    """Each finding with its line; what, why and the fix below each other."""
    for finding in findings:
        place = f"{script}:{finding.line}: "
        level = (finding.level, _COLOURS[finding.level])
        yield Text.assemble(place, level, f" ({finding.rule})")
        said = [finding.what, f"why: {finding.why}", f"fix: {finding.fix}" if finding.fix else ""]
        for line in (part for one in said for part in _wrapped(one, width - 4)):
            yield Text(f"    {line}")


def _wrapped(text: str, width: int) -> list[str]:
    wrap = {"break_on_hyphens": False, "break_long_words": False}
    return textwrap.wrap(text, max(width, 20), subsequent_indent="     ", **wrap)  # type: ignore[arg-type]


def _show(diff: str, encoding: str) -> None:
    """The diff: as it is for a file or a program, in colours for a terminal."""
    if not sys.stdout.isatty():
        typer.echo(diff.encode(encoding), nl=False)
        return
    console = Console(highlight=False)
    for line in diff.splitlines():
        console.print(Text(line, style=_LINES.get(line[:1], "")), soft_wrap=True)


def _verdict(result: Adapted, write: bool) -> Text:
    counts = {level: sum(one.level == level for one in result.findings) for level in _COLOURS}
    parts = [
        f"{counts['change']} change{'' if counts['change'] == 1 else 's'}",
        f"{counts['check']} to check by hand",
        f"{counts['note']} note{'' if counts['note'] == 1 else 's'}",
    ]
    end = "nothing to change"
    if result.changed:
        end = "written" if write else "nothing is written yet: --write makes the changes"
    return Text(f"{', '.join(parts)}; {end}", style="bold")
