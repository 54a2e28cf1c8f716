"""Writes checkpoints in the background: every worker its part, while training goes on.

    pause       the worker lists the tensors, and copies those that may change before the next step
    copying     a thread copies the rest, weights and optimizer states, during the next forward and backward
                pass; the next optimizer step waits for the end of the copy
    writing     the thread writes and hashes this worker's file; the leader's thread waits for the others'
                files, adds `state.json`, and gives the checkpoint its name

What all workers have is divided among those that see the leader's disk, found out once for each folder. A
worker that does not see it sends the leader what only it has. Nothing else is sent.

Where workers may be lost, all are on one machine. They agree for each checkpoint on its name and on who
writes. If a writer is lost before all parts are there, the checkpoint is void, and the one before stays.
"""

from __future__ import annotations

import queue
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import torch
import xxhash
from torch import Tensor

from echelon.checkpoint import folder, state_tree, store
from echelon.checkpoint.part import Changed, Part, PartMemory, divided
from echelon.checkpoint.state_tree import Node
from echelon.checkpoint.store import Keeping, Written
from echelon.comm.changing import GroupChanges
from echelon.comm.group import Group
from echelon.errors import CheckpointError
from echelon.train.resume import on_leader
from echelon.train.run_state import RunState

_POLL_S = 0.005
_LOOK_S = 0.1  # how often the launcher is asked whether a writer was lost
_AFTER_FAILURE_S = 2.0


@dataclass(frozen=True, slots=True)
class _Disk:
    """A folder of checkpoints: which workers see the leader's, and the name of what they write there."""

    root: Path
    token: str
    writers: tuple[int, ...]


@dataclass(slots=True, kw_only=True)
class SaveJob:
    """A checkpoint under way, on one worker. `pause_s` is how long training stood still for it.

    rank, size  this worker's, and how many write or send parts, when it began
    view        how often members had changed then; `slots` are those members
    void        a writer was lost before it was complete
    """

    step: int
    disk: _Disk
    rank: int
    size: int
    view: int = 0
    slots: Sequence[int] = ()
    void: bool = False
    name: str
    keeping: Keeping
    figures: Mapping[str, float]
    part: Part | None = None
    later: Sequence[str] = ()
    versions: Mapping[str, int] = field(default_factory=dict)
    own: Node = None
    common: Node = None
    lead: Node = None
    signature: str = ""
    far: Mapping[int, bytes] = field(default_factory=dict)
    begun: float = field(default_factory=time.perf_counter)
    pause_s: float = 0.0
    seconds: float = 0.0
    copied: threading.Event = field(default_factory=threading.Event)
    done: threading.Event = field(default_factory=threading.Event)
    written: Written | None = None
    error: CheckpointError | None = None


