"""Workers leave a running run, and the others share their work: every sample once, the same weights."""

from __future__ import annotations

import os
import signal
from contextlib import closing

import pytest
from tests.losses import changes, pid_of, run

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
