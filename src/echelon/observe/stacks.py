"""Where is a worker's main thread now? Asked by a signal, which works also while the worker computes in C.

A worker that finds the run's `ready/` has faulthandler write its stack into a file there when the signal
comes. The launcher, on the same machine, sends the signal and reads the file.
"""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from itertools import takewhile
from pathlib import Path

from echelon.observe.run_folder import RunFolder

_ANSWER_S = 0.3
_POLL_S = 0.01
_MOST_FRAMES = 4
_FRAME = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)')
_NOT_THE_SCRIPT = ("<frozen runpy>", "<frozen importlib._bootstrap>")
_OWN = ("start/worker.py", "start/template.py", "start/call.py")
_PACKAGE = f"{Path(__file__).resolve().parents[1]}{os.sep}"
_TORCH = f"{os.sep}torch{os.sep}"
_STATES = {"T": "stopped by a signal (SIGCONT lets it go on)", "t": "stopped by a debugger"}


def _signal() -> int:
    return signal.SIGRTMAX - 1 if hasattr(signal, "SIGRTMAX") else 0


def _file_of(folder: RunFolder, rank: int) -> Path:
    return folder.ready / f"{rank}.stack"


def answer(environment: Mapping[str, str] = os.environ) -> None:
    """Have this worker write its stack when it is asked to. Never fails: training goes on."""
    run, rank = environment.get("ECHELON_RUN"), environment.get("RANK")
    if run and rank and _signal():
        with suppress(OSError, ValueError, RuntimeError):
            # The descriptor stays open as long as the process: faulthandler writes to it.
            fd = os.open(
                _file_of(RunFolder(Path(run)), int(rank)),
                os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC,
                0o666,
            )
            # When Python ends, faulthandler puts this back: the signal must not kill a worker that ends.
            signal.signal(_signal(), signal.SIG_IGN)
            faulthandler.register(_signal(), fd, all_threads=False)


def ask(folder: RunFolder, rank: int, pid: int) -> str:
    """Where a worker is: `at train.py:23 in load, called from ...`; empty if it does not say."""
    state = _state(pid)
    if state in _STATES:
        return _STATES[state]
    file = _file_of(folder, rank)
    try:
        before = file.stat().st_size  # it is there, so the worker is ready for the signal
        os.kill(pid, _signal())
        until = time.monotonic() + _ANSWER_S
        while time.monotonic() < until:
            time.sleep(_POLL_S)
            if file.stat().st_size > before:
                time.sleep(_POLL_S)  # it writes line by line
                found = described(file.read_bytes()[before:].decode(errors="replace"))
                return f"at {found}" if found else ""
    except OSError:
        return ""
    return ""


def described(dump: str) -> str:
    """The innermost frames of a stack that faulthandler wrote, without the script's starters. Pure.

    If Echelon was called, the frames are those of the script that called it.
    """
    frames = [match.groupdict() for line in dump.splitlines() if (match := _FRAME.fullmatch(line))]
    kept = [
        frame
        for frame in frames
        if frame["file"] not in _NOT_THE_SCRIPT and not frame["file"].endswith(_OWN)
    ]
    inner = list(takewhile(lambda frame: _is_ours(frame["file"]) or _TORCH in frame["file"], kept))
    outer = kept[len(inner) :]
    inside = bool(outer) and any(_is_ours(frame["file"]) for frame in inner)
    shown = [
        f"{Path(frame['file']).name}:{frame['line']} in {frame['function']}"
        for frame in (outer if inside else kept)
    ]
    if inside:
        shown[0] += ", in a call of Echelon"
    more = ", ..." if len(shown) > _MOST_FRAMES else ""
    return ", called from ".join(shown[:_MOST_FRAMES]) + more


def _is_ours(file: str) -> bool:
    return file.startswith(_PACKAGE)


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""
