"""What do the variables tell that an engine started an agent with, and which do its workers get? Pure.

Workers get all but those about the agent's own task.

An engine tells its task, which is the agent, its place among the tasks. A library in a worker would take
that for the worker's own: mpi4py would take the agent's place, MKL computes with one thread where MPI says
that processes share the machine, and others read the rank of a task. Variables of the job stay: its number,
its nodes, its devices.
"""

from __future__ import annotations

from collections.abc import Mapping

# Of OpenMPI, its runtime, process managers and MPICH's mpirun; then of one step and one task of Slurm.
_PREFIXES = (
    "OMPI_", "PRTE_", "PMIX_", "PMI_", "PMI2_", "HYDI_", "MPI_LOCAL",
    "SLURM_STEP", "SLURM_SRUN_", "SLURM_CPU_BIND", "SLURM_MPI_",
)  # fmt: skip
_NAMES = {
    "SLURM_PROCID",
    "SLURM_LOCALID",
    "SLURM_NODEID",
    "SLURM_GTIDS",
    "SLURM_TASK_PID",
    "SLURM_LAUNCH_NODE_IPADDR",
    "SLURM_NTASKS",
    "SLURM_NPROCS",
    "SLURM_NTASKS_PER_NODE",
    "SLURM_TASKS_PER_NODE",
    "SLURM_CPUS_PER_TASK",
    "SLURM_DISTRIBUTION",
}


_DEVICES = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")


def without_task(env: Mapping[str, str]) -> dict[str, str]:
    """The variables without those about the agent's own place."""
    return {
        name: value for name, value in env.items() if name not in _NAMES and not name.startswith(_PREFIXES)
    }


def granted_cores(env: Mapping[str, str], usable: int) -> int:
    """How many cores the agent may use: Slurm may grant fewer than it confines its tasks to."""
    granted = env.get("SLURM_CPUS_ON_NODE", "") if "SLURM_STEP_ID" in env else ""
    return max(1, min(usable, int(granted))) if granted.isdigit() else usable


def devices(env: Mapping[str, str]) -> str:
    """The devices that an engine has given to the agent, as its variables name them; agents may differ."""
    return ",".join(f"{name}={env[name]}" for name in _DEVICES if name in env)