class CheckpointWriter:
    """Writes one worker's parts, one checkpoint after the other. All workers call it alike."""

    def __init__(self, group: Group, nodes: Sequence[str]) -> None:
        self._group = group
        self._nodes = nodes
        self._disks: dict[Path, _Disk] = {}
        self._memory = PartMemory()
        self._jobs: queue.SimpleQueue[SaveJob | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._now: SaveJob | None = None
        self._finished: list[SaveJob] = []
        self._count = 0
        self._abandoned = threading.Event()
        self._hides = True  # whether copies may be made while training goes on
        self._token = secrets.token_hex(8)
        self._last: SaveJob | None = None

    @property
    def busy(self) -> bool:
        """Whether this worker still copies or writes."""
        return self._now is not None and not self._now.done.is_set()

    def save(
        self, root: Path, state: RunState, *, keeping: Keeping, figures: Mapping[str, float], hide: bool
    ) -> SaveJob:
        """Begin a checkpoint. With `hide`, weights are copied later; until then only a step changes them.

        If the checkpoint before is still being written, this waits for it.
        """
        begun = time.perf_counter()
        self.await_written()
        self._count += 1
        job = self._begin(root, state.step, keeping, figures)
        job.begun = begun
        self._note_lost_leader()
        self._last = job
        if job.void:
            job.copied.set()
            job.done.set()
            if not (self._group.changes and self._group.changes.is_catching_up):
                job.error = _void(job, "a worker")
                self._finished.append(job)
            return job
        try:
            self._prepare(job, state, hide=hide and self._hides)
        except CheckpointError as error:
            job.error = error
        if job.rank in job.disk.writers:
            self._now = job
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="echelon-checkpoint", daemon=True)
                self._thread.start()
            self._jobs.put(job)
        else:
            job.copied.set()
            job.done.set()
        job.pause_s = time.perf_counter() - begun
        return job

    def _begin(self, root: Path, step: int, keeping: Keeping, figures: Mapping[str, float]) -> SaveJob:
        """Find out who writes, and under which name."""
        changes, number = self._group.changes, 0
        if changes is None:
            disk = self._disk(root)
            name = f"{disk.token}-{self._count}"
        else:
            disk, name, number = self._agreed(root, changes)
        job = SaveJob(
            step=step,
            disk=disk,
            name=name,
            rank=self._group.rank,
            size=self._group.size,
            keeping=keeping,
            figures=figures,
        )
        if changes is not None:
            job.view, job.slots = changes.number, changes.members
            # Others have begun it before somebody was lost, and this worker was not there yet; or it comes
            # back, and repeats what the others did.
            job.void = changes.number != number or changes.is_catching_up
        return job

    def _agreed(self, root: Path, changes: GroupChanges) -> tuple[_Disk, str, int]:
        """The folder that all see, and the leader's name of the checkpoint and number of changes."""
        try:
            folder.make_root(root)
        except OSError as error:
            raise store.write_error(error, root) from error
        mine = msgspec.json.encode([self._token, self._count, changes.number])
        token, count, number = msgspec.json.decode(self._group.broadcast_bytes(mine))
        return _Disk(root, token, tuple(range(self._group.size))), f"{token}-{count}", number

    def await_copied(self) -> None:
        """Wait until what is saved may change."""
        job = self._now
        if job is not None and not job.copied.is_set():
            begun = time.perf_counter()
            job.copied.wait()
            job.pause_s += time.perf_counter() - begun

    def await_written(self) -> None:
        """Wait until this worker's part, and on the leader the whole checkpoint, is on disk."""
        job = self._now
        if job is not None:
            job.done.wait()  # ends by the deadline of the leader's wait

    def result(self, job: SaveJob) -> Written | None:
        """Wait for a checkpoint; returns it on the leader. A failure raises on all workers.

        If it is void, `job.void` is true on all workers, and it can be begun again.
        """
        job.done.wait()
        if self._group.changes is not None:
            self._finished = [one for one in self._finished if one is not job]
            self._judge(job)
            return job.written

        def act() -> Written | None:
            if job.error is not None:
                raise job.error
            return job.written

        self._finished = [one for one in self._finished if one is not job]
        return on_leader(self._group, act)

    def _judge(self, job: SaveJob) -> None:
        """Where members may be lost: all learn from the leader how a checkpoint ended."""
        void = job.rank != 0 or job.void  # as the leader of now, whoever was not it then knows nothing
        mine: dict[str, str] = {"void": "yes"} if void else {}
        if not void and job.error is not None:
            mine = {"message": job.error.message, "where": job.error.where, "fix": job.error.fix}
        told = msgspec.json.decode(
            self._group.broadcast_bytes(msgspec.json.encode(mine)), type=dict[str, str]
        )
        job.void = "void" in told
        if "message" in told:
            raise CheckpointError(told["message"], where=told["where"], fix=told["fix"])

    def finished(self) -> list[SaveJob]:
        """The jobs that have ended since the last call."""
        self._note_lost_leader()
        found, self._finished = self._finished, []
        return found

    def _note_lost_leader(self) -> None:
        """On the leader of now: the last checkpoint is void if its leader was lost before it was there."""
        last = self._last
        if last is None or last.rank == 0 or self._group.rank != 0:
            return
        self._last = None
        if not last.void and not folder.target_of(last.disk.root, last.step).exists():
            last.void, last.error = True, _void(last, "its leader")
            self._finished = [*(job for job in self._finished if job is not last), last]

    def close(self, *, failed: bool) -> None:
        """Wait for what is being written. After a failure, only a moment: others may never write."""
        if self._now is not None and failed and not self._now.done.wait(_AFTER_FAILURE_S):
            self._abandoned.set()
        self.await_written()
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()
            self._thread = None

    # Preparing a job, in the training thread -------------------------------------------------------

    def _disk(self, root: Path) -> _Disk:
        """Who sees the leader's folder; found out once for each folder, by all workers together."""
        known = self._disks.get(root)
        if known is not None:
            if self._group.rank == 0:
                folder.make_root(root)
            return known

        def act() -> str:
            token = secrets.token_hex(8)
            try:
                folder.make_root(root)
                if self._group.size > 1:
                    _mark(root, token).touch()
            except OSError as error:
                raise store.write_error(error, root) from error
            return token

        token = self._group.broadcast_bytes((on_leader(self._group, act) or "").encode()).decode()
        sees = self._group.rank == 0 or _mark(root, token).exists()
        mine = torch.tensor([int(sees)])
        seen = self._group.all_gather(mine) if self._group.size > 1 else [mine]
        if self._group.rank == 0:
            _mark(root, token).unlink(missing_ok=True)
        disk = _Disk(root, token, tuple(rank for rank, one in enumerate(seen) if int(one)))
        self._disks[root] = disk
        return disk

    def _prepare(self, job: SaveJob, state: RunState, *, hide: bool) -> None:
        rank, disk = job.rank, job.disk
        job.far = self._from_far(disk, state) if len(disk.writers) < job.size else {}
        job.own, tensors = state_tree.leaves(state.own, "own.")
        mine: dict[str, Tensor] = {}
        if rank == 0 or (state.same_on_all and rank in disk.writers):
            job.common, common = state_tree.leaves(state.common)
            writers = disk.writers if state.same_on_all else (0,)
            sizes = {name: one.numel() * one.element_size() for name, one in common.items()}
            mine = {name: common[name] for name in divided(sizes, len(writers))[writers.index(rank)]}
            job.signature = _signature(common) if state.same_on_all else ""
        if rank == 0:
            job.lead, lead = state_tree.leaves(state.lead, "lead.")
            tensors |= lead
        if rank not in disk.writers:
            return
        whole = tensors | mine
        job.part = Part.of(whole, self._memory)
        if hide:
            stays = [
                name
                for name, one in mine.items()
                if one.device.type == "cpu" and one.data_ptr() not in state.changing
            ]
            job.later, job.versions = stays, job.part.versions(stays)
        job.part.copy(whole.keys() - set(job.later))

    def _from_far(self, disk: _Disk, state: RunState) -> dict[int, bytes]:
        """On the leader: the own states of workers that do not see its disk."""
        far = [rank for rank in range(self._group.size) if rank not in disk.writers]
        if not far:
            return {}
        own, error = _nothing(), None
        if self._group.rank in far:
            try:
                own = torch.frombuffer(bytearray(state_tree.pack(state.own)), dtype=torch.uint8)
            except CheckpointError as found:
                error = found  # the others exchange all the same
        exchanged = self._group.all_to_all(
            [own if rank == 0 else _nothing() for rank in range(self._group.size)]
        )
        parts = exchanged.received.wait()
        if error is not None:
            raise error
        return {rank: bytes(parts[rank].numpy()) for rank in far} if self._group.rank == 0 else {}

    # Carrying it out, in the background ------------------------------------------------------------

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                self._carry_out(job)
            except CheckpointError as error:
                job.error = error
            except OSError as error:
                job.error = store.write_error(error, job.disk.root, job.rank)
            finally:
                job.copied.set()
                job.seconds = time.perf_counter() - job.begun
                self._finished.append(job)
                job.done.set()

    def _carry_out(self, job: SaveJob) -> None:
        root, rank = job.disk.root, job.rank
        with folder.unfinished(root, job.name) as hidden:
            try:
                if job.error is not None:
                    store.note_failure(hidden, rank, 0, job.error.message)
                    raise job.error
                assert job.part is not None
                self._copy(job.part, job, hidden)
                store.write_part(hidden, rank, job.part, job.own, job.signature)
                if rank == 0:
                    self._complete(job, hidden)
            except BaseException:
                if rank == 0:
                    folder.remove_hidden(root, job.name)
                raise
        if rank == 0:
            store.tidy(root, job.step, job.keeping, spare=self._is_later(job))

    def _is_later(self, job: SaveJob) -> Callable[[str], bool]:
        """Whether a hidden folder is of a later checkpoint of this run, which others have begun."""
        number = int(job.name.rpartition("-")[2])

        def is_later(name: str) -> bool:
            token, _, other = name.rpartition("-")
            return token == job.disk.token and int(other) > number

        return is_later

    def _copy(self, part: Part, job: SaveJob, hidden: Path) -> None:
        try:
            part.copy(job.later, job.versions)
        except Changed as changed:
            self._hides = False
            why = f"{changed} was changed while it was copied"
            store.note_failure(hidden, job.rank, 0, why)
            raise CheckpointError(
                f"the checkpoint of step {job.step} is not consistent: {why}",
                where=f"rank {job.rank}",
                fix="change weights in optimizer.step() only; the next copies are made at once, in a pause",
            ) from None
        finally:
            job.copied.set()

    def _complete(self, job: SaveJob, hidden: Path) -> None:
        for far, packed in job.far.items():
            if not packed:
                raise CheckpointError(
                    f"rank {far} on {self._nodes[far]} could not send its state",
                    where=str(job.disk.root),
                    fix="see that worker's log",
                )
            own, tensors = state_tree.leaves(state_tree.unpack(packed), "own.")
            part = Part.of(tensors, PartMemory())
            part.copy(tensors)
            store.write_part(hidden, far, part, own, job.signature)
        until = time.monotonic() + self._group.deadline_s
        ranks = range(job.size)
        look_at = time.monotonic() + _LOOK_S
        while missing := store.missing_notes(hidden, ranks):
            if self._group.changes is not None and time.monotonic() > look_at:
                look_at = time.monotonic() + _LOOK_S
                lost = self._group.changes.lost(job.view, job.slots)
                if lost and store.missing_notes(hidden, ranks):
                    job.void = True
                    raise _void(job, ", ".join(f"rank {slot}" for slot in lost))
            if time.monotonic() > until or self._abandoned.is_set():
                who = ", ".join(f"rank {rank} on {self._nodes[rank]}" for rank in missing)
                raise CheckpointError(
                    f"the checkpoint of step {job.step} is not complete: no part came from {who}",
                    where=str(job.disk.root),
                    fix="see that worker's log and its disk; earlier checkpoints are intact",
                )
            time.sleep(_POLL_S)
        job.written = store.commit(
            hidden,
            folder.target_of(job.disk.root, job.step),
            step=job.step,
            common=job.common,
            lead=job.lead,
            ranks=job.size,
            figures=job.figures,
        )


def _void(job: SaveJob, who: str) -> CheckpointError:
    return CheckpointError(
        f"the checkpoint of step {job.step} is void: {who} was lost before it was complete",
        where=str(job.disk.root),
        fix="nothing: earlier checkpoints are intact, and the next one is due soon",
    )


def _mark(root: Path, token: str) -> Path:
    return root / f".seen-{token}"


def _nothing() -> Tensor:
    return torch.empty(0, dtype=torch.uint8)


def _signature(tensors: Mapping[str, Tensor]) -> str:
    """A number for the names, types and shapes of tensors."""
    listed = [(name, str(one.dtype), tuple(one.shape)) for name, one in tensors.items()]
    return str(xxhash.xxh3_64_hexdigest(repr(listed).encode()))
