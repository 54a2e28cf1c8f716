"""What srun is asked for, and what squeue's lines mean."""

from __future__ import annotations

import pytest

from echelon.start.launchers.slurm import described, srun_options, tasks_of


@pytest.mark.parametrize(
    ("env", "count"),
    [
        ({}, 1),
        ({"SLURM_NTASKS": "6", "SLURM_TASKS_PER_NODE": "1"}, 6),
        ({"SLURM_TASKS_PER_NODE": "4(x2),1"}, 9),
        ({"SLURM_TASKS_PER_NODE": "3"}, 3),
    ],
)
def test_allocation_tells_how_many_tasks_it_has(env, count):
    assert tasks_of(env) == count


def test_new_allocation_has_a_name():
    assert "--job-name=echelon" in srun_options(2, {})


def test_step_of_an_allocation_has_the_cpus_that_its_job_asked_for():
    options = srun_options(2, {"SLURM_JOB_ID": "7", "SLURM_CPUS_PER_TASK": "3"})
    assert "--cpus-per-task=3" in options
    assert "--overlap" not in options
    assert not [option for option in options if option.startswith("--job-name")]


def test_step_within_a_step_shares_its_cpus():
    assert "--overlap" in srun_options(2, {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"})


def test_waiting_job_is_described_with_reason_and_position():
    queue = ["5|gpu", "9|other", "7|gpu", "8|gpu"]
    said = described("7", ["PENDING|Priority|gpu|2026-11-18T12:00:00"], queue)
    assert said == (
        "job 7 is PENDING (Priority), number 2 of 3 that wait in partition gpu, "
        "expected to start at 2026-11-18T12:00:00 or earlier"
    )
    assert described("7", ["RUNNING|None|gpu|2026-11-18T12:00:00"], ["5|gpu"]) == "job 7 is RUNNING"
    assert described("7", ["PENDING|Resources|gpu|N/A"], []) == "job 7 is PENDING (Resources)"
