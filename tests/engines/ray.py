"""A Ray on this machine that outlives the runs, with four CPUs, in a process of its own."""

from __future__ import annotations

import importlib.util
import shutil
import tempfile
from pathlib import Path

from engines import KeptEngine

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


class RayEngine(KeptEngine):
    """Four CPUs, and two GPUs that nothing looks for."""

    name = "ray"

    def __init__(self, folder: Path) -> None:
        self._temporary = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # the paths of sockets are short
        super().__init__(folder, KEEPER, self._temporary, QUIET)

    @classmethod
    def missing(cls) -> str:
        return MISSING

    @property
    def env(self) -> dict[str, str]:
        return {**super().env, **QUIET, "RAY_ADDRESS": self.address}

    def logs(self) -> list[Path]:
        """The files that Ray has written."""
        return [path for path in Path(self._temporary).glob("session_2*/logs/*") if path.is_file()]

    def close(self) -> None:
        super().close()
        shutil.rmtree(self._temporary, ignore_errors=True)
