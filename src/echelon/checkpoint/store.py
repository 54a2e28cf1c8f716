"""Writes checkpoints whose parts come from one worker or from several, and finds the newest readable one.

    <root>/step-000000123/state.json                  see manifest.py: all but tensors, and all checksums
    <root>/step-000000123/tensors.safetensors         the leader's part
    <root>/step-000000123/tensors-00001.safetensors   the part of rank 1, and so on

All parts are written into one hidden folder and forced to disk; the leader adds `state.json` and renames
the folder. Under its own name a checkpoint is complete, or it does not exist: a killed writer or a full
disk leaves earlier checkpoints intact. Reading detects any missing or changed byte, and falls back to the
checkpoint before.

A part is followed by a note with its checksum and the worker's tree, under a name that begins with a dot;
the leader reads the notes into `state.json` and removes them. A writer that fails leaves a note of that.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from echelon.checkpoint import folder
from echelon.checkpoint.manifest import FORMAT, STATE_FILE, Damaged, Manifest, figures_in
from echelon.checkpoint.part import Part, PartFacts, PartMemory, hash_of
from echelon.checkpoint.retention import Best, kept
from echelon.checkpoint.state_tree import Node, leaves, restore_node
from echelon.errors import CheckpointError

_NOTE = ".note-"
_FAILED = ".failed-"
_log = logging.getLogger(__name__)

Accept = Callable[[dict[str, Any]], str | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """A checkpoint that is complete on disk."""

    path: Path
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The newest usable checkpoint; `rejected` names newer ones, each with the reason.

    `state` is what the workers had in common and what the leader added; `workers` is what each had of its
    own, by rank.
    """

    path: Path
    step: int
    state: dict[str, Any]
    workers: Sequence[dict[str, Any]] = ()
    rejected: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Keeping:
    """Which checkpoints stay: how many of the newest, and the best by a figure."""

    keep: int = 2
    best: Best | None = None

    def __post_init__(self) -> None:
        if self.keep < 1:
            raise CheckpointError(
                f"cannot keep {self.keep} checkpoints", where="keep", fix="keep at least one"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class PartNote:
    """What a worker tells the leader about its part.

    `signature` is a number for what it believes all workers have in common.
    """

    facts: PartFacts
    own: Node
    signature: str


# Writing


def part_file(rank: int) -> str:
    """The name of a rank's part."""
    return f"tensors-{rank:05d}.safetensors" if rank else "tensors.safetensors"


def write_part(hidden: Path, rank: int, part: Part, own: Node, signature: str) -> None:
    """Write a worker's part into the hidden folder, then its note; raises CheckpointError."""
    try:
        facts = part.write(hidden / part_file(rank))
        note = {
            "facts": [facts.file, facts.size_bytes, facts.xxh3],
            "own": own,
            "signature": signature,
        }
        beside = hidden / f".writing{_NOTE}{rank}"
        beside.write_bytes(json.dumps(note, allow_nan=False, separators=(",", ":")).encode("ascii"))
        folder.sync(beside)
        beside.rename(hidden / f"{_NOTE}{rank}")
    except OSError as error:
        note_failure(hidden, rank, error.errno or 0)
        raise write_error(error, hidden.parent, rank) from error


def note_failure(hidden: Path, rank: int, number: int, why: str = "") -> None:
    """Tell the leader that a part will not come. On a full disk the file stays empty, and has its name."""
    beside = hidden / f".writing{_FAILED}{rank}"
    with contextlib.suppress(OSError):
        beside.write_text(why)
    with contextlib.suppress(OSError):  # then the leader waits in vain, until its deadline
        beside.rename(hidden / f"{_FAILED}{rank}-{number}")


def missing_notes(hidden: Path, ranks: Sequence[int]) -> list[int]:
    """The ranks whose parts are not there yet; raises CheckpointError if one has failed."""
    there = {path.name for path in hidden.iterdir()}
    for name in there:
        match = re.fullmatch(re.escape(_FAILED) + r"(\d+)-(\d+)", name)
        if match is not None:
            error = OSError(int(match[2]) or None, (hidden / name).read_text())
            raise write_error(error, hidden.parent, int(match[1]))
    return [rank for rank in ranks if f"{_NOTE}{rank}" not in there]


def commit(
    hidden: Path,
    target: Path,
    *,
    step: int,
    common: Node,
    lead: Node,
    ranks: int,
    figures: Mapping[str, float],
) -> Written:
    """Make a checkpoint of a hidden folder in which all parts are."""
    try:
        notes = [_note(hidden, rank) for rank in range(ranks)]
        differs = [rank for rank, note in enumerate(notes) if note.signature != notes[0].signature]
        if differs:
            raise CheckpointError(
                f"rank {differs[0]} has other models or optimizers than rank 0, so their parts do not fit",
                where=str(target),
                fix="prepare the same models and optimizers on all workers, and give them the same states",
            )
        manifest = Manifest(
            step=step,
            parts=[note.facts for note in notes],
            common=common,
            lead=lead,
            workers=[note.own for note in notes],
            figures=figures,
            format=FORMAT,
        )
        data = manifest.encode()
        (hidden / STATE_FILE).write_bytes(data)
        for rank in range(ranks):
            (hidden / f"{_NOTE}{rank}").unlink()
        for path in (hidden / STATE_FILE, hidden):
            folder.sync(path)
        folder.put(hidden, target)
    except OSError as error:
        raise write_error(error, target) from error
    return Written(path=target, size_bytes=len(data) + sum(note.facts.size_bytes for note in notes))


def _note(hidden: Path, rank: int) -> PartNote:
    told = json.loads((hidden / f"{_NOTE}{rank}").read_bytes())
    file, size_bytes, xxh3 = told["facts"]
    facts = PartFacts(file=file, size_bytes=size_bytes, xxh3=xxh3)
    return PartNote(facts=facts, own=told["own"], signature=told["signature"])


def write(
    root: Path,
    step: int,
    state: dict[str, Any],
    *,
    keep: int = 2,
    best: Best | None = None,
    figures: Mapping[str, float] | None = None,
) -> Written:
    """Write a checkpoint of one writer, then remove those that no longer stay."""
    if keep < 1 or step < 0:
        raise CheckpointError(
            f"cannot write step {step} and keep {keep} checkpoints",
            fix="step must be at least 0, keep at least 1",
        )
    lead, tensors = leaves(state, "lead.")
    target = folder.target_of(root, step)
    try:
        folder.make_root(root)
        with folder.unfinished(root) as hidden:
            part = Part.of(tensors, PartMemory())
            part.copy(tensors)
            write_part(hidden, 0, part, None, "")
            written = commit(
                hidden, target, step=step, common=None, lead=lead, ranks=1, figures=figures or {}
            )
    except OSError as error:
        raise write_error(error, target) from error
    tidy(root, step, Keeping(keep=keep, best=best))
    return written


def tidy(
    root: Path, step: int, keeping: Keeping, *, spare: Callable[[str], bool] = lambda name: False
) -> None:
    """Remove checkpoints up to this step that no longer stay, and what dead writers have left.

    Checkpoints of later steps, from a run that went further, are not touched, nor are hidden folders to be
    spared. The new checkpoint is safe, so a failure here is only logged.
    """
    try:
        upto = [found for found in folder.steps(root) if found[0] <= step]
        figures = {found[0]: _figures(found[2]) if keeping.best else {} for found in upto if not found[1]}
        figures = {found[0]: {} for found in upto} | figures
        stay = kept(figures, keep=keeping.keep, best=keeping.best)
        for old_step, aside, path in upto:
            if old_step not in stay or (aside and path.with_suffix("").exists()):
                folder.discard(path)
        folder.sweep(root, spare=spare)
    except OSError as error:
        _log.warning("old checkpoints in %s could not be removed: %s", root, error)


def _figures(path: Path) -> dict[str, float]:
    try:
        return figures_in((path / STATE_FILE).read_bytes())
    except OSError:
        return {}


_FIXES = {
    errno.ENOSPC: "free space on that disk, or save to another",
    errno.EDQUOT: "free space in your quota, or save elsewhere",
    errno.EFBIG: "raise the file size limit (ulimit -f), or save elsewhere",
    errno.EROFS: "save to a folder that can be written to",
    errno.EACCES: "save to a folder that you may write to",
    errno.EPERM: "save to a folder that you may write to",
    errno.ENOTDIR: "save to a folder; a file is in the way",
    errno.EEXIST: "save to a folder; a file is in the way",
}


def write_error(error: OSError, where: Path, rank: int = 0) -> CheckpointError:
    """The error for a failed write."""
    reason = os.strerror(error.errno) if error.errno else error.strerror or error
    whose = f"rank {rank}'s part of " if rank else ""
    return CheckpointError(
        f"{whose}the checkpoint cannot be written: {reason}",
        where=str(where),
        fix=_FIXES.get(error.errno or 0, "save to another folder") + "; earlier checkpoints are intact",
    )


# Reading


def read_newest(root: Path, accept: Accept) -> Found:
    """The newest checkpoint under `root` that is intact and that `accept` gives no reason to refuse.

    If `root` is the folder of one checkpoint, only that one is read.
    """
    candidates = _candidates(root)
    if not candidates:
        what = "contains no checkpoint" if root.is_dir() else "does not exist"
        raise CheckpointError(
            f"nothing to load: {root} {what}",
            where=str(root),
            fix="give the folder that checkpoints were saved to",
        )
    rejected: dict[str, str] = {}
    for path in candidates:
        try:
            step, state, workers = _read(path)
        except (Damaged, CheckpointError) as error:
            rejected[path.name] = error.message if isinstance(error, CheckpointError) else str(error)
            continue
        reason = accept(state)
        if reason is None:
            return Found(path=path, step=step, state=state, workers=workers, rejected=rejected)
        rejected[path.name] = reason
    reasons = "; ".join(f"{name}: {reason}" for name, reason in rejected.items())
    raise CheckpointError(
        f"no checkpoint can be used: {reasons}",
        where=str(root),
        fix="load from another folder, or start without a checkpoint",
    )


def exists(root: Path) -> bool:
    """Whether there is any checkpoint, readable or not."""
    return bool(_candidates(root))


def _candidates(root: Path) -> list[Path]:
    """The checkpoint folders, newest first; a replaced checkpoint comes after its replacement."""
    try:
        found = sorted(((step, not aside, path) for step, aside, path in folder.steps(root)), reverse=True)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise CheckpointError(
            f"{root} cannot be read: {error.strerror}", where=str(root), fix="make the folder readable"
        ) from error
    if not found and ((root / STATE_FILE).exists() or folder.is_named(root)):
        return [root]
    return [path for _, _, path in found]


def _read(path: Path) -> tuple[int, dict[str, Any], list[dict[str, Any]]]:
    """Step, state and workers' own states of one checkpoint; raises Damaged or CheckpointError."""
    try:
        manifest = Manifest.decode((path / STATE_FILE).read_bytes())
        tensors = [_checked_tensors(path, part) for part in manifest.parts]
    except OSError as error:
        raise Damaged(f"{Path(error.filename or path).name}: {error.strerror or error}") from error
    except (SafetensorError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise Damaged(f"{type(error).__name__}: {error}") from error
    if manifest.tree is not None:
        state, workers = restore_node(manifest.tree, tensors[0]), []
    else:
        together = {name: tensor for part in tensors for name, tensor in part.items()}
        state = restore_node(manifest.lead, tensors[0])
        common = restore_node(manifest.common, together)
        state = {**(common or {}), **state} if isinstance(state, dict) else None
        owned = zip(manifest.workers, tensors, strict=True)
        workers = [restore_node(own, part) or {} for own, part in owned]
    if not isinstance(state, dict):
        raise Damaged(f"{STATE_FILE} contains no state")
    return manifest.step, state, workers


def _checked_tensors(folder_of: Path, part: PartFacts) -> dict[str, Tensor]:
    file = folder_of / part.file
    size_bytes = file.stat().st_size
    if size_bytes != part.size_bytes:
        raise Damaged(f"{part.file} has {size_bytes} bytes, but {part.size_bytes} were written")
    if hash_of(file) != part.xxh3:
        raise Damaged(f"{part.file} is damaged: its checksum differs")
    # Read, not memory-mapped: the state must not depend on a file that may be replaced or removed.
    return load_file(file, backend="pread")
