"""Runs ip, tc and bridge, and reports their errors.

Many small commands go through one process (`-batch`). A command runs in its own session, so that Ctrl-C in
the terminal reaches Echelon, which cleans up, and does not interrupt the command.

CommandPipes keeps a process per namespace, which reads its commands from a pipe: for changes that come many
times a second.
"""

from __future__ import annotations

import logging
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from typing import IO

from echelon.errors import LabError

_DEADLINE_S = 30.0
_log = logging.getLogger(__name__)
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


class CommandPipes:
    """Processes of ip, tc and bridge that carry out commands as they come, in order within a namespace.

    A command that fails is logged when they are closed, and does not end the others.
    """

    def __init__(self) -> None:
        self._open: dict[tuple[str, str], subprocess.Popen[str]] = {}
        self._said: IO[str] = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed by `close`

    def send(self, tool_name: str, lines: Sequence[str], *, doing: str, namespace: str) -> None:
        """Have commands carried out in a namespace; returns at once."""
        process = self._open.get((tool_name, namespace))
        if process is None:
            process = self._open[tool_name, namespace] = self._start(tool_name, namespace, doing)
        assert process.stdin is not None
        try:
            process.stdin.write("\n".join(lines) + "\n")
            process.stdin.flush()
        except OSError as error:
            raise LabError(f"cannot {doing}: {tool_name} has ended", where=namespace) from error

    def _start(self, tool_name: str, namespace: str, doing: str) -> subprocess.Popen[str]:
        path = tool(tool_name)
        if path is None:
            raise LabError(f"cannot {doing}: {tool_name} is not installed", fix=f"install {tool_name}")
        return subprocess.Popen(
            [path, "-n", namespace, "-force", "-batch", "-"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=self._said,
            text=True,
            start_new_session=True,
        )

    def close(self) -> None:
        """Wait until all commands have been carried out, and end the processes."""
        for process in self._open.values():
            assert process.stdin is not None
            try:
                process.stdin.close()
                process.wait(_DEADLINE_S)
            except (OSError, subprocess.TimeoutExpired):
                process.kill()
                process.wait()
        self._open.clear()
        with self._said as said:
            said.seek(0)
            problems = said.read().splitlines()
        if problems:
            _log.warning("some changes of the lab's links failed: %s", problems[0])


def _which(argv: Sequence[str], stdin: str, stderr: str) -> str:
    """The command that failed: in a batch, the failing line."""
    match = re.search(r"Command failed -:(\d+)", stderr)
    lines = stdin.splitlines()
    if match and 0 < int(match.group(1)) <= len(lines):
        return f"{argv[0]} {lines[int(match.group(1)) - 1]}"
    return " ".join(argv)
