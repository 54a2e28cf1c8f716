"""A standalone Spark cluster on this machine: a master and two workers, which have names of their own."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil

from engines.spark import QUICK_JAVA, SparkEngine

SLOTS = 2  # of each of the two
HOSTS = ("spark-a", "spark-b")
_START_S = 90.0


def missing() -> str:
    """Why it cannot be started here, and what to install; empty if it can."""
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        return "host names of their own need root and unshare (util-linux)"
    return SparkEngine.missing()


class SparkCluster:
    """Running since it was made; `close` ends it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._processes: list[subprocess.Popen[bytes]] = []
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.master = f"spark://127.0.0.1:{port}"
        try:
            self._start("master", "", "--port", str(port))
            self._wait("master", "Starting Spark master")
            for host in HOSTS:
                words = ["--cores", str(SLOTS), "--memory", "1g", "--work-dir", str(folder / host)]
                self._start("worker", host, *words, self.master)
            for host in HOSTS:
                self._wait(host, "Successfully registered with master")
        except BaseException:
            self.close()
            raise

    def executors(self) -> list[psutil.Process]:
        """The processes of executors, while a session is there."""
        below = [one for process in self._processes for one in _below(process.pid)]
        return [one for one in below if "CoarseGrainedExecutorBackend" in " ".join(_words(one))]

    def processes_of_runs(self) -> list[psutil.Process]:
        """Agents and workers that are still there."""
        below = [one for process in self._processes for one in _below(process.pid)]
        return [one for one in below if any("echelon.start" in word for word in _words(one))]

    def close(self) -> None:
        """End all processes of the cluster."""
        for process in reversed(self._processes):
            process.terminate()
        for process in self._processes:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _start(self, role: str, host: str, *words: str) -> None:
        from pyspark.find_spark_home import _find_spark_home

        program = str(Path(_find_spark_home()) / "bin" / "spark-class")
        kind = f"org.apache.spark.deploy.{role}.{role.capitalize()}"
        argv = [program, kind, "--host", "127.0.0.1", "--webui-port", "0", *words]
        if host:  # the shell is replaced, so signals reach Spark
            argv = ["unshare", "--uts", "sh", "-c", 'hostname "$0"; exec "$@"', host, *argv]
        env = {**os.environ, "SPARK_LOCAL_IP": "127.0.0.1", "PYSPARK_PYTHON": sys.executable}
        env["JDK_JAVA_OPTIONS"] = QUICK_JAVA
        with self._log(host or role).open("wb") as log:
            self._processes.append(
                subprocess.Popen(argv, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
            )

    def _log(self, name: str) -> Path:
        return self._folder / f"{name}.log"

    def _wait(self, name: str, text: str) -> None:
        until = time.monotonic() + _START_S
        while text not in self._log(name).read_text(errors="replace"):
            assert time.monotonic() < until, self._log(name).read_text(errors="replace")
            time.sleep(0.05)


def _below(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.Error:
        return []


def _words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []
