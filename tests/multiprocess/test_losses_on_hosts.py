"""Workers on several machines are lost or stuck, leave or join, and the others go on, over a real ssh."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest
from tests.losses import SCRIPT, Kill, agent_of, changes, pid_of, run

from echelon.errors import LaunchError
from echelon.observe.events import WorkerJoined, read_events
from echelon.observe.run_folder import RunFolder
from echelon.start.agents.invite import JoinToken
from echelon.start.control_client import ControlClient
from echelon.start.join_elsewhere import join_elsewhere, read_token, write_token
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
        agent = agent_of(pid_of(folder, 2))
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


def join(folder, address, file, *more):
    """`echelon join` as on another machine; returns its exit code and what it says."""
    command = [sys.executable, "-m", "echelon", "join", address, "--token-file", str(file), *more]
    env = {**os.environ, "COLUMNS": "400"}
    return subprocess.Popen(
        command, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def refusal(address, file, *, workers=1, node="vm"):
    """What the launcher says to a machine that it does not let in."""
    with pytest.raises(LaunchError) as refused:
        join_elsewhere(address, read_token(str(file)), workers, node, lambda text: None)
    return refused.value.message


def said(process):
    output, _ = process.communicate(timeout=150)
    return process.returncode, output


def test_workers_of_a_further_machine_join_and_what_differs_there_is_named(server, tmp_path):
    answers, callers = {}, {}
    script = told("HOLDS", SCRIPT)

    def act(folder):
        found = RunFolder.find("latest", folder / "runs")
        with closing(ControlClient(found)) as client:
            token, addresses = client.invite(600.0)
            expired, _ = client.invite(0.0)
            with pytest.raises(LaunchError, match="starts no further workers") as refused:
                client.join(1)
            answers["here"] = refused.value.fix
        address = f"127.0.0.1:{addresses[0].rpartition(':')[2]}"
        other = folder / "other"
        other.mkdir()
        (other / "train.py").write_text(script + "# another one\n")
        wrong = JoinToken(key=b"k" * 32, invitation="", env={}).encode()
        for name, text in {"token": token, "expired": expired, "wrong": wrong}.items():
            write_token(folder / name, text)
        assert (folder / "token").stat().st_mode & 0o777 == 0o600
        callers.update(
            script=join(other, address, folder / "token", "--name", "c"),
            fits=join(folder, address, folder / "token", "--name", "e"),
        )
        answers["wrong"] = refusal(address, folder / "wrong")
        answers["expired"] = refusal(address, folder / "expired")
        answers["name"] = refusal(address, folder / "token", node="a")
        answers["many"] = refusal(address, folder / "token", workers=30)
        answers["nobody"] = refusal("127.0.0.1:9", folder / "token")
        with closing(ControlClient(found)) as client:
            until = time.monotonic() + 90
            while "waiting" not in client.where([4, 5]).values() and time.monotonic() < until:
                time.sleep(0.05)

    outcome = run(tmp_path, "auto", [], respawn=3, script=script, words=words(server), act=act)
    answers.update({name: said(caller) for name, caller in callers.items()})
    everything = f"{outcome.output}{answers}"
    assert (outcome.code, outcome.wrong, answers["fits"][0]) == (0, [], 0), everything
    assert "echelon invite" in answers["here"]
    assert answers["wrong"].startswith("the token is not of the run whose launcher answers at")
    assert answers["expired"].startswith("the token has expired")
    assert answers["name"] == "a machine named a is in the run already"
    assert "workers cannot share every batch of this run" in answers["many"]
    assert answers["nobody"].startswith("no launcher answers at 127.0.0.1:9")
    code, text = answers["script"]
    assert code == 2, text
    assert f"train.py in {tmp_path / 'other'} on " in text, text
    joined = re.findall(r"rank (\d) has joined after", outcome.output)
    assert len(joined) == 1, everything
    assert "done with 5 workers" in outcome.output
    assert (tmp_path / f"weights-{joined[0]}").exists()
    assert changes(tmp_path, 0)[-1][:4] == [[], [], [int(joined[0])], 5]
    (record,) = (tmp_path / "runs").iterdir()
    events = read_events(record / "events" / f"rank-{joined[0]}.jsonl")
    assert [event.node for event in events if isinstance(event, WorkerJoined)] == ["e"]
