"""Worker processes that have torch imported already, lent to tests one call at a time.

    def meet(greeting):                 # at the top of a test module; runs in the workers
        dist.init_process_group("gloo")
        return f"{greeting} from {dist.get_rank()}"

    def test_workers_meet(warm_pool):
        assert warm_pool.run(2, meet, "hello") == ["hello from 0", "hello from 1"]

Each rank runs in a process of its own, with RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT set,
in a temporary folder that the ranks of one call share. A call begins with seed 0, one thread, and warnings
as errors. After it a worker is as it was before; one that is not (dead, hanging, with threads or child
processes left) is replaced. What workers print is shown when they fail.

Importing torch takes seconds of computing. One process, the template, does it, and the workers are forks of
it; it has a single thread, so that forking it is safe.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import importlib.util
import os
import pickle
import random
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import types
import warnings
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import psutil

from leaks import descendants, new_threads

_START_S = 180.0
_CLEAN_S = 60.0
_AFTER_FAILURE_S = 20.0
_STACKS_S = 20.0
_WAIT_S = 90.0
_LOG_TAIL_BYTES = 4000
_PER_CALL = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


class WorkerFailure(Exception):
    """One rank did not return. `how` is raised, died or hung; `error` is what it raised."""

    def __init__(self, rank: int, how: str, detail: str, error: BaseException | None = None) -> None:
        super().__init__(rank, how, detail, error)
        self.rank = rank
        self.how = how
        self.detail = detail
        self.error = error
        self.outcomes: list[Any] = []

    def __str__(self) -> str:
        return f"rank {self.rank} {self.how}\n{self.detail}"


class WarmPool:
    """Up to `size` warm processes, started when they are first needed."""

    def __init__(self, size: int = 4) -> None:
        self._size = size
        self._workers: list[_Worker] = []
        self._template: _Template | None = None

    def run(
        self,
        world_size: int,
        function: Callable[..., Any],
        *args: Any,
        env: Mapping[str, str] | None = None,
        timeout_s: float = 180,
    ) -> list[Any]:
        """What the function returned on each rank; raises the WorkerFailure of the first to fail.

        Once one rank has failed the others have twenty more seconds.
        """
        outcomes, failures = self._call(
            world_size, function, args, env or {}, timeout_s, after_failure_s=_AFTER_FAILURE_S
        )
        if failures:
            failures[0].outcomes = outcomes
            raise failures[0] from failures[0].error
        return outcomes

    def outcomes(
        self,
        world_size: int,
        function: Callable[..., Any],
        *args: Any,
        env: Mapping[str, str] | None = None,
        timeout_s: float = 180,
    ) -> list[Any]:
        """The outcome of each rank: the returned value, or a WorkerFailure."""
        return self._call(world_size, function, args, env or {}, timeout_s, after_failure_s=timeout_s)[0]

    def pids(self) -> set[int]:
        """The processes of the pool: the workers, and the template that they are forks of."""
        template = {self._template.pid} if self._template is not None else set()
        return {worker.process.pid for worker in self._workers} | template

    def close(self) -> None:
        """End all workers, and the template."""
        while self._workers:
            self._workers.pop().end()
        if self._template is not None:
            self._template.end()
            self._template = None

    def _call(
        self,
        world_size: int,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        env: Mapping[str, str],
        timeout_s: float,
        *,
        after_failure_s: float,
    ) -> tuple[list[Any], list[WorkerFailure]]:
        workers = self._ready(world_size)
        port = _free_port()
        with tempfile.TemporaryDirectory(prefix="echelon-warm-", ignore_cleanup_errors=True) as folder:
            calls = [_Call(rank, worker) for rank, worker in enumerate(workers)]
            try:
                for call in calls:
                    environment = {**_place(call.rank, world_size, port), **env}
                    call.send((*_address(function), pickle.dumps(args), environment, folder))
                return _collect(calls, timeout_s, after_failure_s)
            finally:
                # Whatever happened, also an interruption: only clean workers are kept.
                for call in calls:
                    if not call.clean:
                        self._workers.remove(call.worker)
                        call.worker.end()

    def _ready(self, count: int) -> list[_Worker]:
        if not 1 <= count <= self._size:
            raise ValueError(f"a pool of {self._size} has no {count} workers")
        for worker in [w for w in self._workers if w.process.poll() is not None]:
            self._workers.remove(worker)
            worker.end()
        if self._template is None:
            self._template = _Template()
        while len(self._workers) < count:
            self._workers.append(_Worker(self._template))
        workers = self._workers[:count]
        for worker in workers:
            try:
                worker.wait_ready()
            except BaseException:
                self._workers.remove(worker)
                worker.end()
                raise
        return workers


class _Template:
    """The process that workers are forked from. It reports the end of each fork in a line of text."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - end() closes it
        self._text = b""
        self._codes: dict[int, int] = {}
        environment = {k: v for k, v in os.environ.items() if k not in _PER_CALL}
        self._process = subprocess.Popen(
            [sys.executable, "-u", __file__, str(theirs.fileno()), str(os.getpid())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            env={**environment, "OMP_NUM_THREADS": "1"},
            cwd=Path(__file__).parent,
        )
        theirs.close()
        self.pid = self._process.pid

    def fork(self, pipe: int, log: int) -> int:
        """Start a worker with these files; its process number."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            socket.send_fds(self._socket, [b"f"], [pipe, log])
        deadline = time.monotonic() + _START_S
        while (pid := self._codes.pop(0, 0)) == 0:
            self._read(max(0.0, deadline - time.monotonic()))
        return pid

    def exit_code(self, pid: int, timeout_s: float) -> int | None:
        """The exit code of a fork, or None if it is still running."""
        deadline = time.monotonic() + timeout_s
        while pid not in self._codes:
            try:
                self._read(max(0.0, deadline - time.monotonic()))
            except TimeoutError:
                return None
        return self._codes[pid]

    def _read(self, timeout_s: float) -> None:
        """Read a report; raises TimeoutError if there is none."""
        self._socket.settimeout(max(timeout_s, 1e-6))
        data = self._socket.recv(4096)
        if not data:
            said = os.pread(self._log.fileno(), _LOG_TAIL_BYTES, 0).decode(errors="replace")
            raise RuntimeError(f"the template of warm workers died\n{said}")
        *lines, self._text = (self._text + data).split(b"\n")
        for line in lines:
            pid, code = line.split()
            self._codes[int(pid)] = int(code)

    def end(self) -> None:
        """End it; the workers go with it."""
        self._process.kill()
        self._process.wait()
        self._socket.close()
        self._log.close()


class _Fork:
    """A worker's process, as `subprocess.Popen` would show it."""

    def __init__(self, template: _Template, pid: int) -> None:
        self._template = template
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Its exit code, if it has ended."""
        if self.returncode is None:
            self.returncode = self._template.exit_code(self.pid, 0.0)
        return self.returncode

    def wait(self, timeout_s: float) -> int | None:
        """Its exit code, or None if it has not ended in time."""
        if self.returncode is None:
            self.returncode = self._template.exit_code(self.pid, timeout_s)
        return self.returncode

    def kill(self) -> None:
        """End it at once."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


class _Worker:
    """One process and the pipe to it. It prints into a file of its own."""

    def __init__(self, template: _Template) -> None:
        ours, theirs = socket.socketpair()
        self.log = tempfile.TemporaryFile()  # noqa: SIM115 - end() closes it
        self.pipe = Connection(ours.detach())
        try:
            self.process = _Fork(template, template.fork(theirs.fileno(), self.log.fileno()))
        except BaseException:
            self.pipe.close()
            self.log.close()
            raise
        finally:
            theirs.close()
        self._is_ready = False

    def wait_ready(self) -> None:
        """Wait until torch is imported; a warm worker is ready at once."""
        if self._is_ready:
            return
        if not self.pipe.poll(_START_S):
            raise RuntimeError(f"a warm worker was not ready after {_START_S:.0f} s\n{self.printed()}")
        try:
            self.pipe.recv_bytes()
        except EOFError:
            raise RuntimeError(f"a warm worker died at its start\n{self.printed()}") from None
        self._is_ready = True

    def printed(self, since: int = 0) -> str:
        """The last of what it printed since a position."""
        end = self.position()
        start = max(since, end - _LOG_TAIL_BYTES)
        # Not seek and read: the worker writes at the same position, which it shares with us.
        return os.pread(self.log.fileno(), end - start, start).decode(errors="replace")

    def position(self) -> int:
        """How far it has printed."""
        return os.fstat(self.log.fileno()).st_size

    def show_stacks(self) -> None:
        """Let a hanging worker print where its threads are."""
        before = self.position()
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, signal.SIGUSR1)
        deadline = time.monotonic() + _STACKS_S
        seen = -1
        while (self.position() == before or self.position() != seen) and time.monotonic() < deadline:
            seen = self.position()
            time.sleep(0.1)

    def end(self) -> None:
        """End the worker and all processes it started."""
        with contextlib.suppress(psutil.NoSuchProcess):
            children = psutil.Process(self.process.pid).children(recursive=True)
            for child in children:
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()
        self.process.kill()
        self.process.wait(_CLEAN_S)
        self.pipe.close()
        self.log.close()


