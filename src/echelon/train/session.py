"""The session: what a training script talks to, alone or as one of many workers.

    session = echelon.join()
    model, optimizer, loader = session.prepare(model, optimizer, loader)
    for epoch in session.epochs(10):
        for x, y in loader:
            ...

The script's own objects come back: the same module, the same optimizer, a loader that draws this
worker's share. Gradients are those of the global batch when `backward()` returns.

What a session can do is in the classes that it inherits, one upon the other: `collectives.py` and
`script_log.py`, `script_checkpoints.py`, `script_members.py`, `script_layout.py`, `script_loop.py`,
`script_prepare.py`. Here are its beginning and its end.
"""

from __future__ import annotations

import atexit
import logging
import os
from types import TracebackType
from typing import NoReturn

import torch

from echelon.comm.group import Group
from echelon.comm.meet.links import Links
from echelon.comm.meet.rendezvous import Rendezvous
from echelon.errors import EchelonError
from echelon.observe.readiness import WorkerPhase, tell
from echelon.observe.run_folder import RunFolder
from echelon.plan.plan import Plan
from echelon.plan.shares import ShareTable
from echelon.train import run_state
from echelon.train.arranging import Arranger
from echelon.train.auto_shares import AutoShares
from echelon.train.change_calls import ChangeCalls
from echelon.train.changes import MemberChanges
from echelon.train.checkpoint_writer import CheckpointWriter
from echelon.train.clock import StepClock
from echelon.train.collectives import ScriptCollectives
from echelon.train.coming_back import ComingBack
from echelon.train.families.choose import choose
from echelon.train.families.synchronizer import Synchronizer
from echelon.train.leaving import LeaveSignal
from echelon.train.loader import SharedLoader, Sharing
from echelon.train.memory_watch import MemoryWatch
from echelon.train.own_cycles import OwnCycles
from echelon.train.profiling import JobProfiling, ProfiledRun
from echelon.train.record import RunRecord
from echelon.train.script_log import ScriptLog
from echelon.train.script_prepare import ScriptPrepare
from echelon.train.verifying import make_verifier, weights_of_shards

_log = logging.getLogger(__name__)


class Session(ScriptPrepare):
    """One worker's part in a run. `echelon.join` makes it.

    folder  the run's folder; None if nothing is recorded
    device  the device that models and batches are moved to

    A session ends with the script. As a context manager it ends with its block:

        with echelon.join() as session:
            model, optimizer, loader = session.prepare(model, optimizer, loader)
    """

    folder: RunFolder | None
    device: torch.device

    def __init__(
        self,
        group: Group,
        rendezvous: Rendezvous | None,
        plan: Plan,
        clock: StepClock,
        record: RunRecord,
        device: torch.device,
        links: Links | None = None,
    ) -> None:
        ScriptCollectives.__init__(self, group, [worker.node for worker in plan.workers])
        self._changes = group.changes if isinstance(group.changes, MemberChanges) else None
        ScriptLog.__init__(
            self, record, clock, plan, group.rank if self._changes is None else self._changes.slot
        )
        self._first_workers = group.size  # others may join later
        self._change_calls = ChangeCalls()
        self._leave_signal = LeaveSignal()
        self._rendezvous = rendezvous
        self.folder = record.folder
        self.device = device
        self._prepared = run_state.Prepared()
        self._writer = CheckpointWriter(group, self._nodes)
        self._verifier = make_verifier(
            plan,
            group,
            clock,
            record,
            optimizers=self._prepared.optimizers,
            weights=lambda: self._synchronizer.replicas(),
            warn=self.warn,
        )
        self._copies = self._verifier.copies
        self._synchronizer: Synchronizer = choose(
            plan,
            group,
            clock,
            links,
            self.explain,
            inspector=self._verifier if self._verifier.in_rounds else None,
            copies=self._copies,
        )
        self._sharing: Sharing | None = None
        members = rendezvous.members[: group.size] if rendezvous is not None else []
        self._shares = ShareTable(weights_of_shards(plan.weights[: self._first_workers], self._copies))
        self._auto_shares: AutoShares | None = None
        self._arranger: Arranger | None = None
        self._layout = "data"
        self._thread_replicas = 0
        self._threaded = []
        self._links = links
        self._memory = MemoryWatch(
            group, self._nodes, plan.workers[group.rank].memory, record.emit, self.explain
        )
        self._adapt_to_speeds(members)
        self._current: SharedLoader | None = None
        self._coming_back: ComingBack | None = None
        self._cycles: OwnCycles | None = None
        self._share = 0
        self._first_epoch = 0
        self._closed = False
        self._watch_over()
        self._follow_members()
        seen = ProfiledRun(self, plan, record.folder, members, links, clock, self._prepared.loaders)
        self._profiling = JobProfiling(seen if self.is_leader and group.size > 1 else None)
        self._lay_out(plan.parallel, where="--parallel")

    def close(self, cause: str = "") -> None:
        """Leave the run. Called by itself when the script or the `with` block ends.

        cause  why the script failed, for the other workers and the record; empty if it did not
        """
        if self._closed:
            return
        self._closed = True
        if self._by_itself is not None:
            self._by_itself.signal.remove()
        self._writer.close(failed=bool(cause))
        self._report_saved()
        self._guard.remove()
        self._end_threads()
        self._verifier.remove()
        self._profiling.end()
        self._memory.end(self.rank)
        if cause:
            self._leave(cause)
            return
        self._guard.close()
        try:
            self._synchronizer.settle()
        except EchelonError as error:
            self._leave(f"{type(error).__name__}: {error.message}")
            raise
        self._leave("")

    def _end_here(self) -> NoReturn:
        """This worker has left the run between two steps: nothing of the script comes after its loop."""
        text = f"rank {self._log_rank} has left the run after {self.step} steps: its script ends here"
        _log.warning(text, extra={"is_noted": True})  # the launcher tells the user
        self._closed = True
        if self._by_itself is not None:
            self._by_itself.signal.remove()
        self._writer.close(failed=False)
        self._guard.remove()
        self._end_threads()
        self._verifier.remove()
        self._profiling.end()
        self._leave("")
        raise SystemExit(0)

    def _leave(self, cause: str) -> None:
        self._leave_signal.remove()
        self._clock.close()
        totals = self._verifier.totals()
        if totals is not None and self.is_leader:
            self._record.emit(totals)
        self._record.flush()
        try:
            if self._changes is not None:
                self._changes.left(failed=bool(cause))
            if self._rendezvous is not None:
                self._rendezvous.announce_departure(cause)
            self._synchronizer.close()
            self._weights.detach()
            self._group.close()
            self._synchronizer.closed()
            if self._rendezvous is not None:
                self._rendezvous.linger()
        finally:
            tell(WorkerPhase.LEFT)
            self._record.end(cause)  # last: by now the other workers have written their events
            atexit.unregister(self.close)

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        ended = error is None or (isinstance(error, SystemExit) and not error.code)
        self.close("" if ended else f"{type(error).__name__}: {error}")

    def __repr__(self) -> str:
        return f"<Session rank {self.rank} of {self.world_size} on {self.node}, pid {os.getpid()}>"
