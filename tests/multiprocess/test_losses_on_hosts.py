"""Workers on several machines are lost, stuck, or leave, and the others go on, over a real ssh."""

from __future__ import annotations

import os
import signal
import time
from contextlib import closing
from pathlib import Path

import psutil
import pytest
from tests.losses import SCRIPT, Kill, changes, pid_of, run

from echelon.observe.run_folder import RunFolder
from echelon.start.control_client import ControlClient
from sshd import MISSING, SshServer

SOURCE = Path(__file__).parents[2] / "src"
pytestmark = pytest.mark.skipif(bool(MISSING), reason=MISSING)

# Several buckets, whose sizes follow from measured links. ssh hands no variables on.
WIDE = SCRIPT.replace(
    "nn.Linear(16, 64), nn.ReLU()",
    "nn.Linear(16, 512), nn.ReLU(), nn.Linear(512, 1024), nn.Linear(1024, 64)",
)


def told(name: str, script: str) -> str:
    """The script, with a variable that a test sets."""
    return f'import os\nos.environ["{name}"] = "1"\n{script}'


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    made = SshServer(tmp_path_factory.mktemp("ssh"), SOURCE)
    yield made
    until = time.monotonic() + 90
    while left := made.processes():
        assert time.monotonic() < until, left
        time.sleep(0.1)
    made.close()


def words(server):
    return ("--on", server.launcher, "--hosts", "a:2,b:2", "--join-timeout-s", "150")


def test_a_stopped_worker_elsewhere_is_left_out_and_comes_back_with_the_same_weights(server, tmp_path):
    kills, script = [Kill(2, 0.2, on_s=60)], told("WAITS", WIDE)
    outcome = run(tmp_path, "auto", kills, respawn=3, script=script, words=words(server))
    assert (outcome.code, outcome.wrong) == (0, []), outcome.output
    assert "rank 2 was left out: no progress for" in outcome.output
    assert "(stopped); 3 workers go on" in outcome.output
    assert "rank 2 is back after" in outcome.output
    assert "done with 4 workers" in outcome.output
    assert changes(tmp_path, 2)[-1][:4] == [[], [], [2], 4]
    assert changes(tmp_path, 3)[-1][:4] == [[], [], [2], 4]


def test_a_worker_elsewhere_leaves_and_the_others_go_on_when_a_machine_is_gone(server, tmp_path):
    def act(folder):
        found = RunFolder.find("latest", folder / "runs")
        pid = pid_of(folder, 2)
        agent = int(psutil.Process(pid).environ()["ECHELON_LAUNCHER"])
        with closing(ControlClient(found)) as client:
            client.leave([3, 0])
            (folder / "go").touch()
            until = time.monotonic() + 90
            while set(client.where([0, 3]).values()) != {"left"} and time.monotonic() < until:
                time.sleep(0.02)
        os.kill(agent, signal.SIGKILL)

    outcome = run(
        tmp_path,
        "auto",
        [],
        fewest=1,
        respawn=3,
        script=told("HOLDS", SCRIPT),
        words=words(server),
        act=act,
    )
    assert (outcome.code, outcome.wrong) == (0, []), outcome.output
    assert "rank 3 has left (echelon leave)" in outcome.output
    assert "rank 2 was lost (the agent on b is gone" in outcome.output
    assert "rank 2 is not started again: its machine is out of reach" in outcome.output
    assert "done with 1 workers" in outcome.output, "the leader of then prints it"
    assert "never fewer than 1 went on" in outcome.output
    assert [one[:3] for one in changes(tmp_path, 1)][-1] == [[2], [], []]
