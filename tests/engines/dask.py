"""A Dask cluster on this machine that outlives the runs: three workers with a thread each."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from engines import KeptEngine

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


class DaskEngine(KeptEngine):
    """Three workers."""

    name = "dask"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, KEEPER, str(folder), {})

    @classmethod
    def missing(cls) -> str:
        return MISSING

    @property
    def on(self) -> str:
        return f"dask(address={self.address})"
