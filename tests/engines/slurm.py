"""A real Slurm of two nodes on this machine."""

from __future__ import annotations

from pathlib import Path

import slurm
from engines import MARK, Engine


class SlurmEngine(Engine):
    """Tasks on the nodes n1 and n2."""

    name = "slurm"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.cluster = slurm.SlurmCluster()

    @classmethod
    def missing(cls) -> str:
        return slurm.missing()

    @property
    def on(self) -> str:
        return "slurm(options='--nodes=2')"

    @property
    def env(self) -> dict[str, str]:
        return {MARK: str(self.folder), **self.cluster.env}

    def close(self) -> None:
        self.cluster.close()
