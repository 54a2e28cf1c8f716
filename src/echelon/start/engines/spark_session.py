"""Which Spark session does a run use? The one that is active, or a new one, which ends with the run.

A session of the user's is left as it is. A new one is quiet: what Java prints is kept for errors.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from echelon.errors import LaunchError
from echelon.start.engines.spark_job import reason

_JAVA_S = 20.0
_END_S = 10.0
_MOST_TEXT = 2000
_FIX = 'pip install "echelon[spark]", and install Java 17 (openjdk-17-jre-headless on Debian and Ubuntu)'


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenSession:
    """A session to run jobs in: its SparkContext, and what to do at the end of the run."""

    context: Any
    close: Callable[[], None]


def open_session(master: str, python: str, workers: int) -> OpenSession:
    """The active session, or a new one with so many slots."""
    context_class = _spark_context()
    active = context_class._active_spark_context
    if active is None:
        return _create(context_class, master, python, workers)
    if master and active.master != master:
        raise LaunchError(
            f"a Spark session with the master {active.master} is active, and {master} is asked for",
            where="--on spark",
            fix="leave the master out to use that session, or stop it",
        )
    return OpenSession(context=active, close=_nothing)


def is_local(master: str) -> bool:
    """Whether executors are threads of Spark's own process on this machine."""
    return master == "local" or master.startswith("local[")


def _nothing() -> None:
    """A session of the user's goes on."""


def _spark_context() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of versions of pandas, which is not used here
        try:
            import pyspark
            from pyspark.sql import is_remote
        except ModuleNotFoundError as error:
            raise LaunchError(f"{error.name} is not installed", where="--on spark", fix=_FIX) from error
    if is_remote():
        raise LaunchError(
            "this is a Spark Connect session, which cannot run barrier jobs of plain Python",
            where="--on spark",
            fix="run the program with spark-submit, or create a session with .master(...)",
        )
    return pyspark.SparkContext


def _create(context_class: Any, master: str, python: str, workers: int) -> OpenSession:
    from pyspark import SparkConf

    submitted = "PYSPARK_GATEWAY_PORT" in os.environ  # by spark-submit, which knows the master
    master = master or os.environ.get("SPARK_MASTER", "") or ("" if submitted else f"local[{workers}]")
    variables = {"PYSPARK_PYTHON": python or os.environ.get("PYSPARK_PYTHON", "") or sys.executable}
    if is_local(master):
        variables["SPARK_LOCAL_IP"] = os.environ.get("SPARK_LOCAL_IP", "127.0.0.1")
    conf = SparkConf().setAppName("echelon")
    for name, value in _settings(master, workers).items():
        conf.set(name, value)
    with contextlib.ExitStack() as stack:
        said = stack.enter_context(tempfile.TemporaryFile())
        with _environment(variables), _interrupt_handler():
            if context_class._gateway is None and not submitted:
                gateway = _started_java(conf, said)
                stack.callback(_end_java, context_class, gateway)
                context_class._ensure_initialized(gateway=gateway)
            try:
                context = context_class(conf=conf)
            except Exception as error:
                raise LaunchError(
                    f"no Spark session can be created: {reason(error)}", where=master or "--on spark"
                ) from error
        stack.callback(_stop, context)
        context.setLogLevel("ERROR")
        return OpenSession(context=context, close=stack.pop_all().close)


def _stop(context: Any) -> None:
    with contextlib.suppress(Exception):  # somebody else may have stopped it
        context.stop()


def _settings(master: str, workers: int) -> Mapping[str, str]:
    settings = {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.dynamicAllocation.enabled": "false",
    }
    if master:
        settings["spark.master"] = master
    if workers and not is_local(master):
        settings["spark.cores.max"] = str(workers)  # otherwise a session takes the whole cluster
    return settings


def _started_java(conf: Any, said: IO[bytes]) -> Any:
    """Java's process, which says nothing on the terminal."""
    from pyspark.java_gateway import launch_gateway

    home = os.environ.get("JAVA_HOME")
    java = shutil.which(Path(home) / "bin" / "java" if home else "java")
    if java is None:
        raise LaunchError(
            f"there is no Java{f' in JAVA_HOME, {home}' if home else ' on this machine'}",
            where="--on spark",
            fix=_FIX,
        )
    try:
        return launch_gateway(conf, popen_kwargs={"stdout": said, "stderr": said})
    except Exception as error:
        raise LaunchError(
            f"Java does not start Spark: {_last(said) or error}\n{_version(java)}",
            where=java,
            fix="Spark 4 needs Java 17 or later: set JAVA_HOME to one",
        ) from error


def _version(java: str) -> str:
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        said = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=_JAVA_S)
        return said.stderr.partition("\n")[0]
    return ""


def _end_java(context_class: Any, gateway: Any) -> None:
    """End Java's process, which would stay until this process ends."""
    context_class._gateway = context_class._jvm = None
    with contextlib.suppress(Exception):
        gateway.shutdown()
    gateway.proc.stdin.close()
    try:
        gateway.proc.wait(_END_S)
    except subprocess.TimeoutExpired:
        gateway.proc.kill()
        gateway.proc.wait()


def _last(said: IO[bytes]) -> str:
    said.seek(0)
    lines = said.read()[-_MOST_TEXT:].decode(errors="replace").splitlines()
    return "\n".join(line for line in lines if not line.startswith("\tat "))


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """With these variables; all are as they were afterwards, also those that Spark sets."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


@contextlib.contextmanager
def _interrupt_handler() -> Iterator[None]:
    """Spark replaces the handler of Ctrl-C; this puts it back."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGINT)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
