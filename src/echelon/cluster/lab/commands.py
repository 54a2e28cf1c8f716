"""Runs ip, tc and bridge, and reports their errors.

Many small commands go through one process (`-batch`). A command runs in its own session, so that Ctrl-C in
the terminal reaches Echelon, which cleans up, and does not interrupt the command.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Sequence

from echelon.errors import LabError

_DEADLINE_S = 30.0
# The tools are in sbin, which is not on every user's PATH.
_SBIN = "/usr/local/sbin:/usr/sbin:/sbin:/usr/bin:/bin"


def tool(name: str) -> str | None:
    """The path of a command, if it is installed."""
    return shutil.which(name) or shutil.which(name, path=_SBIN)


def run(argv: Sequence[str], *, doing: str, stdin: str = "") -> str:
    """Run a command and return its output; LabError says what could not be done and why."""
    path = tool(argv[0])
    if path is None:
        raise LabError(f"cannot {doing}: {argv[0]} is not installed", fix=f"install {argv[0]}")
    try:
        done = subprocess.run(
            [path, *argv[1:]],
            input=stdin,
            capture_output=True,
            text=True,
            timeout=_DEADLINE_S,
            start_new_session=True,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise LabError(f"cannot {doing}: no answer in {_DEADLINE_S:.0f} s", where=" ".join(argv)) from None
    if done.returncode != 0:
        said = done.stderr.strip().splitlines()
        reason = said[0] if said else f"exit code {done.returncode}"
        raise LabError(f"cannot {doing}: {reason}", where=_which(argv, stdin, done.stderr))
    return done.stdout


def batch(tool_name: str, lines: Sequence[str], *, doing: str, namespace: str = "") -> None:
    """Run many commands of ip, tc or bridge in one process, optionally in a namespace."""
    if lines:
        inside = ["-n", namespace] if namespace else []
        run([tool_name, *inside, "-batch", "-"], stdin="\n".join(lines) + "\n", doing=doing)


def _which(argv: Sequence[str], stdin: str, stderr: str) -> str:
    """The command that failed: in a batch, the failing line."""
    match = re.search(r"Command failed -:(\d+)", stderr)
    lines = stdin.splitlines()
    if match and 0 < int(match.group(1)) <= len(lines):
        return f"{argv[0]} {lines[int(match.group(1)) - 1]}"
    return " ".join(argv)
