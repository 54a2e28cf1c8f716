"""The record of a run on one worker: its events; where no launcher writes them, the run's start and end.

Under `echelon run` the launcher writes the start, the end and the summary, and shows the folder. Alone, and
under any other launcher, the leader does.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from pathlib import Path

from echelon.observe.events import Event, RunEnded, RunStarted
from echelon.observe.recorder import Recorder
from echelon.observe.run_folder import RunFolder
from echelon.observe.summary import write_summary
from echelon.plan.plan import Plan

_log = logging.getLogger(__name__)


class RunRecord:
    """One worker's record; without a folder nothing is kept. `owned`: this worker starts and ends it."""

    def __init__(self, folder: RunFolder | None, rank: int, *, owned: bool) -> None:
        self.folder = folder
        self.recorder = Recorder(folder.events_of(rank) if folder else None)
        self._rank = rank
        self._owned = owned and folder is not None

    def begin(self, plan: Plan) -> None:
        """Write the plan and the run's start, if this worker owns the record."""
        if not self._owned or self.folder is None:
            return
        self.folder.plan.write_text(plan.to_toml())
        self.emit(
            RunStarted(
                t=time.time(),
                rank=self._rank,
                run=self.folder.name,
                command=sys.argv,
                world_size=len(plan.workers),
                sync=plan.sync,
            )
        )

    def emit(self, event: Event) -> None:
        """Record an event."""
        self.recorder.emit(event)

    def flush(self) -> None:
        """Write all events that are pending."""
        self.recorder.flush()

    def end(self, cause: str) -> None:
        """Close the record. Its owner writes how the run ended and says where the record is."""
        if not self._owned or self.folder is None:
            self.recorder.close()
            return
        outcome, detail = "completed", ""
        if cause.startswith("KeyboardInterrupt"):
            outcome, detail = "interrupted", "SIGINT"
        elif cause:
            outcome, detail = "failed", f"rank {self._rank}: {cause}"
        self.emit(RunEnded(t=time.time(), rank=self._rank, outcome=outcome, detail=detail))
        self.recorder.close()
        try:
            write_summary(self.folder)
        except OSError as error:
            _log.warning("the summary could not be written: %s", error)
        path = _shown(self.folder.path)
        if sys.stderr is not None:  # a process without a console has none
            sys.stderr.write(f"record: {path} (echelon report {path})\n")


def _shown(path: Path) -> str:
    """The path from the current folder, if it is below that."""
    here = Path.cwd()
    return os.fspath(path.relative_to(here) if path.is_relative_to(here) else path)
