"""A Dask cluster on this machine that outlives the runs: three workers with a thread each."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import psutil

from engines import MARK, Engine

MISSING = (
    ""
    if importlib.util.find_spec("distributed")
    else 'distributed is not installed: pip install "echelon[dask]"'
)
WORKERS = 3

KEEPER = f"""
import sys
from distributed import LocalCluster
cluster = LocalCluster(
    n_workers={WORKERS}, threads_per_worker=1, processes=True, dashboard_address=None,
    silence_logs="CRITICAL", local_directory=sys.argv[1],
)
print(cluster.scheduler_address, flush=True)
sys.stdin.read()
cluster.close()
"""


class DaskEngine(Engine):
    """Three workers."""

    name = "dask"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        path = os.pathsep.join(str(Path(__file__).parents[2] / name) for name in ("src", "tests"))
        self._keeper = subprocess.Popen(
            [sys.executable, "-c", KEEPER, str(folder)],
            env={**os.environ, "PYTHONPATH": path, MARK: str(folder)},
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
    def on(self) -> str:
        return f"dask(address={self.address})"

    def processes(self) -> list[psutil.Process]:
        """Dask's own processes have the mark too, but are not Echelon's."""
        return [one for one in super().processes() if _is_of_a_run(one)]

    def close(self) -> None:
        self._keeper.communicate(timeout=60)


def _is_of_a_run(process: psutil.Process) -> bool:
    try:
        words = process.cmdline()
    except psutil.NoSuchProcess:
        return False
    return any(word == "echelon" or word.startswith("echelon.") for word in words)
