"""The first code that runs in a worker: run the user's script as if it had been started by itself.

    python -m echelon.start.worker script.py args...
    python -m echelon.start.worker -m package.module args...

If the script raises, the error is written to the run's `errors/` before the process ends, so that the
launcher can show it. The worker dies with its launcher, even if the launcher is killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import importlib.util
import logging
import os
import runpy
import signal
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import msgspec

from echelon.cluster.cores import take_cores
from echelon.config.allowed import allow_names_in
from echelon.errors import EchelonError
from echelon.observe import stacks
from echelon.observe.readiness import WorkerPhase, tell
from echelon.observe.run_folder import RunFolder
from echelon.start.failure import from_error
from echelon.start.log_file import survive_a_full_disk
from echelon.start.module import missing_module
from echelon.start.warn import WarningHandler
from echelon.train.user_traceback import hide_wrappers

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Run what the command line names."""
    launcher = os.environ.get("ECHELON_LAUNCHER")
    die_with_parent(int(launcher) if launcher else os.getppid())
    run_program(sys.argv[1:])


def run_program(program: Sequence[str]) -> None:
    """Run a script with its arguments, or a module: `-m`, its name, its arguments."""
    take_cores()
    survive_a_full_disk()
    faulthandler.enable()
    stacks.answer()
    _hand_on_warnings()
    sys.excepthook = _keep_error
    _allow_planned(program)
    tell(WorkerPhase.RUNNING)
    if program[0] == "-m":
        sys.argv = list(program[1:])
        _check_module(program[1])
        runpy.run_module(program[1], run_name="__main__", alter_sys=True)
        return
    script = Path(program[0])
    sys.argv = list(program)
    if not sys.flags.safe_path:
        sys.path[0] = str(script.resolve().parent)  # it was the current folder, as for any -m
    runpy.run_path(str(script), run_name="__main__")


def _check_module(name: str) -> None:
    """Say that there is no such module; what a module of that name raises is the user's to see."""
    try:
        found = importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        found = None
    if found is None:
        raise missing_module(name)


def _allow_planned(program: Sequence[str]) -> None:
    """Let this process import what its own run's plan and settings name: the launcher has checked them."""
    allow_names_in(*program)
    path = os.environ.get("ECHELON_RUN")
    folder = RunFolder(Path(path)) if path else None
    for file in (folder.plan, folder.config) if folder else ():
        with contextlib.suppress(OSError, UnicodeDecodeError):  # whoever reads the file says what is wrong
            allow_names_in(file.read_text())


def _hand_on_warnings() -> None:
    folder = os.environ.get("ECHELON_RUN")
    if folder:
        rank = int(os.environ.get("RANK", "0"))
        handler = WarningHandler(rank, RunFolder(Path(folder)).events_of(rank))
        logging.getLogger("echelon").addHandler(handler)


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent dies. Linux only.

    Elsewhere an orphan ends when its connections to the other workers break.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)  # the parent was gone before the call


def _keep_error(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Write the error to the run's folder, then print it: in this order, see `LeaderOutput`."""
    if issubclass(kind, KeyboardInterrupt):
        return
    text = _error_text(kind, error, trace)
    problem = _write_failure(error, text)
    sys.stdout.flush()
    sys.stderr.write(text + problem)
    sys.stderr.flush()


def _write_failure(error: BaseException, text: str) -> str:
    """Write the error file. Returns what to print if that is not possible."""
    folder = os.environ.get("ECHELON_RUN")
    if not folder:
        return ""
    rank = int(os.environ.get("RANK", "0"))
    failure = from_error(rank, error, text)
    path = RunFolder(Path(folder)).error_of(rank)
    try:
        path.with_suffix(".tmp").write_bytes(msgspec.json.encode(failure))
        path.with_suffix(".tmp").rename(path)
    except OSError as problem:
        return f"the error could not be written to {path}: {problem}\n"
    return ""


def _error_text(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> str:
    """The traceback of the user's code; for an EchelonError, only its message."""
    if isinstance(error, EchelonError):
        return f"{kind.__name__}: {error}\n"
    if trace is error.__traceback__:
        hide_wrappers(error)
        trace = error.__traceback__
    own = {__file__, runpy.__file__, "<frozen runpy>"}
    own |= {str(Path(__file__).with_name(name)) for name in ("template.py", "call.py")}
    while trace is not None and trace.tb_frame.f_code.co_filename in own:
        trace = trace.tb_next
    return "".join(traceback.format_exception(kind, error, trace))


if __name__ == "__main__":
    main()
