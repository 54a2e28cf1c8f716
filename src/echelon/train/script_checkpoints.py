"""How does a script keep where it is, and go on from there? `session.save` and `session.load`.

The session inherits both. What a checkpoint holds is in `resume.py`, how it is written in `saving.py`.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from echelon.observe.events import CheckpointLoaded, CheckpointSaved
from echelon.train import resume
from echelon.train.collectives import ScriptCollectives
from echelon.train.families.synchronizer import Synchronizer
from echelon.train.guard import Guard
from echelon.train.script_log import ScriptLog


class ScriptCheckpoints(ScriptCollectives, ScriptLog):
    """The session's checkpoints; the session sets what is declared here."""

    _prepared: resume.Prepared
    _synchronizer: Synchronizer
    _guard: Guard
    _first_epoch: int

    def save(self, path: str | Path, *, extra: dict[str, Any] | None = None, keep: int = 2) -> None:
        """Write a checkpoint: all that was prepared, the position in the data and the random state.

        path   the folder of the checkpoints
        extra  anything else to keep: numbers, text, tensors, lists and dicts of these
        keep   how many checkpoints stay in the folder, the newest ones

        All workers call it; the leader writes. Example:

            session.save("checkpoints", extra={"best": best})
        """
        begun = time.perf_counter()
        self._agree(f"save {path}")
        self._guard.check_weights("save")
        self._synchronizer.before_save()
        try:
            state = resume.gather(
                self._prepared,
                self._group,
                step=self.step,
                epoch=self.epoch,
                extra=extra or {},
                residuals=self._synchronizer.residuals(),
            )
            written = resume.write(Path(path), self._group, state, keep=keep)
        finally:
            self._synchronizer.after_save()
        if written is not None:
            self._record.emit(
                CheckpointSaved(
                    t=time.time(),
                    rank=self.rank,
                    path=str(written.path),
                    step=self.step,
                    seconds=time.perf_counter() - begun,
                    size_bytes=written.size_bytes,
                )
            )

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
        self._synchronizer.settle()
        found = resume.read(Path(path), self._group, self._prepared, required=required)
        if found is None:
            return None
        for name, reason in found.rejected.items():
            if self.rank == 0:
                self.warn(f"checkpoint {name} was passed over: {reason}")
        self._first_epoch = resume.restore(self._prepared, self._group, found.state)
        self._synchronizer.loaded()
        self._synchronizer.restore_residuals(found.state.get("codecs", []))
        self._clock.step = found.step
        self._clock.epoch = self._first_epoch
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
