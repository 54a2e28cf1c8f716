"""CPU quotas of a lab come into force under every kind of script, with or without a record."""

from __future__ import annotations

import secrets
import subprocess
import sys
from pathlib import Path

import pytest

from echelon.observe.events import FaultInjected, Noted, QuotasApplied, StepEnded, WorkerJoined, read_events
from echelon.observe.run_folder import RunFolder

LAB = """
name = "quotas-NUMBER"
[[node]]
name = "n"
count = 2
cpu = 0.4
[[fault]]
at_s = 0.3
action = "slow"
node = "n-1"
cpu = 0.2
"""

# `wait` returns when this worker's own control group has the quota that the fault gave it.
WAIT = """
import os, sys, time
from pathlib import Path

def quota():
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, place, kind, options, *_ = line.split()
        if kind == "cgroup" and "cpu" in options.split(","):
            break
        if kind == "cgroup2" and Path(place, "cgroup.controllers").exists():
            break
    own = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    wanted = "" if kind == "cgroup2" else "cpu"
    path = next(group for _, names, group in own if wanted in names.split(","))
    folder = Path(place + path)
    if kind == "cgroup2":
        quota, period = (folder / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    quota = int((folder / "cpu.cfs_quota_us").read_text())
    return None if quota < 0 else quota / int((folder / "cpu.cfs_period_us").read_text())

def wait():
    wanted = 0.4 if os.environ["RANK"] == "0" else 0.2
    until = time.monotonic() + 60
    while quota() != wanted:
        assert time.monotonic() < until, f"the quota is {quota()}"
        time.sleep(0.01)

assert quota() is None
"""

JOIN = """
import torch
import echelon

session = echelon.join(record=RECORD)
assert quota() is None
"""

UNRECORDED = (
    WAIT
    + JOIN.replace("RECORD", "False")
    + """
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = session.prepare(model, optimizer)
assert quota() is None
model(torch.ones(4, 2)).sum().backward()
wait()
"""
)
STEPLESS = (
    WAIT
    + JOIN.replace("RECORD", "None")
    + """
loader = torch.utils.data.DataLoader(torch.arange(8.0), batch_size=4)
loader = session.prepare(loader)
assert quota() is None
for batch in loader:
    wait()
"""
)
UNPREPARED = WAIT + JOIN.replace("RECORD", "False") + "session.barrier()\nwait()\n"
PLAIN = WAIT + "import torch.distributed as dist\ndist.init_process_group('gloo')\nwait()\n"

SHORT_BOUNDS = """
import sys
from echelon.start import quotas
quotas.JOINED_S, quotas.RUNNING_S = float(sys.argv.pop(1)), float(sys.argv.pop(1))
from echelon.cli import main
main()
"""


def write_lab(folder: Path) -> None:
    """A lab of its own for each test: tests of one file may run at the same time."""
    (folder / "quotas.toml").write_text(LAB.replace("NUMBER", secrets.token_hex(3)))


def run(
    tmp_path: Path, script: str, joined_s: float = 60.0, running_s: float = 60.0
) -> tuple[str, RunFolder]:
    write_lab(tmp_path)
    (tmp_path / "script.py").write_text(script)
    words = [str(joined_s), str(running_s), "run", "--lab", "quotas.toml", "script.py"]
    done = subprocess.run(
        [sys.executable, "-c", SHORT_BOUNDS, *words],
        cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = (tmp_path / "runs").iterdir()
    folder = RunFolder(path)
    assert not folder.ready.exists()
    return done.stdout + done.stderr, folder


@pytest.mark.usefixtures("can_emulate")
@pytest.mark.parametrize(
    ("script", "bounds_s", "reason"),
    [
        pytest.param(UNRECORDED, (60.0, 60.0), "all workers train", id="unrecorded"),
        pytest.param(STEPLESS, (60.0, 60.0), "all workers train", id="no optimizer step"),
        pytest.param(
            UNPREPARED,
            (1.0, 60.0),
            "ranks 0 and 1 joined 1 s ago and did not begin to train",
            id="nothing prepared",
        ),
        pytest.param(
            PLAIN,
            (60.0, 1.0),
            "the script of ranks 0 and 1 has run for 1 s without joining",
            id="plain torch",
        ),
    ],
)
def test_quotas_and_faults_by_seconds_come_whatever_the_script_does(
    tmp_path: Path, script: str, bounds_s: tuple[float, float], reason: str
) -> None:
    output, folder = run(tmp_path, script, *bounds_s)
    events = list(read_events(folder.events_of(-1)))
    (applied,) = [event for event in events if isinstance(event, QuotasApplied)]
    assert applied.reason == reason
    assert applied.quotas == {"n-0": 0.4, "n-1": 0.4}
    (fault,) = [event for event in events if isinstance(event, FaultInjected)]
    assert fault.t - applied.t >= 0.3
    assert f"CPU quotas are in force: {reason}" in output
    if script == UNRECORDED:
        assert not folder.events_of(0).exists()


@pytest.mark.usefixtures("can_emulate")
def test_a_run_that_ends_before_quotas_come_says_so(tmp_path: Path) -> None:
    output, folder = run(tmp_path, "print('hello')")
    events = list(read_events(folder.events_of(-1)))
    assert not any(isinstance(event, QuotasApplied) for event in events)
    said = [event.text for event in events if isinstance(event, Noted) and event.warning]
    assert said[0].startswith("CPU quotas never came into force")
    assert said[1] == "the fault slow n-1 was not injected: the run ended before second 0.3"
    assert all(f"warning: {text}" in " ".join(output.split()) for text in said)


@pytest.mark.usefixtures("can_emulate")
def test_the_built_in_job_loads_its_data_before_quotas_come(tmp_path: Path) -> None:
    write_lab(tmp_path)
    words = ["train", "--lab", "quotas.toml", "--epochs", "1", "--model", "mlp"]
    done = subprocess.run(
        [sys.executable, "-m", "echelon", *words],
        cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = (tmp_path / "runs").iterdir()
    folder = RunFolder(path)
    (applied,) = [event for event in read_events(folder.events_of(-1)) if isinstance(event, QuotasApplied)]
    for rank in range(2):
        events = list(read_events(folder.events_of(rank)))
        (joined,) = [event for event in events if isinstance(event, WorkerJoined)]
        first = next(event for event in events if isinstance(event, StepEnded))
        assert joined.t < first.start < applied.t
