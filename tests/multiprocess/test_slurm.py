"""Slurm as a launcher beyond what all launchers do: allocations, waiting in the queue, too few slots."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import slurm
from echelon.observe.events import WorkerJoined, read_events
from echelon.plan.plan import Plan
from engines import engine_of

SOURCE = Path(__file__).parents[2] / "src"
pytestmark = pytest.mark.skipif(bool(slurm.missing()), reason=f"engine slurm: {slurm.missing()}")

# All that matters here is who joins, where.
JOIN = """
import os, echelon
session = echelon.join()
print("job", os.environ["SLURM_JOB_ID"], "task", os.environ.get("SLURM_PROCID"))
"""


@pytest.fixture(scope="module")
def cluster():
    made = slurm.SlurmCluster()
    yield made
    made.close()


@pytest.fixture
def work(tmp_path, cluster):
    (tmp_path / "train.py").write_text(JOIN)
    yield tmp_path
    _until(lambda: not cluster.command("squeue", "--noheader"), "the queue to be empty")


def _until(done, what):
    until = time.monotonic() + 60
    while not done():
        assert time.monotonic() < until, f"waited for {what}"
        time.sleep(0.05)


def _environment(cluster):
    return {**os.environ, "PYTHONPATH": str(SOURCE), **cluster.env}


def _command(*words, on="slurm"):
    return [sys.executable, "-m", "echelon", "run", "--on", on, *words, "train.py"]


def _run(cluster, work, argv):
    return subprocess.run(
        argv, cwd=work, env=_environment(cluster), capture_output=True, text=True, timeout=200
    )


def _plan(work):
    (folder,) = (work / "runs").iterdir()
    return folder, Plan.read(folder / "plan.toml")


def test_workers_run_on_the_nodes_that_slurm_chose_and_know_the_job_but_no_task(cluster, work):
    on = 'slurm(options="--nodes=2 --ntasks-per-node=2 --partition=tests")'
    done = _run(cluster, work, _command("--workers", "4", on=on))
    assert done.returncode == 0, done.stderr
    folder, plan = _plan(work)
    assert [worker.node for worker in plan.workers] == ["n1", "n1", "n2", "n2"]
    for worker in plan.workers:
        events = read_events(folder / "events" / f"rank-{worker.rank}.jsonl")
        assert [event.host for event in events if isinstance(event, WorkerJoined)] == [worker.node]
        log = (folder / "logs" / f"rank-{worker.rank}.log").read_text()
        assert log.startswith("job ")
        assert log.endswith("task None\n")


def test_in_an_allocation_there_are_as_many_workers_as_it_has_tasks(cluster, work):
    allocation = ["salloc", "--ntasks=3", "--nodes=2", "--cpus-per-task=2"]
    done = _run(cluster, work, [*allocation, *_command()])
    assert done.returncode == 0, done.stderr
    _, plan = _plan(work)
    assert len(plan.workers) == 3
    assert {worker.node for worker in plan.workers} == {"n1", "n2"}


def test_mpirun_in_an_allocation_uses_its_nodes_and_as_many_slots_as_it_has_tasks(cluster, work):
    missing = engine_of("mpi").missing()
    if missing:
        pytest.skip(f"engine mpi: {missing}")
    allocation = ["salloc", "--ntasks=3", "--nodes=2"]
    done = _run(cluster, work, [*allocation, *_command(on="mpi")])
    assert done.returncode == 0, done.stderr
    _, plan = _plan(work)
    assert len(plan.workers) == 3
    assert {worker.node for worker in plan.workers} == {"n1", "n2"}


def test_more_workers_than_the_allocation_has_room_for_is_an_error_in_slurms_words(cluster, work):
    (work / "job.sh").write_text(f"#!/bin/sh\n{shlex.join(_command('--workers', '4'))}\n")
    done = _run(cluster, work, ["sbatch", "--wait", "--ntasks=2", "--output=out", "job.sh"])
    assert done.returncode == 2
    said = (work / "out").read_text()
    assert "slurm ended before its 4 agents: srun: error:" in said
    assert not (work / "runs").exists()


@pytest.fixture
def busy(cluster):
    """All processors of both nodes are taken."""
    number = cluster.command(
        "sbatch", "--parsable", "--ntasks=8", "--output=/dev/null", "--wrap=sleep 1000"
    )
    _until(lambda: "RUNNING" in cluster.command("squeue", "--noheader", "--format=%T"), "the job to run")
    yield
    cluster.command("scancel", number.strip())
    _until(lambda: not cluster.command("squeue", "--noheader"), "the queue to be empty")


def test_on_a_busy_cluster_the_user_reads_what_the_queue_says_and_until_when(cluster, work, busy):
    done = _run(cluster, work, _command("--workers", "2", "--join-timeout-s", "6"))
    assert done.returncode == 2
    assert "waiting for slurm, at most 6 s: job " in done.stderr
    error = done.stderr[done.stderr.index("LaunchError") :]
    assert "slurm has not started its 2 agents within 6 s: job " in error
    assert " is PENDING (Resources), number 1 of 1 that wait in partition tests" in error
    assert cluster.command("squeue", "--noheader", "--states=PENDING") == ""
    assert not (work / "runs").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_launcher_that_ends_while_it_waits_leaves_no_job_in_the_queue(cluster, work, busy, number):
    with (work / "out").open("wb") as out:
        started = subprocess.Popen(
            _command("--workers", "2"), cwd=work, env=_environment(cluster), stdout=out, stderr=out
        )
        _until(lambda: cluster.command("squeue", "--noheader", "--states=PENDING"), "the job to wait")
        started.send_signal(number)
        code = started.wait(timeout=60)
    assert code == (130 if number == signal.SIGINT else -number)
    _until(lambda: not cluster.command("squeue", "--noheader", "--states=PENDING"), "the job to be gone")


def test_unknown_partition_is_an_error_in_slurms_words(cluster, work):
    done = _run(cluster, work, _command("--workers", "2", on='slurm(options="--partition=gpu")'))
    assert done.returncode == 2
    assert "slurm ended before its 2 agents: srun: error:" in done.stderr
    assert "invalid partition" in done.stderr.lower()


def test_hosts_are_refused_because_slurm_chooses_them(cluster, work):
    done = _run(cluster, work, _command("--hosts", "n1:2"))
    assert done.returncode == 2
    assert "Slurm decides which nodes workers run on" in done.stderr
