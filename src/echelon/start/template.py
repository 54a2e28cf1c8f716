"""The template process: imports torch once, then forks the workers.

    python -m echelon.start.template REQUESTS REPORTS script.py args...

REQUESTS and REPORTS are file descriptors; the words after them are only there to be seen in `ps`.
Importing torch takes seconds. Four workers that import it at once on two cores take four times as long as
one. A forked worker has it at once.

Only the main thread may exist when a process forks, and a library that has started its threads does not
work in the child. The template therefore only imports; it computes nothing. If a thread or CUDA is running
all the same, it forks nothing, and the launcher starts the workers by exec.

Reports are lines: `started RANK PID` from a worker that was forked, `ended RANK CODE` when it has ended,
`refused RANK` for one that was not forked. If the template ends, it has refused all others.
"""

from __future__ import annotations

import ast
import gc
import os
import sys
import threading
import warnings
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

import msgspec

from echelon.start.worker import die_with_parent, run_program

# torch._dynamo: torch imports it when the first optimizer is made, which takes as long as torch itself.
_MODULES = ("torch", "torch._dynamo", "echelon.train.join")
# Imported too if the script imports them at its top level: they take long and start no threads.
_LIBRARIES = frozenset({"numpy", "pandas", "PIL", "scipy", "sklearn", "torchvision"})


class ForkRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One worker to fork. Bytes, because a variable or an argument need not be valid text."""

    rank: int
    program: list[bytes]
    env: dict[bytes, bytes]
    log: bytes
    stdin_fd: int


def main() -> None:
    """Fork what REQUESTS asks for and report; in a forked worker, run its program."""
    die_with_parent(int(os.environ["ECHELON_LAUNCHER"]))
    requests_fd, reports_fd = int(sys.argv[1]), int(sys.argv[2])
    with open(requests_fd, "rb") as file:
        requests = msgspec.msgpack.decode(file.read(), type=list[ForkRequest])
    if not (_preload([*_MODULES, *imported_libraries(requests)]) and _may_fork()):
        return
    request = _fork_all(requests, reports_fd)
    run_program([os.fsdecode(word) for word in request.program])


def _preload(modules: Sequence[str]) -> bool:
    """Import what workers need. If that fails, the workers will report it: each by itself."""
    try:
        for name in modules:
            import_module(name)
    except (ImportError, OSError, RuntimeError):
        return False
    # Frozen objects are neither copied nor visited by the workers' garbage collections: a worker ends
    # in a fraction of the time.
    gc.collect()
    gc.freeze()
    return True


def imported_libraries(requests: Sequence[ForkRequest]) -> list[str]:
    """The slow libraries that the workers' scripts import at their top level, by full module name."""
    found: dict[str, None] = {}
    for script in {request.program[0] for request in requests}:
        try:
            tree = ast.parse(Path(os.fsdecode(script)).read_bytes())
        except (OSError, SyntaxError, ValueError):
            continue  # a module, or a script that fails: the worker says why
        for node in tree.body:
            if isinstance(node, ast.Import):
                found |= dict.fromkeys(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                found[node.module] = None
    return [name for name in found if name.partition(".")[0] in _LIBRARIES]


def _may_fork() -> bool:
    import torch

    return threading.active_count() == 1 and not torch.cuda.is_initialized()


def _fork_all(requests: Sequence[ForkRequest], reports_fd: int) -> ForkRequest:
    """Fork a worker per request and report each one's end. Returns only in a worker: its request."""
    template = os.getpid()
    ranks = {}
    for request in requests:
        try:
            pid = _fork()
        except OSError:  # no memory, or too many processes; exec may fail too, and says why
            _report(reports_fd, f"refused {request.rank}")
            continue
        if pid == 0:
            die_with_parent(template)
            os.setsid()
            # The worker reports this, not the template: the launcher must know it before the script runs.
            _report(reports_fd, f"started {request.rank} {os.getpid()}")
            os.close(reports_fd)
            _become_worker(request)
            for fd in {request.stdin_fd for request in requests}:
                os.close(fd)
            return request
        ranks[pid] = request.rank
    while ranks:
        pid, status = os.wait()
        _report(reports_fd, f"ended {ranks.pop(pid)} {os.waitstatus_to_exitcode(status)}")
    os._exit(0)


def _fork() -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # OpenBLAS ends its threads before a fork
        return os.fork()


def _become_worker(request: ForkRequest) -> None:
    """Give this process the input, log, variables, random numbers and threads that an exec gives it."""
    os.dup2(request.stdin_fd, 0)
    log = os.open(request.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    os.environ.clear()
    os.environ.update({os.fsdecode(key): os.fsdecode(value) for key, value in request.env.items()})
    # Without new seeds all workers would draw the same numbers. Python's `random` seeds itself.
    import torch

    torch.default_generator.seed()
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))  # OpenMP has read the variable already


def _report(reports_fd: int, line: str) -> None:
    os.write(reports_fd, line.encode() + b"\n")


if __name__ == "__main__":
    main()
