"""mpirun of OpenMPI or MPICH, on the path or beside the interpreter."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from engines import Engine


class MpiEngine(Engine):
    """Slots of mpirun on this machine."""

    name = "mpi"

    @classmethod
    def missing(cls) -> str:
        found = shutil.which("mpirun") or shutil.which(Path(sys.executable).with_name("mpirun"))
        return "" if found else 'there is no mpirun: pip install "echelon[mpi]"'
