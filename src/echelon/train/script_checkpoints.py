"""How does a script keep where it is, and go on from there? `session.save`, `session.load`, or by itself.

The session inherits both. What a checkpoint holds is in `run_state.py`, how it is written in
`checkpoint_writer.py`. With `--checkpoint-every`, or `join(checkpoint=...)`, the session saves by itself:
when the loop asks for a batch after a step, or at the end of an epoch. There the script has done all that
belongs to the step, and the position in the data is known.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from echelon.checkpoint.retention import Best
from echelon.checkpoint.store import Keeping, Written
from echelon.config.every import Every
from echelon.config.exit_codes import SAVED_AND_STOPPED
from echelon.observe.events import CheckpointLoaded, CheckpointSaved
from echelon.plan.shares import ShareTable
from echelon.train import resume, run_state
from echelon.train.checkpoint_writer import CheckpointWriter, SaveJob
from echelon.train.collectives import ScriptCollectives
from echelon.train.families.synchronizer import Synchronizer
from echelon.train.guard import Guard
from echelon.train.loader import SharedLoader
from echelon.train.script_log import ScriptLog
from echelon.train.stopping import Agreement, StopSignal

_CLAIM_LOOK_S = 0.25
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSettings:
    """Where and how often a session saves by itself, and which checkpoints stay."""

    root: Path
    every: Every
    keep: int = 3
    best: Best | None = None


class SavesByItself:
    """What a session needs to save by itself."""

    def __init__(self, settings: CheckpointSettings, agreement: Agreement) -> None:
        self.settings = settings
        self.agreement = agreement
        self.signal = StopSignal()
        self.loads = True  # whether the newest checkpoint is still to be loaded
        self.step = 0  # when the loop asked for a batch last
        self.saved_at = time.monotonic()
        self.saved_step = -1
        self.epochs = 0  # since the last checkpoint
        self.void = False  # the last one is void, since a writer was lost
        self.looked_at = 0.0

    @property
    def due(self) -> bool:
        """Whether a checkpoint is due by the clock, or again."""
        every_s = self.settings.every.seconds
        return self.void or (bool(every_s) and time.monotonic() - self.saved_at >= every_s)

    def saved(self, step: int) -> None:
        """A checkpoint has begun."""
        self.saved_at, self.saved_step, self.epochs, self.void = time.monotonic(), step, 0, False

    def place(self) -> dict[str, Any]:
        """Where this worker is, for one that comes back to the run."""
        return {"agreement": self.agreement.place(), "epochs": self.epochs, "saved": self.saved_step}

    def go_to(self, place: Mapping[str, Any], step: int) -> None:
        """Go on where another worker is, at this step."""
        self.loads = False
        self.step, self.saved_at = step, time.monotonic()
        self.epochs, self.saved_step = int(place["epochs"]), int(place["saved"])
        self.agreement.go_to([int(number) for number in place["agreement"]])


class ScriptCheckpoints(ScriptCollectives, ScriptLog):
    """The session's checkpoints; the session sets what is declared here."""

    _prepared: run_state.Prepared
    _synchronizer: Synchronizer
    _shares: ShareTable
    _guard: Guard
    _first_epoch: int
    _writer: CheckpointWriter
    _by_itself: SavesByItself | None = None

    def close(self, cause: str = "") -> None:
        """Leave the run."""
        raise NotImplementedError

    def _claim(self, what: str, count: int) -> int:
        raise NotImplementedError

    @property
    def _comes_back(self) -> bool:
        """Whether this worker was started again, and gets the state of another one."""
        return False

    @property
    def _is_out(self) -> bool:
        """Whether this worker is left out for a while, and what it computes does not count."""
        return False

    def _unlogged(self) -> AbstractContextManager[None]:
        """Around an exchange that a worker that comes back does not repeat."""
        return nullcontext()

    def save(
        self,
        path: str | Path,
        *,
        extra: dict[str, Any] | None = None,
        keep: int = 2,
        best: str | None = None,
        wait: bool = True,
    ) -> None:
        """Write a checkpoint: all that was prepared, the position in the data, random streams, residuals.

        path   the folder of the checkpoints
        extra  anything else to keep: numbers, text, tensors, lists and dicts of these
        keep   how many checkpoints stay in the folder, the newest ones
        best   one more stays: that with the lowest loss (loss), the highest accuracy (accuracy), or by a
               number in `extra` (f1:max, wer:min); loss and accuracy are those of `log_evaluation`
        wait   False: return when the state is safe from changes, and write it while training goes on.
               Weights are copied during the next forward and backward pass, and must not be changed but
               by the next `optimizer.step()`, which waits for the copy

        All workers call it, and each writes a part. Example:

            session.save("checkpoints", extra={"best": best}, keep=3, best="accuracy", wait=False)
        """
        rule = Best.parse(best, where="session.save, best") if best else None
        if self._is_out:
            return
        self._agree(f"save {path}")
        if wait:
            self._guard.check_weights("save")
        keeping = Keeping(keep=keep, best=rule)
        job = self._begin_save(Path(path), extra or {}, keeping, hide=not wait)
        if wait:
            self._finish_save(job, Path(path), extra or {}, keeping)

    def _begin_save(self, root: Path, extra: dict[str, Any], keeping: Keeping, *, hide: bool) -> SaveJob:
        self._writer.await_copied()
        self._report_saved()
        own = run_state.own_part(self._synchronizer)
        self._synchronizer.before_save()
        try:
            state = run_state.collect(
                self._prepared,
                self._synchronizer,
                self._shares,
                own,
                step=self.step,
                epoch=self.epoch,
                extra=extra,
            )
            figures = {**self._figures(), **_numbers(extra)}
            hides = hide and self._synchronizer.same_on_all
            return self._writer.save(root, state, keeping=keeping, figures=figures, hide=hides)
        finally:
            self._synchronizer.after_save()

    def _finish_save(self, job: SaveJob, root: Path, extra: dict[str, Any], keeping: Keeping) -> None:
        """Wait until it is written; if a writer was lost meanwhile, those who are left begin it again."""
        written = self._writer.result(job)
        while job.void and not (self._group.changes and self._group.changes.is_catching_up):
            job = self._begin_save(root, extra, keeping, hide=False)
            written = self._writer.result(job)
        self._record_saved(job, written)

    def _figures(self) -> dict[str, float]:
        """The last evaluation's figures, if they are of these weights."""
        return dict(self.evaluated[1]) if self.evaluated[0] == self.step else {}

    def _record_saved(self, job: SaveJob, written: Written | None) -> None:
        if written is None:
            return
        self._record.emit(
            CheckpointSaved(
                t=time.time(),
                rank=self.rank,
                path=str(written.path),
                step=job.step,
                seconds=job.seconds,
                size_bytes=written.size_bytes,
                pause_s=job.pause_s,
            )
        )

    def _report_saved(self) -> None:
        """Record the checkpoints that were written meanwhile, and say which were not."""
        for job in self._writer.finished():
            if job.error is None:
                self._record_saved(job, job.written)
            elif self.rank == 0:
                if self._by_itself is not None:
                    self._by_itself.void |= job.void
                self.warn(f"{job.error.message}; training goes on ({job.error.where}: {job.error.fix})")

    def load(self, path: str | Path, *, required: bool = True) -> dict[str, Any] | None:
        """Continue from the newest usable checkpoint in a folder; returns the `extra` it was saved with.

        path      the folder of the checkpoints
        required  False: a folder without checkpoints is a fresh start, and None is returned

        Call it after `prepare`, on all workers. A checkpoint that is damaged, or of another model, is
        skipped with a warning, and the one before it is used. Example:

            extra = session.load("checkpoints", required=False)
            best = extra["best"] if extra else 0.0
        """
        self._agree(f"load {path}")
        if self._by_itself is not None:
            self._by_itself.loads = False
        self._writer.await_written()
        self._synchronizer.before_load()
        found = resume.read(Path(path), self._group, self._prepared, required=required)
        if found is None:
            self._synchronizer.nothing_loaded()
            return None
        for name, reason in found.rejected.items():
            if self.rank == 0:
                self.warn(f"checkpoint {name} was passed over: {reason}")
        self._first_epoch = run_state.restore(
            self._prepared, self._synchronizer, self._shares, self.rank, self.world_size, found
        )
        self._clock.step = found.step
        self._clock.epoch = self._first_epoch
        if self._by_itself is not None:
            self._by_itself.step = self._by_itself.saved_step = found.step
        self._record.emit(
            CheckpointLoaded(
                t=time.time(),
                rank=self.rank,
                path=str(found.path),
                step=found.step,
                rejected=found.rejected,
            )
        )
        extra: dict[str, Any] = found.state["extra"]
        return extra

    # By itself -------------------------------------------------------------------------------------

    def save_by_itself(self, settings: CheckpointSettings) -> None:
        """From now on save as these settings say, and continue from the newest checkpoint, if any."""
        self._by_itself = SavesByItself(settings, Agreement(self._group))
        self._by_itself.signal.install()

    def _continue(self, *, counts: bool) -> None:
        """Load the newest checkpoint before the first pass; `counts`: the session counts the epochs."""
        own = self._by_itself
        if own is None or not own.loads:
            return
        own.loads = False
        if not self._prepared.models or self._comes_back:
            return
        with self._unlogged():
            found = self.load(own.settings.root, required=False)
        if found is not None and self.rank == 0:
            self.note(f"continues at step {self.step}, from a checkpoint in {own.settings.root}")
            if not counts:
                self.warn(
                    "the script counts its epochs itself, so it begins with its first one again; "
                    "use `for epoch in session.epochs(n)`"
                )

    def _asked(self, loader: SharedLoader) -> None:
        """The loop asks for a batch: save or stop, if a step was taken and it is time to."""
        self._report_saved()
        own = self._by_itself
        if own is None or not loader.trains or self.step == own.step:
            return
        own.step = self.step
        if self._synchronizer.claims:
            if self._someone_stops(own):
                self._synchronizer.depart()
                self._stop(own)
            return
        agreed = own.agreement.look(stop=own.signal.received, due=own.due, busy=self._writer.busy)
        if agreed.stop:
            self._stop(own)
        every = own.settings.every.steps
        if agreed.due or (every and self.step % every == 0):
            self._save_now(own)

    def _someone_stops(self, own: SavesByItself) -> bool:
        """Whether a worker must stop, where workers take steps of their own: a counter says so."""
        now = time.monotonic()
        if self.world_size == 1 or (not own.signal.received and now - own.looked_at < _CLAIM_LOOK_S):
            return own.signal.received
        own.looked_at = now
        return bool(self._claim("stop", int(own.signal.received)) or own.signal.received)

    def _epoch_ended(self) -> None:
        """An epoch of `session.epochs` is over: save or stop if it is time to."""
        self._report_saved()
        own = self._by_itself
        if own is None or not self._prepared.models:
            return
        own.epochs += 1
        every = own.settings.every
        due = own.due or (bool(every.epochs) and own.epochs >= every.epochs)
        if every.steps and self._synchronizer.claims:
            due = due or self.step - max(0, own.saved_step) >= every.steps
        due = due or own.settings.best is not None
        agreed = own.agreement.now(stop=own.signal.received, due=due)
        if agreed.stop:
            self._stop(own)
        if agreed.due:
            self._save_now(own)

    def _save_now(self, own: SavesByItself) -> None:
        own.saved(self.step)
        keeping = Keeping(keep=own.settings.keep, best=own.settings.best)
        self._begin_save(own.settings.root, {}, keeping, hide=True)

    def _stop(self, own: SavesByItself) -> NoReturn:
        """Write a last checkpoint, and end this process; all workers do."""
        keeping = Keeping(keep=own.settings.keep, best=own.settings.best)
        job = self._begin_save(own.settings.root, {}, keeping, hide=False)
        self._finish_save(job, own.settings.root, {}, keeping)
        if self.rank == 0:
            self.note(f"stopped by SIGTERM after a last checkpoint at step {self.step}")
        self.close()
        raise SystemExit(SAVED_AND_STOPPED)


def _numbers(extra: dict[str, Any]) -> dict[str, float]:
    """The numbers in `extra`, by which a checkpoint may be the best."""
    return {
        name: float(value)
        for name, value in extra.items()
        if isinstance(name, str) and type(value) in (int, float) and math.isfinite(value)
    }