class _Call:
    """A task running in one worker, and its outcome."""

    def __init__(self, rank: int, worker: _Worker) -> None:
        self.rank = rank
        self.worker = worker
        self.outcome: Any = None
        self.failure: WorkerFailure | None = None
        self.finished = False
        self.clean = False
        self._since = worker.position()

    def send(self, message: object) -> None:
        """Tell the worker; that it died instead shows when its answer is received."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.worker.pipe.send_bytes(pickle.dumps(message))

    def receive(self) -> None:
        """Take the outcome that arrived."""
        try:
            how, text, data = pickle.loads(self.worker.pipe.recv_bytes())
        except (EOFError, ConnectionResetError):
            self._fail("died", f"{_exit_text(self.worker.process)}\n{self._printed()}")
            return
        self.finished = True
        try:
            value = pickle.loads(data) if data else None
        except Exception as error:  # noqa: BLE001 - any class may refuse to be rebuilt here
            value, text, how = None, f"{text}what it {how} cannot be unpickled: {error!r}\n", "raised"
        if how == "returned":
            self.outcome = value
        else:
            self._fail("raised", f"{text}{self._printed()}", value)

    def finish(self, limit: float) -> None:
        """All ranks are done: let the worker clean up, and hear whether it could."""
        if self.failure is not None and self.failure.how != "raised":
            return
        self.send("clean up")
        with contextlib.suppress(EOFError, ConnectionResetError):
            if self.worker.pipe.poll(max(0.0, limit - time.monotonic())):
                self.clean = pickle.loads(self.worker.pipe.recv_bytes())

    def hang(self) -> None:
        """Give up on it."""
        self.worker.show_stacks()
        self._fail("hung", f"it did not return in time\n{self._printed()}")

    def _fail(self, how: str, detail: str, error: BaseException | None = None) -> None:
        self.finished = True
        self.failure = WorkerFailure(self.rank, how, detail.rstrip(), error)
        self.outcome = self.failure

    def _printed(self) -> str:
        text = self.worker.printed(self._since)
        return f"--- it printed:\n{text}" if text else ""


def _collect(
    calls: list[_Call], timeout_s: float, after_failure_s: float
) -> tuple[list[Any], list[WorkerFailure]]:
    """Wait for all outcomes, then for all workers to be clean. Failures in the order they came in."""
    failures: list[WorkerFailure] = []
    deadline = time.monotonic() + timeout_s
    while open_calls := [call for call in calls if not call.finished]:
        arrived = wait([call.worker.pipe for call in open_calls], max(0.0, deadline - time.monotonic()))
        for call in open_calls:
            if call.worker.pipe in arrived:
                call.receive()
            elif not arrived:
                call.hang()
            if call.failure is not None:
                failures.append(call.failure)
                deadline = min(deadline, time.monotonic() + after_failure_s)
    limit = time.monotonic() + _CLEAN_S
    for call in calls:
        call.finish(limit)
    return [call.outcome for call in calls], failures


def _exit_text(process: _Fork) -> str:
    code = process.wait(_CLEAN_S)
    if code is None:
        return "it closed its pipe"
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def _address(function: Callable[..., Any]) -> tuple[str, str, str]:
    """File, module and qualified name, by which the worker finds the function again."""
    if "<" in function.__qualname__:
        raise ValueError(f"{function.__qualname__} must stand at the top of its module to run in a worker")
    return str(Path(function.__code__.co_filename).resolve()), function.__module__, function.__qualname__


def _place(rank: int, world_size: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(rank),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# The worker's side


def wait_for(count: int, what: str = "here") -> None:
    """In a worker: wait until so many ranks have called this, whether or not their session works.

    A rank that left earlier would be an error of its own to those who are not as far.
    """
    Path(f"{what}-{os.environ['RANK']}").touch()
    deadline = time.monotonic() + _WAIT_S
    while len(list(Path.cwd().glob(f"{what}-*"))) < count:
        assert time.monotonic() < deadline, f"waited {_WAIT_S:.0f} s for {count} ranks"
        time.sleep(0.01)


def _fork_on_demand(handle: int, parent: int) -> None:
    """The template: import what takes long, then fork a worker for each byte that arrives."""
    _die_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the test session, which ends its workers
    import torch._dynamo  # noqa: F401 - the first optimizer would import it

    with contextlib.suppress(ImportError):
        import echelon

        assert echelon.join  # with what it needs
    gc.freeze()  # what is there by now need not be searched for garbage after each call
    session = socket.socket(fileno=handle)
    waiting = selectors.DefaultSelector()
    waiting.register(session, selectors.EVENT_READ)
    while True:
        for key, _ in waiting.select():
            if key.fileobj is session:
                data, files, _, _ = socket.recv_fds(session, 1, 2)
                if not data:
                    return
                me = os.getpid()
                pid = os.fork()
                if pid == 0:
                    session.close()
                    waiting.close()
                    _become_worker(*files, me)
                waiting.register(os.pidfd_open(pid), selectors.EVENT_READ, pid)
                for file in files:
                    os.close(file)
                session.sendall(b"0 %d\n" % pid)
            else:
                _, status = os.waitpid(key.data, 0)
                waiting.unregister(key.fileobj)
                os.close(key.fd)
                session.sendall(b"%d %d\n" % (key.data, os.waitstatus_to_exitcode(status)))


def _become_worker(pipe: int, log: int, parent: int) -> None:
    for standard in (1, 2):
        os.dup2(log, standard)
    os.close(log)
    try:
        _serve(pipe, parent)
    finally:
        os._exit(0)


def _serve(handle: int, parent: int) -> None:
    _die_with(parent)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    pipe = Connection(handle)
    import torch

    torch.set_num_threads(1)
    torch.set_num_interop_threads(1)
    pipe.send_bytes(b"ready")
    with contextlib.suppress(EOFError, ConnectionResetError):  # the test session has ended
        while True:
            task = pickle.loads(pipe.recv_bytes())
            before = _Before()
            outcome = _perform(*task)
            # A rank that raised lets go at once, as a process that ends would. One that returned stays
            # until all are done, for it may hold the store through which the others still talk.
            pipe.send_bytes(pickle.dumps(outcome))
            clean = before.restore() if outcome[0] == "raised" else None
            pipe.recv_bytes()
            pipe.send_bytes(pickle.dumps(before.restore() if clean is None else clean))


def _die_with(parent: int) -> None:
    """Be killed when the process that started this one ends, however it ends."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit("the test session is gone")


