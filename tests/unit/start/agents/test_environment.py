"""Which of an engine's variables reach a worker, and what they grant."""

from __future__ import annotations

import pytest

from echelon.start.agents.environment import devices, granted_cores, without_task

JOB = {
    "PATH": "/bin",
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NODELIST": "n[1-2]",
    "SLURM_SUBMIT_DIR": "/home/me",
    "CUDA_VISIBLE_DEVICES": "1",
    "RANK": "3",
}


@pytest.mark.parametrize(
    "name",
    [
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        "PMIX_RANK",
        "PMI_RANK",
        "PMI_FD",
        "MPI_LOCALNRANKS",
        "SLURM_PROCID",
        "SLURM_LOCALID",
        "SLURM_NTASKS",
        "SLURM_STEP_ID",
        "SLURM_STEPID",
        "SLURM_TASKS_PER_NODE",
        "SLURM_CPU_BIND",
    ],
)
def test_worker_does_not_get_the_place_of_its_agent(name):
    assert without_task({**JOB, name: "0"}) == JOB


def test_slurm_may_grant_fewer_cores_than_the_process_could_use():
    step = {"SLURM_STEP_ID": "0", "SLURM_CPUS_ON_NODE": "2"}
    assert granted_cores(step, 64) == 2
    assert granted_cores(step, 1) == 1
    assert granted_cores({"SLURM_CPUS_ON_NODE": "2"}, 64) == 64  # a batch script's, not this process's step
    assert granted_cores({}, 64) == 64


def test_agents_with_different_devices_differ():
    one, other = devices({"CUDA_VISIBLE_DEVICES": "0"}), devices({"CUDA_VISIBLE_DEVICES": "1"})
    assert one != other
    assert devices({"PATH": "/bin"}) == ""
