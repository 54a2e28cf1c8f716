"""Which Ray does a launcher use: the program's own, a cluster, or one that is started for the run?

    the program has called ray.init     that one; it is left running
    an address, RAY_ADDRESS, or a Ray   a connection to it, which is closed at the end
    that was started on this machine
    none of these                       a Ray on this machine, for this run only, in a temporary folder

`ray.init` waits for minutes if nobody is at an address, so that is tried first. It also changes the handler
of SIGTERM and variables of this process, which are put back.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from echelon.errors import LaunchError
from echelon.start.engines import sweeper

_TRY_S = 5.0
_SWEPT_S = 15.0
_LEAVE_S = 4.0
_CLIENT = "ray://"
_LONGEST_FOLDER = 40  # the paths of Ray's sockets, below its folder, may have 107 characters
_STORE_BYTES = 200_000_000  # workers do not use Ray's object store


class RaySession:
    """A Ray that is ready to use."""

    def __init__(self, ray: Any, *, opened: bool, keeper: subprocess.Popen[bytes] | None = None) -> None:
        self.ray = ray
        self._opened = opened
        self._keeper = keeper

    @property
    def is_own(self) -> bool:
        """Whether it was started for this run."""
        return self._keeper is not None

    def close(self) -> None:
        """Close the connection, and end the Ray if it was started for this run; safe to call twice."""
        if self._opened:
            self._opened = False
            try_for_a_while(self.ray.shutdown)
        if self._keeper is not None:
            _sweep(self._keeper)


def try_for_a_while(call: Callable[[], object]) -> None:
    """Call something of Ray's that waits for long, or raises, if Ray has died."""

    def carefully() -> None:
        with contextlib.suppress(Exception):
            call()

    thread = threading.Thread(target=carefully, name="leave Ray", daemon=True)
    thread.start()
    thread.join(_LEAVE_S)


def open_ray(address: str, least_cpus: int) -> RaySession:
    """The Ray to use. One that is started here has at least so many CPUs."""
    try:
        ray: Any = importlib.import_module("ray")
    except ImportError as error:
        raise LaunchError(
            f"Ray cannot be imported: {error}", where="--on ray", fix='pip install "echelon[ray]"'
        ) from error
    if ray.is_initialized():
        return RaySession(ray, opened=False)
    found = address if address not in ("", "auto") else os.environ.get("RAY_ADDRESS", "") or _running_here()
    if not found and address == "auto":
        raise LaunchError(
            "no Ray runs on this machine, and RAY_ADDRESS is not set",
            where="--on ray(address=auto)",
            fix="start one with `ray start --head`, or give its address",
        )
    if found and found != "local":
        _try_address(found)
        _init(ray, address=found)
        return RaySession(ray, opened=True)
    return _started(ray, least_cpus)


def _started(ray: Any, least_cpus: int) -> RaySession:
    folder = _new_folder()
    keeper = subprocess.Popen(
        [sys.executable, "-I", "-S", sweeper.__file__, folder],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        _init(
            ray,
            address="local",
            num_cpus=least_cpus,
            include_dashboard=False,
            object_store_memory=_STORE_BYTES,
            _temp_dir=folder,
        )
    except BaseException:
        _sweep(keeper)
        raise
    return RaySession(ray, opened=True, keeper=keeper)


def _sweep(keeper: subprocess.Popen[bytes]) -> None:
    """Have all that is left of the Ray ended, and its folder removed."""
    if keeper.stdin is not None and not keeper.stdin.closed:
        keeper.stdin.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        keeper.wait(_SWEPT_S)


def _init(ray: Any, **options: Any) -> None:
    with _as_before():
        try:
            ray.init(log_to_driver=False, configure_logging=False, **options)
        except Exception as error:
            with contextlib.suppress(Exception):
                ray.shutdown()
            raise LaunchError(
                f"Ray at {options['address']} cannot be used: {' '.join(str(error).split())}",
                where="--on ray",
                fix="see `ray status`; Ray and Python must have the same versions here and there",
            ) from error


@contextlib.contextmanager
def _as_before() -> Iterator[None]:
    """Put back what `ray.init` changes in this process, and show only its errors."""
    logger = logging.getLogger("ray")
    level, variables = logger.level, dict(os.environ)
    in_main = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGTERM)
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
        if in_main:
            signal.signal(signal.SIGTERM, handler)
        for name in os.environ.keys() ^ variables.keys():
            del os.environ[name]  # Ray only adds some


def _running_here() -> str:
    """The address of the Ray that `ray start` has started on this machine, if it still answers."""
    with contextlib.suppress(OSError, LaunchError):
        folder = Path(os.environ.get("RAY_TMPDIR", "/tmp"), "ray")
        address = (folder / "ray_current_cluster").read_text().strip()
        _try_address(address)
        return address
    return ""


def _try_address(address: str) -> None:
    host, _, port = address.removeprefix(_CLIENT).rpartition(":")
    if not host or not port.isdigit():
        raise LaunchError(
            f"{address!r} is not an address of Ray",
            where="--on ray",
            fix="write ray(address=host:6379), or ray(address=auto) for the one on this machine",
        )
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_TRY_S).close()
    except OSError as error:
        raise LaunchError(
            f"no Ray answers at {address}: {error.strerror or error}",
            where="--on ray",
            fix="start it with `ray start --head`, or correct RAY_ADDRESS or ray(address=...)",
        ) from error


def _new_folder() -> str:
    parent = tempfile.gettempdir()
    if len(parent) > _LONGEST_FOLDER:
        parent = "/tmp"
    return tempfile.mkdtemp(prefix="ray-", dir=parent)
