"""The runs of a folder, with their figures: what `echelon runs` shows."""

from __future__ import annotations

from pathlib import Path

import msgspec

from echelon.errors import ConfigError
from echelon.observe.events import LAUNCHER, decode_line
from echelon.observe.follow import read_run
from echelon.observe.run_folder import RunFolder
from echelon.observe.summary import Summary, summarise
from echelon.observe.sync import policy_of
from echelon.plan.plan import Plan


class ListedRun(msgspec.Struct, frozen=True, kw_only=True):
    """One run. A figure is None, or a word empty, if the run has not got so far as to record it."""

    name: str
    path: str
    started: float | None
    workers: int
    sync: str
    codec: str
    steps: int
    train_loss: float | None
    test_loss: float | None
    accuracy: float | None
    outcome: str
    failure: str
    size_bytes: int


def list_runs(root: Path) -> list[ListedRun]:
    """The runs in `root`, newest first."""
    folders = [RunFolder(path) for path in root.glob("*") if (path / "events").is_dir()]
    records = [_record(folder) for folder in folders]
    return sorted(records, key=lambda record: (record.started or 0.0, record.name), reverse=True)


def _record(folder: RunFolder) -> ListedRun:
    summary = _summary(folder)
    try:
        plan = Plan.read(folder.plan)
        workers, sync, codec = len(plan.workers), plan.sync, plan.codec
    except ConfigError:  # it failed before it had a plan
        workers, sync, codec = summary.world_size, policy_of(folder), ""
    return ListedRun(
        name=folder.name,
        path=str(folder.path),
        started=_started(folder),
        workers=workers,
        sync=sync,
        codec=codec,
        steps=summary.steps,
        train_loss=summary.train_loss,
        test_loss=summary.test_loss,
        accuracy=summary.accuracy,
        outcome=summary.outcome,
        failure=summary.failure,
        size_bytes=sum(file.stat().st_size for file in folder.path.rglob("*") if file.is_file()),
    )


def _summary(folder: RunFolder) -> Summary:
    """The figures that were written at the end; those of the events so far if there are none."""
    try:
        return msgspec.json.decode(folder.summary.read_bytes(), type=Summary)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return summarise(read_run(folder), policy_of(folder))


def _started(folder: RunFolder) -> float | None:
    """The time of the first event: the launcher's, or the leader's if another launcher started it."""
    for rank in (LAUNCHER, 0):
        try:
            with folder.events_of(rank).open("rb") as lines:
                event = decode_line(next(lines, b""))
        except OSError:
            continue
        if event is not None:
            return event.t
    return None
