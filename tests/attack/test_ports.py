"""Which ports does a run with a parameter server leave open while it trains? Strangers try them."""

from __future__ import annotations

import subprocess
import sys
import time

import psutil

from attack.strangers import junk
from echelon.observe.events import StepEnded, read_events

SCRIPT = """
import time, torch
import echelon

session = echelon.join(round_timeout_s=90)
torch.manual_seed(0)
model = torch.nn.Linear(64, 8)
model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.05))
end = time.monotonic() + 90


def attacked():
    return session.all_reduce(torch.tensor([float(Path("attacked").exists())]), "min") > 0


while not attacked() and time.monotonic() < end:
    for _ in range(10):
        optimizer.zero_grad()
        model(torch.randn(6, 64)).square().mean().backward()
        optimizer.step()
print("went on to its end")
"""


def listening(run):
    """The ports at which processes of a run listen, and what these processes are."""
    found = {}
    for process in psutil.Process(run.pid).children(recursive=True):
        for one in process.net_connections(kind="tcp"):
            if one.status == psutil.CONN_LISTEN:
                found.setdefault(one.laddr.port, []).append(" ".join(process.cmdline()))
    return found


def has_stepped(runs):
    files = runs.glob("*/events/rank-0*")
    return any(isinstance(event, StepEnded) for file in files for event in read_events(file))


def test_while_training_only_the_meeting_listens_and_strangers_there_do_not_disturb_workers_or_server(
    tmp_path,
):
    (tmp_path / "script.py").write_text("from pathlib import Path\n" + SCRIPT)
    words = ["run", "--workers", "2", "--servers", "1", "--sync", "async", "script.py"]
    with subprocess.Popen(
        [sys.executable, "-m", "echelon", *words],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as run:
        deadline = time.monotonic() + 120
        while not has_stepped(tmp_path / "runs") and time.monotonic() < deadline:
            assert run.poll() is None, run.communicate()[0]
            time.sleep(0.1)
        ports = listening(run)
        for port in ports:
            junk(("127.0.0.1", port))
        (tmp_path / "attacked").touch()
        said, _ = run.communicate(timeout=120)
    assert len(ports) == 1, ports
    assert not any("echelon.server.process" in line for lines in ports.values() for line in lines)
    assert run.returncode == 0, said
    assert "went on to its end" in said
