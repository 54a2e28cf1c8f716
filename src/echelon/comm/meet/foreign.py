"""What do the variables of other launchers say about this process? Pure: variables in, a start out.

    mpirun of OpenMPI   OMPI_COMM_WORLD_RANK, ..._SIZE, ..._LOCAL_RANK, ..._LOCAL_SIZE
    mpirun of MPICH     PMI_RANK, PMI_SIZE, MPI_LOCALRANKID, MPI_LOCALNRANKS
    srun of Slurm       SLURM_PROCID, SLURM_STEP_NUM_TASKS, SLURM_LOCALID, SLURM_STEP_NODELIST

None of them sets RANK, and none says where workers meet. On one machine they meet at loopback, at a port
that follows from the job. Slurm tells the first machine's name. Otherwise the user has to name it.

Kubernetes (PyTorchJob, Trainer) sets PET_NNODES and PET_NPROC_PER_NODE, which are torchrun's settings. A
script that it starts without torchrun is one process of each pod, whatever they say.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from echelon.errors import ConfigError

_FIRST_PORT, _PORTS = 21000, 8000  # below the range from which systems give ports to connections


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignStart:
    """How another launcher started this process. `first_host` is that of rank 0, if it is known."""

    by: str
    rank: int
    world_size: int
    local_rank: int
    local_size: int
    job: str
    first_host: str = ""

    @property
    def address(self) -> str:
        """Where the workers meet; empty if that is unknown."""
        return "127.0.0.1" if self.local_size == self.world_size else self.first_host

    @property
    def port(self) -> int:
        """A port that all workers of the job, and hardly another job, come to."""
        return _FIRST_PORT + zlib.crc32(f"{self.by}/{self.job}".encode()) % _PORTS


def read(env: Mapping[str, str], *, parent: int = 0) -> ForeignStart | None:
    """The start that the variables describe; None if no such launcher started this process.

    `parent` is the parent's process id, which local workers of MPICH have in common.
    """
    for reader in (_openmpi, _mpich, _slurm):
        start = reader(env, parent)
        if start is not None:
            return start
    return None


def _openmpi(env: Mapping[str, str], parent: int) -> ForeignStart | None:
    if "OMPI_COMM_WORLD_RANK" not in env:
        return None
    size = number(env, "OMPI_COMM_WORLD_SIZE")
    return ForeignStart(
        by="mpirun",
        rank=number(env, "OMPI_COMM_WORLD_RANK"),
        world_size=size,
        local_rank=number(env, "OMPI_COMM_WORLD_LOCAL_RANK", 0),
        local_size=number(env, "OMPI_COMM_WORLD_LOCAL_SIZE", size),
        job=env.get("PMIX_NAMESPACE") or env.get("OMPI_MCA_ess_base_jobid") or str(parent),
    )


def _mpich(env: Mapping[str, str], parent: int) -> ForeignStart | None:
    if "PMI_RANK" not in env or "PMI_SIZE" not in env or "SLURM_STEP_ID" in env:
        return None
    size = number(env, "PMI_SIZE")
    return ForeignStart(
        by="mpirun",
        rank=number(env, "PMI_RANK"),
        world_size=size,
        local_rank=number(env, "MPI_LOCALRANKID", 0),
        local_size=number(env, "MPI_LOCALNRANKS", size),
        job=str(parent),
    )


def _slurm(env: Mapping[str, str], parent: int) -> ForeignStart | None:
    # A batch script has the job's variables as well, but no step: it was not started by srun.
    if "SLURM_STEP_ID" not in env or "SLURM_PROCID" not in env:
        return None
    size = number(env, "SLURM_STEP_NUM_TASKS", 1)
    return ForeignStart(
        by="srun",
        rank=number(env, "SLURM_PROCID"),
        world_size=size,
        local_rank=number(env, "SLURM_LOCALID", 0),
        local_size=size if number(env, "SLURM_STEP_NUM_NODES", 1) == 1 else 0,
        job=f"{env.get('SLURM_JOB_ID', '')}.{env['SLURM_STEP_ID']}",
        first_host=first_host(env.get("SLURM_STEP_NODELIST", "")),
    )


def refuse_pod(env: Mapping[str, str]) -> None:
    """Raise for a pod that was meant for torchrun, where this process's place would be wrong.

    PyTorchJob's WORLD_SIZE counts the processes that torchrun would start, its RANK the pods. Trainer sets
    neither, so that every pod would train by itself. Where torchrun has started this process, it has
    replaced both.
    """
    if env.get("TORCHELASTIC_RUN_ID") or env.get("LOCAL_RANK"):
        return
    pods = max(_numbers(env.get("PET_NNODES", "")), default=1)  # a range: 1:4
    each = max(_numbers(env.get("PET_NPROC_PER_NODE", "")), default=1)  # 1 also for auto, cpu, gpu
    placed = bool(env.get("RANK") or env.get("WORLD_SIZE"))
    if each > 1 or (pods > 1 and not placed):
        told = {
            name: env[name]
            for name in ("PET_NNODES", "PET_NPROC_PER_NODE", "RANK", "WORLD_SIZE")
            if env.get(name)
        }
        raise ConfigError(
            f"{', '.join(f'{name}={value}' for name, value in told.items())}: this pod was meant for "
            "torchrun, but the script was started without it, as one process of its pod",
            where="environment",
            fix="start the script with torchrun, which reads these variables; or have one process for each "
            "pod, with RANK and WORLD_SIZE set",
        )


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(":") if part.strip().isdecimal()]


def first_host(nodes: str) -> str:
    """The first name of a list in Slurm's notation: `gpu[03-05,9],cpu1` begins with gpu03."""
    found = re.match(r"([^,\[]*)(?:\[([^\],-]+)[^\]]*\])?([^,]*)", nodes.strip())
    return "".join(part or "" for part in found.groups()) if found else ""


def number(env: Mapping[str, str], name: str, otherwise: int | None = None) -> int:
    """The variable as a number."""
    if not env.get(name) and otherwise is not None:
        return otherwise
    try:
        return int(env[name])
    except (KeyError, ValueError):
        raise ConfigError(
            f"{name} is {env.get(name)!r}, which is not a number",
            where="environment",
            fix="set it to a number",
        ) from None