def _perform(
    file: str, module: str, qualname: str, args: bytes, environment: dict[str, str], folder: str
) -> tuple[str, str, bytes]:
    """Run the function; returns how it ended, the traceback if it raised, and the pickled value."""
    try:
        function: Any = _import(file, module)
        for part in qualname.split("."):
            function = getattr(function, part)
        os.environ.update(environment)
        os.chdir(folder)
        _begin()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            value = function(*pickle.loads(args))
        return "returned", "", pickle.dumps(value)
    except BaseException as error:  # noqa: BLE001 - whatever it is, the test gets it
        text = traceback.format_exc()
        error.__traceback__ = None  # its frames would keep the function's objects alive
        try:
            return "raised", text, pickle.dumps(error)
        except Exception:  # noqa: BLE001 - any class may refuse to be pickled
            return "raised", text, b""


def _import(file: str, name: str) -> types.ModuleType:
    """A test module, under the name that it has in the test session, so that its classes travel."""
    if name in sys.modules and sys.modules[name].__file__ == file:
        return sys.modules[name]
    parts = name.split(".")
    for end in range(1, len(parts)):
        parent = ".".join(parts[:end])
        sys.modules.setdefault(parent, types.ModuleType(parent))
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} is not a module")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    gc.freeze()
    return module


