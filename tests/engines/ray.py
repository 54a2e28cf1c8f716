"""A Ray on this machine that outlives the runs, with four CPUs, in a process of its own."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil

from engines import MARK, Engine

# Without the token that Ray would write into the home folder.
QUIET = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0"}
MISSING = "" if importlib.util.find_spec("ray") else 'ray is not installed: pip install "echelon[ray]"'

KEEPER = """
import logging, sys
import ray
logging.getLogger("ray").setLevel(logging.ERROR)
ray.init(
    address="local", num_cpus=4, num_gpus=2, include_dashboard=False, log_to_driver=False,
    configure_logging=False, object_store_memory=100_000_000, _temp_dir=sys.argv[1],
)
print(ray.get_runtime_context().gcs_address, flush=True)
sys.stdin.read()
ray.shutdown()
"""


class RayEngine(Engine):
    """Four CPUs, and two GPUs that nothing looks for."""

    name = "ray"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._temporary = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # the paths of sockets are short
        path = os.pathsep.join(str(Path(__file__).parents[2] / name) for name in ("src", "tests"))
        self._keeper = subprocess.Popen(
            [sys.executable, "-c", KEEPER, self._temporary],
            env={**os.environ, "PYTHONPATH": path, MARK: str(folder), **QUIET},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._keeper.stdout is not None
        self.address = self._keeper.stdout.readline().strip()
        assert self.address

    @classmethod
    def missing(cls) -> str:
        return MISSING

    @property
    def env(self) -> dict[str, str]:
        return {**super().env, **QUIET, "RAY_ADDRESS": self.address}

    def processes(self) -> list[psutil.Process]:
        """Ray's own processes have the mark too, but are not Echelon's."""
        return [one for one in super().processes() if is_of_a_run(one)]

    def logs(self) -> list[Path]:
        """The files that Ray has written."""
        return [path for path in Path(self._temporary).glob("session_2*/logs/*") if path.is_file()]

    def close(self) -> None:
        self._keeper.communicate(timeout=60)
        shutil.rmtree(self._temporary, ignore_errors=True)


def is_of_a_run(process: psutil.Process) -> bool:
    try:
        words = process.cmdline()
    except psutil.NoSuchProcess:
        return False
    return any(word == "echelon" or word.startswith("echelon.") for word in words)
