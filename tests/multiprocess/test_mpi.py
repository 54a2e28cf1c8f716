"""mpirun as a launcher beyond what all launchers do: OpenMPI and MPICH, hosts, and what can go wrong."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

import sshd
from echelon.observe.events import StepEnded, WorkerJoined, read_events
from echelon.plan.plan import Plan
from engines import decoded

SOURCE = Path(__file__).parents[2] / "src"
MARK = "ECHELON_TEST_MPI"
SECRET = "the-secret-of-these-tests"

TRAIN = """
import os, sys, torch, echelon
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

session = echelon.join()
torch.manual_seed(0)
data = torch.randn(24, 4)
loader = DataLoader(TensorDataset(data, data.sum(1, keepdim=True)), batch_size=12)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = session.prepare(model, optimizer, loader)
for epoch in session.epochs(int(sys.argv[1])):
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
print("told by MPI:", [name for name in os.environ if name.startswith(("OMPI_", "PMI", "MPI_"))])
"""


def _openmpi() -> str:
    return _which("mpirun", "open mpi") or _which("mpirun.openmpi", "open mpi")


def _mpich() -> str:
    """MPICH's own, also if OpenMPI's is the first on the path; `make test-engines` puts it there."""
    there = Path(sys.prefix) / "mpich" / "bin" / "mpirun"
    return str(there) if there.exists() else _which("mpiexec.hydra", "hydra")


def _which(name: str, word: str) -> str:
    found = shutil.which(name) or shutil.which(Path(sys.executable).with_name(name)) or ""
    if not found:
        return ""
    said = subprocess.run([found, "--version"], capture_output=True, text=True, timeout=60)
    return found if word in said.stdout.lower() else ""


@pytest.fixture(scope="module", params=["openmpi", "mpich"])
def mpirun(request):
    found = {"openmpi": _openmpi, "mpich": _mpich}[request.param]()
    if not found:
        pytest.skip(f"engine mpi: {request.param} is not installed (make test-engines)")
    return request.param, found


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    if sshd.MISSING:
        pytest.skip(sshd.MISSING)
    folder = tmp_path_factory.mktemp("ssh")
    made = sshd.SshServer(folder, SOURCE, {MARK: "here"})
    (folder / "rsh").write_text(f'#!/bin/sh\nexec ssh -F {made.config} "$@"\n')
    (folder / "rsh").chmod(0o755)
    yield made
    made.close()


@pytest.fixture
def work(tmp_path):
    (tmp_path / "train.py").write_text(TRAIN)
    yield tmp_path
    until = time.monotonic() + 60
    while left := _processes(str(tmp_path)):
        assert time.monotonic() < until, left
        time.sleep(0.05)


def _processes(mark):
    found = psutil.process_iter(["environ", "status"])
    return [
        one
        for one in found
        if (one.info["environ"] or {}).get(MARK) == mark and one.info["status"] != psutil.STATUS_ZOMBIE
    ]


def _environment(work):
    return {**os.environ, "PYTHONPATH": str(SOURCE), "ECHELON_SECRET": SECRET, MARK: str(work)}


def _command(on, *words):
    return [sys.executable, "-m", "echelon", "run", "--on", on, *words]


def _run(work, on, *words):
    return subprocess.run(
        _command(on, *words), cwd=work, env=_environment(work), capture_output=True, text=True, timeout=200
    )


def _stepped(work, rank):
    files = work.glob(f"runs/*/events/rank-{rank}.jsonl")
    return any(isinstance(event, StepEnded) for file in files for event in read_events(file))


def test_hosts_are_reached_by_mpirun_and_the_secret_is_on_no_command_line(mpirun, server, work):
    kind, path = mpirun
    agent = f"--mca plm_ssh_agent 'ssh -F {server.config}'"
    rsh = f"-launcher ssh -launcher-exec {server.config.with_name('rsh')}"
    on = f'mpi(command="{path} {agent if kind == "openmpi" else rsh}", python="{server.python}")'
    words: set[str] = set()
    with (work / "out").open("wb") as out:
        started = subprocess.Popen(
            _command(on, "--hosts", "a:2,b:1", "train.py", "20"),
            cwd=work,
            env=_environment(work),
            stdout=out,
            stderr=out,
        )
        until = time.monotonic() + 200
        while started.poll() is None:
            assert time.monotonic() < until, (work / "out").read_text()
            words |= {
                word for one in psutil.process_iter(["cmdline"]) for word in one.info["cmdline"] or ()
            }
            time.sleep(0.05)
    assert started.returncode == 0, (work / "out").read_text()
    (folder,) = (work / "runs").iterdir()
    assert len(Plan.read(folder / "plan.toml").workers) == 3
    assert (folder / "summary.json").exists()
    assert any("train.py" in word for word in words)
    assert not [word for word in words if SECRET in word or SECRET.encode() in decoded(word)]
    until = time.monotonic() + 60
    while left := server.processes():
        assert time.monotonic() < until, left
        time.sleep(0.05)


def test_shares_codec_and_threads_are_those_of_the_plan_and_nothing_is_left_of_mpi(mpirun, work):
    on = f'mpi(command="{mpirun[1]}")'
    words = ["--shares", "3,1", "--codec", "one-bit", "--threads", "2", "--start", "exec", "train.py", "2"]
    done = _run(work, on, "--workers", "2", *words)
    assert done.returncode == 0, done.stderr
    (folder,) = (work / "runs").iterdir()
    for rank, share in enumerate((9, 3)):
        events = list(read_events(folder / "events" / f"rank-{rank}.jsonl"))
        assert [event.threads for event in events if isinstance(event, WorkerJoined)] == [2]
        assert {event.share for event in events if isinstance(event, StepEnded)} == {share}
        assert "told by MPI: []" in (folder / "logs" / f"rank-{rank}.log").read_text()


def test_without_a_number_there_are_as_many_workers_as_mpirun_has_slots(work):
    path = _openmpi()
    if not path:
        pytest.skip("engine mpi: openmpi is not installed (make test-engines)")
    (work / "hostfile").write_text("localhost slots=3\n")
    done = _run(work, f'mpi(command="{path} --hostfile hostfile")', "train.py", "1")
    assert done.returncode == 0, done.stderr
    (folder,) = (work / "runs").iterdir()
    assert len(Plan.read(folder / "plan.toml").workers) == 3


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_agents_remove_their_folders_whatever_ends_the_launcher(mpirun, work, number):
    folders = work / "temporary"
    folders.mkdir()
    with (work / "out").open("wb") as out:
        started = subprocess.Popen(
            _command(f'mpi(command="{mpirun[1]}")', "--workers", "2", "train.py", "1000000"),
            cwd=work,
            env={**_environment(work), "TMPDIR": str(folders)},
            stdout=out,
            stderr=out,
        )
        until = time.monotonic() + 200
        while not _stepped(work, 1):
            assert time.monotonic() < until, (work / "out").read_text()
            time.sleep(0.05)
        assert list(folders.glob("echelon-*"))
        started.send_signal(number)
        started.wait(timeout=90)
    until = time.monotonic() + 60
    while left := _processes(str(work)):
        assert time.monotonic() < until, left
        time.sleep(0.05)
    assert not list(folders.glob("echelon-*"))


def test_end_of_mpirun_ends_the_run_with_its_name(mpirun, work):
    with (work / "out").open("wb") as out:
        started = subprocess.Popen(
            _command(f'mpi(command="{mpirun[1]}")', "--workers", "2", "train.py", "1000000"),
            cwd=work,
            env=_environment(work),
            stdout=out,
            stderr=out,
        )
        until = time.monotonic() + 200
        while not _stepped(work, 1):
            assert time.monotonic() < until, (work / "out").read_text()
            time.sleep(0.05)
        (job,) = psutil.Process(started.pid).children()
        job.send_signal(signal.SIGKILL)
        assert started.wait(timeout=90) == 1
    assert f"is gone: {Path(mpirun[1]).name} was killed by SIGKILL" in (work / "out").read_text()


def test_where_there_is_no_mpirun_the_error_names_the_extra(work):
    done = _run(work, "mpi(command=mpirun-that-is-not-there)", "--workers", "2", "train.py", "1")
    assert done.returncode == 2
    assert "there is no mpirun-that-is-not-there on this machine" in done.stderr
    assert 'pip install "echelon[mpi]"' in done.stderr


def test_option_that_mpirun_does_not_know_is_shown_with_its_own_words(mpirun, work):
    done = _run(work, f'mpi(command="{mpirun[1]} --not-an-option")', "--workers", "2", "train.py", "1")
    assert done.returncode == 2
    assert "mpi ended before its 2 agents" in done.stderr
    assert "not-an-option" in done.stderr.partition("where:")[0]
    assert not (work / "runs").exists()
