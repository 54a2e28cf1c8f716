"""The record of a run on one worker: its events; where no launcher writes them, the run's start and end.

Under `echelon run` the launcher writes the start, the end and the summary, and shows the folder. Alone, and
under any other launcher, the leader does. Then the leader's folder may be on a disk that others do not see:
it writes a marker there, and a worker or server that cannot read it sends its events (`far_events.py`).
"""

from __future__ import annotations

import logging
import os
import secrets
import sys
import tempfile
import time
from pathlib import Path

import msgspec

from echelon.comm.meet import stream
from echelon.comm.meet.board import decode_value
from echelon.comm.meet.place import Place
from echelon.comm.meet.rendezvous import Rendezvous
from echelon.errors import ConfigError
from echelon.observe.events import Event, RunEnded, RunStarted
from echelon.observe.recorder import Recorder
from echelon.observe.run_folder import RunFolder
from echelon.observe.summary import write_summary
from echelon.plan.plan import Plan
from echelon.train.far_events import EventReceiver, EventSender

_MARKER = ".marker"
_log = logging.getLogger(__name__)


class _LeadersFolder(msgspec.Struct, frozen=True):
    """Where the leader keeps the record, and what its marker says."""

    path: str
    marker: str


class RunRecord:
    """One worker's record; without a folder nothing is kept. `owned`: this worker starts and ends it."""

    def __init__(self, folder: RunFolder | None, rank: int, *, owned: bool) -> None:
        self.folder = folder
        self.recorder = Recorder(folder.events_of(rank) if folder else None)
        self._rank = rank
        self._owned = owned and folder is not None
        self._sender: EventSender | None = None
        self._receiver: EventReceiver | None = None

    @classmethod
    def of_leader(cls, root: Path, name: str, rendezvous: Rendezvous | None, place: Place) -> RunRecord:
        """A new folder, for all workers and servers. Those that cannot see it send their events."""
        folder = RunFolder.create(root, name)
        record = cls(folder, 0, owned=True)
        if rendezvous is None:
            return record
        told = _LeadersFolder(str(folder.path), secrets.token_hex(16))
        (folder.path / _MARKER).write_text(told.marker)
        rendezvous.publish("folder", msgspec.json.encode(told).decode())
        others = range(1, place.process_count)
        far = [rank for rank in others if rendezvous.lookup(f"sees-folder/{rank}", of=rank) != "yes"]
        (folder.path / _MARKER).unlink(missing_ok=True)
        if far:
            timeout_s = rendezvous.timeout_s
            streams = stream.answer(rendezvous, place, far, timeout_s=timeout_s)
            names = {rank: str(rendezvous.members[rank]) for rank in far}
            record._receiver = EventReceiver(streams, folder, names)
        return record

    @classmethod
    def of_other(cls, rendezvous: Rendezvous, place: Place) -> RunRecord:
        """The record of any other worker or server: in the leader's folder, or sent there."""
        told = decode_value(rendezvous.lookup("folder"), _LeadersFolder, key="folder", peer="rank 0")
        folder = RunFolder(Path(told.path))
        sees = _reads(folder.path / _MARKER) == told.marker and os.access(folder.events, os.W_OK)
        rendezvous.publish(f"sees-folder/{place.rank}", "yes" if sees else "no")
        if sees:
            return cls(folder, place.rank, owned=False)
        leader = stream.dial_leader(rendezvous, place, timeout_s=rendezvous.timeout_s)
        here = Path(tempfile.mkdtemp(prefix="echelon-"))
        record = cls(RunFolder(here / folder.name).with_subfolders(), place.rank, owned=False)
        assert record.folder is not None
        record._sender = EventSender(leader, record.folder, record.flush)
        return record

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
            if self._sender is not None:
                self._sender.close()
            return
        if self._receiver is not None:
            self._receiver.close()
        outcome, detail = "completed", ""
        if cause.startswith("KeyboardInterrupt"):
            outcome, detail = "interrupted", "SIGINT"
        elif cause:
            outcome, detail = "failed", f"rank {self._rank}: {cause}"
        self.emit(RunEnded(t=time.time(), rank=self._rank, outcome=outcome, detail=detail))
        self.recorder.close()
        try:
            write_summary(self.folder)
        except (OSError, ConfigError) as error:
            _log.warning("the summary could not be written: %s", error)
        path = _shown(self.folder.path)
        if sys.stderr is not None:  # a process without a console has none
            sys.stderr.write(f"record: {path} (echelon report {path})\n")


def _reads(file: Path) -> str:
    try:
        return file.read_text()
    except (OSError, UnicodeDecodeError):
        return ""


def _shown(path: Path) -> str:
    """The path from the current folder, if it is below that."""
    here = Path.cwd()
    return os.fspath(path.relative_to(here) if path.is_relative_to(here) else path)