def _begin() -> None:
    """The same beginning for every call."""
    import numpy
    import torch

    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    if torch.are_deterministic_algorithms_enabled():
        torch.use_deterministic_algorithms(False)


class _Before:
    """The worker's state before a call, to be restored after it."""

    def __init__(self) -> None:
        self.environment = dict(os.environ)
        self.folder = Path.cwd()
        self.argv, self.path = list(sys.argv), list(sys.path)
        self.handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
        self.threads = set(threading.enumerate())

    def restore(self) -> bool:
        """Restore the state as far as possible; returns whether all of it was restored."""
        import torch.distributed as dist

        if dist.is_initialized():
            dist.destroy_process_group()
        os.environ.clear()
        os.environ.update(self.environment)
        os.chdir(self.folder)
        sys.argv[:], sys.path[:] = self.argv, self.path
        for number, handler in self.handlers.items():
            if handler is not None and signal.getsignal(number) != handler:
                signal.signal(number, handler)
        gc.collect()
        return self._threads_end() and not descendants()

    def _threads_end(self) -> bool:
        for _ in range(100):
            if not new_threads(self.threads):
                return True
            time.sleep(0.01)
        return False


if __name__ == "__main__":
    from warm import _fork_on_demand as fork_on_demand  # under its own name, as tests import it

    fork_on_demand(int(sys.argv[1]), int(sys.argv[2]))
