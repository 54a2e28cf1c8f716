"""Workers leave and join a running run: every sample is drawn once, and all have the same weights."""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import closing
from pathlib import Path

import pytest
from tests.losses import changes, pid_of, run

from echelon.checkpoint.store import read_newest
from echelon.cli.members import join
from echelon.errors import LaunchError
from echelon.observe.run_folder import RunFolder
from echelon.start.control_client import ControlClient


def test_workers_leave_after_a_step_as_long_as_enough_are_left(tmp_path):
    said = []

    def act(folder):
        found = RunFolder.find("latest", folder / "runs")
        assert found.control.stat().st_mode & 0o777 == 0o600
        with closing(ControlClient(found)) as client:
            for ranks in ([7], [0, 1, 3]):
                with pytest.raises(LaunchError) as refused:
                    client.leave(ranks)
                said.append(refused.value.message)
            client.leave([0])
            assert client.where([0, 1]) == {0: "leaving", 1: "member"}
        os.kill(pid_of(folder, 2), signal.SIGTERM)

    outcome = run(tmp_path, "tcp", [], respawn=3, act=act)
    assert (outcome.code, outcome.wrong) == (0, []), outcome.output
    assert said == [
        "rank 7 cannot leave: ranks 0, 1, 2 and 3 train now",
        "ranks 0, 1 and 3 cannot leave: 1 would be left, and --min-workers is 2",
    ]
    assert "rank 0 has left (echelon leave)" in outcome.output
    assert "rank 2 has left (SIGTERM)" in outcome.output
    assert "done with 2 workers" in outcome.output, "the leader of then prints it"
    assert "workers: 2 left; never fewer than 2 went on" in outcome.output
    assert "lost" not in outcome.output
    told = changes(tmp_path, 1)
    assert sorted(slot for _, left, *_ in told for slot in left) == [0, 2]
    assert told[-1][3] == 2
    assert not (tmp_path / "weights-0").exists(), "what comes after the loop is not run"
    ended = RunFolder.find("latest", tmp_path / "runs")
    assert not ended.control.exists()
    assert not list(ended.errors.iterdir())
    with pytest.raises(LaunchError, match="has ended"):
        ControlClient(ended)


@pytest.mark.parametrize(
    ("transport", "words", "period"),
    [
        ("shm", ("--codec", "one-bit", "--checkpoint", "kept", "--checkpoint-every", "5steps"), 1),
        ("tcp", ("--sync", "local(2)"), 2),
    ],
    ids=["codec-saving", "local"],
)
def test_a_worker_joins_with_the_state_of_the_others_and_has_its_share(
    tmp_path, capsys, transport, words, period
):
    said, threads = [], []

    def refused(client, workers):
        with pytest.raises(LaunchError) as error:
            client.join(workers)
        said.append(error.value.message)

    def act(folder):
        found = RunFolder.find("latest", folder / "runs")
        with closing(ControlClient(found)) as client:
            refused(client, 21)
            script = (folder / "train.py").read_text()
            (folder / "train.py").write_text(script + "# another one\n")
            refused(client, 1)
            (folder / "train.py").write_text(script)
            threads.append(threading.Thread(target=join, args=(str(found.path), 1, Path("runs"))))
            threads[0].start()
            until = time.monotonic() + 90
            while client.where([4]) != {4: "waiting"} and time.monotonic() < until:
                time.sleep(0.05)
        address = found.control.read_text()
        found.control.write_text(address.replace('"token":"', '"token":"x'))
        with closing(ControlClient(found)) as client:
            refused(client, 1)

    outcome = run(tmp_path, transport, [], respawn=3, act=act, words=words, period=period)
    for thread in threads:
        thread.join(30)
    assert (outcome.code, outcome.wrong) == (0, []), outcome.output
    assert said == [
        "25 workers cannot share every batch of this run: 4 train now, and at most 24 can",
        "train.py has changed since the run was started, so who runs it now cannot join",
        "the token is wrong",
    ]
    assert "rank 4 has joined after" in outcome.output
    assert "done with 5 workers" in outcome.output
    assert "rank 4 has joined" in capsys.readouterr().out
    assert (tmp_path / "weights-4").exists()
    (told,) = changes(tmp_path, 4)
    assert told[:4] == [[], [], [4], 5]
    assert changes(tmp_path, 0) == [told]
    assert len((tmp_path / "drawn-4").read_text().splitlines()) > 60
    if "--checkpoint" in words:
        assert len(read_newest(tmp_path / "kept", lambda state: None).workers) == 5
