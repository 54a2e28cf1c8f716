"""Can every worker read the chunks it needs? Those that it cannot are copied from workers that can.

Without a folder that all machines see, chunks lie on the disks of the machines that wrote them. Workers
tell each other what they can read. A missing chunk travels over the run's own connections, and one worker
on each machine that lacks it writes it to a file, which is removed as soon as all workers of the machine
have mapped it. A chunk that no worker can read is an error on all workers.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import msgspec
import xxhash

from echelon.comm.group import Group
from echelon.config.units import show_bytes
from echelon.data.chunk import this_host
from echelon.data.dataset import ChunkDataset, unreadable
from echelon.errors import DataError

_BLOCK_BYTES = 8 << 20
_log = logging.getLogger(__name__)

# The chunks that each worker needs, once it is known where the workers are.
Needs = Callable[[ChunkDataset], Sequence[set[int]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """A worker's machine, the chunks that it can read, and what its catalogue says."""

    host: str
    has: set[int]
    fingerprint: str = ""
    chunk_hosts: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Copying:
    """One chunk that travels: from a worker that has it, to one worker of each machine that lacks it."""

    number: int
    source: int
    keepers: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyReport:
    """A worker's copies, by chunk, or why it has none."""

    host: str
    kept: dict[int, str]
    problem: str


def meet(dataset: ChunkDataset, group: Group, needs: Needs, *, keep_files: bool) -> None:
    """Find out where the workers are, and let each of them read what it needs. All workers call it.

    keep_files  whether copies stay until the worker ends, for processes that open them themselves
    """
    if group.size == 1:
        return
    count = len(dataset.catalogue.chunks)
    mine = Reach(
        host=this_host(),
        has={number for number in range(count) if dataset.has(number)},
        fingerprint=dataset.catalogue.fingerprint,
        chunk_hosts=dataset.chunk_hosts if group.rank == 0 else (),
    )
    told = group.all_gather_bytes(msgspec.json.encode(mine))
    reaches = [msgspec.json.decode(one, type=Reach) for one in told]
    if len({reach.fingerprint for reach in reaches}) > 1:
        return  # workers have different data, which `prepare` is about to say
    dataset.hosts = tuple(reach.host for reach in reaches)
    dataset.chunk_hosts = reaches[0].chunk_hosts  # if each worker wrote the table for itself, they differ
    needed = needs(dataset)
    plan = copies(reaches, needed)
    if isinstance(plan, tuple):
        number, rank = plan
        raise unreadable(dataset.catalogue, number, reaches[rank].host)
    if plan:
        folder = Path(tempfile.mkdtemp(prefix="echelon-data-"))
        try:
            _copy_all(dataset, group, plan, needed[group.rank], folder)
        finally:
            if keep_files:
                dataset.own(folder)
            else:
                shutil.rmtree(folder, ignore_errors=True)


def copies(reaches: Sequence[Reach], needed: Sequence[set[int]]) -> list[Copying] | tuple[int, int]:
    """Which chunks travel, and how; or a chunk that nobody can read, and a worker that needs it. Pure."""
    lacking: dict[int, list[int]] = {}
    for rank, reach in enumerate(reaches):
        for number in needed[rank] - reach.has:
            lacking.setdefault(number, []).append(rank)
    plan = []
    for number, ranks in sorted(lacking.items()):
        holders = [rank for rank, reach in enumerate(reaches) if number in reach.has]
        if not holders:
            return number, ranks[0]
        keepers = {reaches[rank].host: rank for rank in reversed(ranks)}  # the first rank of each machine
        plan.append(Copying(number=number, source=holders[0], keepers=tuple(sorted(keepers.values()))))
    return plan


def _copy_all(
    dataset: ChunkDataset, group: Group, plan: Sequence[Copying], needed: set[int], folder: Path
) -> None:
    """Carry out the plan; copies that this worker writes are in `folder` until all have mapped them."""
    chunks = dataset.catalogue.chunks
    total = sum(chunks[copying.number].size_bytes for copying in plan)
    if group.rank == 0:
        _log.warning(
            "%d of %d chunks (%s) are not on every machine that needs them; they are copied from other "
            "workers. A folder that all machines see saves this: loader_of(..., folder=...)",
            len(plan),
            len(chunks),
            show_bytes(total),
        )
    mine = sum(chunks[copying.number].size_bytes for copying in plan if group.rank in copying.keepers)
    free = shutil.disk_usage(folder).free
    lack = f"{show_bytes(mine)} are needed in {folder.parent}, {show_bytes(free)} are free"
    _tell(group, {}, lack if mine > free else "")
    kept: dict[int, str] = {}
    problem = ""
    for copying in plan:
        target = folder / chunks[copying.number].name if group.rank in copying.keepers else None
        try:
            _copy(dataset, group, copying, target)
        except OSError as error:
            problem = problem or f"{chunks[copying.number].name}: {error.strerror or error}"
        else:
            if target is not None:
                kept[copying.number] = str(target)
    for report in _tell(group, kept, problem):
        if report.host == this_host():
            for number, path in report.kept.items():
                if number in needed and not dataset.has(number):
                    dataset.use_copy(number, Path(path))
    group.barrier()  # now all have mapped what they need


def _tell(group: Group, kept: dict[int, str], problem: str) -> list[CopyReport]:
    """What all workers report; if any has a problem, all raise."""
    mine = msgspec.json.encode(CopyReport(host=this_host(), kept=kept, problem=problem))
    told = [msgspec.json.decode(one, type=CopyReport) for one in group.all_gather_bytes(mine)]
    for rank, report in enumerate(told):
        if report.problem:
            raise DataError(
                f"chunks could not be copied to {report.host}: {report.problem}",
                where=f"prepare, rank {rank}",
                fix="give loader_of folder=, a folder that all machines see",
            )
    return told


def _copy(dataset: ChunkDataset, group: Group, copying: Copying, target: Path | None) -> None:
    """Send one chunk to all workers, block by block; raises OSError after the last block, never between."""
    chunk = dataset.catalogue.chunks[copying.number]
    digest = xxhash.xxh3_64()
    failed: OSError | None = None
    with contextlib.ExitStack() as stack:
        reading: BinaryIO | None = None
        writing: BinaryIO | None = None
        try:
            if group.rank == copying.source:
                reading = stack.enter_context(dataset.catalogue.path(copying.number).open("rb"))
            if target is not None:
                writing = stack.enter_context(target.open("xb"))
        except OSError as error:
            failed = error
        for start in range(0, chunk.size_bytes, _BLOCK_BYTES):
            length = min(_BLOCK_BYTES, chunk.size_bytes - start)
            block = b""
            try:
                if reading is not None:
                    block = reading.read(length)
            except OSError as error:
                failed = error
            block = group.broadcast_bytes(block, copying.source)
            digest.update(block)
            if writing is not None and failed is None:
                try:
                    writing.write(block)
                except OSError as error:
                    failed = error
    if failed is not None:
        raise failed
    if digest.hexdigest() != chunk.checksum:
        raise OSError(f"what rank {copying.source} read is not what was written")
