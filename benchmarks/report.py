"""Runs the benchmarks and writes their figures into docs/benchmarks.md, with machine, date and commit.

    python benchmarks/report.py [--quick] [--only allreduce,step] [--dry]

benchmarks/rows.toml says what the rows are. Figures are kept in docs/benchmarks.json, so that a run of some
scripts leaves the figures of the others as they are. A row whose needs are missing (root for labs, a data
set) stays as it was, and a message says so. With --dry nothing is measured: the page is written anew from
the figures that are kept. Run it on an idle machine.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shlex
import subprocess
import sys
import time
import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "benchmarks.md"
FIGURES = ROOT / "docs" / "benchmarks.json"
BEGIN = "<!-- figures: begin, written by benchmarks/report.py -->"
END = "<!-- figures: end -->"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row of the table; benchmarks/rows.toml says what the fields mean."""

    what: str
    command: str
    target: str
    found: str
    unit: str = ""
    note: str = ""
    quick: str = "--quick"
    root: bool = False
    data: str = ""


def rows() -> list[Row]:
    """What is measured, from benchmarks/rows.toml."""
    text = Path(__file__).with_name("rows.toml").read_text(encoding="utf-8")
    return [Row(**row) for row in tomllib.loads(text)["row"]]


def main() -> None:
    """Measure what can be measured here, keep it, and write the page."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    options.add_argument("--quick", action="store_true", help="fewer repeats: figures to try this with")
    options.add_argument("--only", default="", help="scripts, with commas: allreduce,step")
    options.add_argument("--dry", action="store_true", help="measure nothing, write the page anew")
    asked = options.parse_args()
    figures = json.loads(FIGURES.read_text(encoding="utf-8"))
    if not asked.dry:
        printed: dict[str, str] = {}
        for row in rows():
            script = row.command.partition(".py")[0]
            if asked.only and script not in asked.only.split(","):
                continue
            missing = _missing(row)
            if missing:
                print(f"{row.command}: left as it was, {missing}", file=sys.stderr)
                continue
            command = f"{row.command} {row.quick}" if asked.quick else row.command
            if command not in printed:
                print(command, file=sys.stderr, flush=True)
                printed[command] = _run(command)
            found = found_in(row, printed[command])
            if found:
                figures[row.what] = {"found": found, "command": command, **_circumstances()}
            else:
                print(f"{command}: nothing found for: {row.what}", file=sys.stderr)
        FIGURES.write_text(json.dumps(figures, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    PAGE.write_text(with_figures(PAGE.read_text(encoding="utf-8"), table(figures)), encoding="utf-8")
    print(PAGE)


def found_in(row: Row, printed: str) -> str:
    """The figures of a row, in what its command printed; empty if there are none."""
    matches = [
        " ".join(match.groups()) for line in printed.split("\n") if (match := re.search(row.found, line))
    ]
    return ", ".join(matches) + row.unit if matches else ""


def table(figures: dict[str, dict[str, str]]) -> str:
    """The figures as Markdown."""
    lines = ["| what | command | target | found | measured |", "|---|---|---|---|---|"]
    notes, machines = [], []
    for row in rows():
        figure = figures.get(row.what, {"found": "not measured yet", "command": row.command})
        when = f"{figure['date']}, `{figure['commit']}`" if "date" in figure else ""
        command = f"`{figure['command']}`" + (" (root)" if row.root else "")
        lines.append(f"| {row.what} | {command} | {row.target} | {figure['found']} | {when} |")
        if row.note:
            notes.append(f"- **{row.what}**: {row.note}")
        if figure.get("machine") and figure["machine"] not in machines:
            machines.append(figure["machine"])
    measured_on = "Measured on: " + "; ".join(machines) + "." if machines else ""
    return "\n".join([*lines, "", measured_on, "", "### Notes", "", *notes])


def with_figures(page: str, text: str) -> str:
    """The page with its figures replaced."""
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}\n\n{text}\n\n{END}{rest.split(END)[1]}"


def _missing(row: Row) -> str:
    if row.root and os.geteuid() != 0:
        return "the lab needs root"
    if row.data and not list(Path(os.environ.get("ECHELON_DATA", "/nowhere")).glob(f"{row.data}*")):
        return f"set ECHELON_DATA to a folder with {row.data}"
    return ""


def _run(command: str) -> str:
    words = [sys.executable, *shlex.split(f"benchmarks/{command}")]
    ended = subprocess.run(words, cwd=ROOT, stdout=subprocess.PIPE, check=False)
    return ended.stdout.decode(errors="replace")


def _circumstances() -> dict[str, str]:
    import torch

    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, check=False
    )
    cores = len(os.sched_getaffinity(0))
    machine = (
        f"{_processor()}, {cores} cores, {platform.system()}, torch {torch.__version__.partition('+')[0]}"
    )
    date = time.strftime("%Y-%m-%d", time.gmtime())
    return {"date": date, "commit": commit.stdout.decode().strip() or "unknown", "machine": machine}


def _processor() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        text = ""
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.M)
    return found.group(1) if found else platform.machine()


if __name__ == "__main__":
    main()
