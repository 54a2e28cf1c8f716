"""What the launcher sees of workers' progress."""

from __future__ import annotations

import os

from echelon.membership.stuck import WorkerSeen, WorkPhase
from echelon.train.progress import PROGRESS_VARIABLE, OwnProgress, ProgressTable


def test_the_launcher_sees_what_a_worker_does(tmp_path):
    table = ProgressTable(tmp_path / "progress")
    assert table.read(3) is None
    own = OwnProgress.from_environment({PROGRESS_VARIABLE: str(table.file)}, 3)
    own.computes()
    own.waits(7)
    assert table.read(3) == (
        os.getpid(),
        WorkerSeen(operation=7, phase=WorkPhase.WAITING, batches=1, rounds=0),
    )
    own.reduced()
    own.goes_on()
    found = table.read(3)
    assert found is not None
    assert (found[1].phase, found[1].rounds) == (WorkPhase.ELSEWHERE, 1)
    assert table.read(2) is None


def test_the_next_process_of_a_slot_begins_anew(tmp_path):
    table = ProgressTable(tmp_path / "progress")
    first = OwnProgress(table.file, 0)
    first.waits(9)
    first.reduced()
    table.clear(0)
    assert table.read(0) is None
    OwnProgress(table.file, 0)
    assert table.read(0) == (os.getpid(), WorkerSeen(operation=0, phase=WorkPhase.ELSEWHERE))


def test_without_a_file_of_the_launcher_nothing_is_written(tmp_path):
    own = OwnProgress.from_environment({PROGRESS_VARIABLE: str(tmp_path / "elsewhere")}, 0)
    own.waits(1)
    own.computes()
    OwnProgress.from_environment({}, 0).reduced()
