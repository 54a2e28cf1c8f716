"""Writes checkpoints atomically, and finds the newest readable one.

    <root>/step-000000123/tensors.safetensors   the tensors
    <root>/step-000000123/state.json            everything else, and checksums of both files

A checkpoint is written into a hidden folder, forced to disk, and renamed: under its own name it is
complete, or it does not exist. A killed writer or a full disk leaves earlier checkpoints intact. Reading
detects any missing or changed byte, and falls back to the checkpoint before.

`state.json` is `{"checksum":"<16 hex digits>"` followed by the rest. The checksum is the xxh3-64 of exactly
that rest, so that the file is verified before any of it is used.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from echelon.checkpoint.state_tree import flatten, restore
from echelon.errors import CheckpointError

_FORMAT = 1
_TENSORS = "tensors.safetensors"
_STATE = "state.json"
_HEAD = b'{"checksum":"'
_DIGITS = 16
_TREE = b',"tree":'
_END = b"}\n"
_STEP = re.compile(r"step-(\d{9,})(\.replaced)?")
_TEMPORARY = ".checkpoint-"  # unfinished, or being removed
_CHUNK_BYTES = 1 << 22
_log = logging.getLogger(__name__)

Accept = Callable[[dict[str, Any]], str | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """A checkpoint that is complete on disk."""

    path: Path
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The newest usable checkpoint; `rejected` names newer ones, each with the reason."""

    path: Path
    step: int
    state: dict[str, Any]
    rejected: dict[str, str] = field(default_factory=dict)


class _Damaged(Exception):
    """The reason why a checkpoint cannot be read."""


def write(root: Path, step: int, state: dict[str, Any], *, keep: int = 2) -> Written:
    """Write one checkpoint, then remove the oldest so that `keep` remain up to this step.

    Checkpoints of later steps, from a run that went further, are not touched.
    """
    if keep < 1 or step < 0:
        raise CheckpointError(
            f"cannot write step {step} and keep {keep} checkpoints",
            fix="step must be at least 0, keep at least 1",
        )
    tree, tensors = flatten(state)
    target = root / f"step-{step:09d}"
    try:
        _make_root(root)
        with _temporary(root) as temporary:
            size_bytes = _fill(temporary, step, tree, tensors)
            _put(temporary, target)
    except (OSError, SafetensorError) as error:
        raise _write_error(error, target) from error
    _tidy(root, step, keep)
    return Written(path=target, size_bytes=size_bytes)


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
            step, state = _read(path)
        except (_Damaged, CheckpointError) as error:
            rejected[path.name] = error.message if isinstance(error, CheckpointError) else str(error)
            continue
        reason = accept(state)
        if reason is None:
            return Found(path=path, step=step, state=state, rejected=rejected)
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
        found = sorted(((step, not aside, path) for step, aside, path in _steps(root)), reverse=True)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise CheckpointError(
            f"{root} cannot be read: {error.strerror}", where=str(root), fix="make the folder readable"
        ) from error
    if not found and ((root / _STATE).exists() or _STEP.fullmatch(root.name)):
        return [root]
    return [path for _, _, path in found]


def _steps(root: Path) -> list[tuple[int, bool, Path]]:
    """For each checkpoint: its step, whether a newer one replaced it, and its folder."""
    matches = [match for path in root.iterdir() if (match := _STEP.fullmatch(path.name))]
    return [(int(match[1]), match[2] is not None, root / match.string) for match in matches]


# Writing


def _make_root(root: Path) -> None:
    if not root.is_dir():
        root.mkdir(parents=True, exist_ok=True)
        _sync(root.parent)


@contextlib.contextmanager
def _temporary(root: Path) -> Iterator[Path]:
    """A hidden folder that is removed afterwards, unless it was renamed."""
    path, handle = _claim(root)
    try:
        yield path
    finally:
        os.close(handle)
        shutil.rmtree(path, ignore_errors=True)


def _claim(root: Path) -> tuple[Path, int]:
    """Create a hidden folder, with a lock that shows that its writer is alive.

    The kernel releases the lock when the writer dies, so a hidden folder whose lock is free is abandoned.
    Another writer may find the folder before it is locked, and remove it: then create another.
    """
    while True:
        path = root / f"{_TEMPORARY}{uuid.uuid4().hex}"
        path.mkdir()
        try:
            handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            continue
        if _lock(handle) is not False and path.exists():
            return path, handle
        os.close(handle)


def _lock(handle: int) -> bool | None:
    """Take the lock; False if another process has it, None if the file system has no locks."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _fill(folder: Path, step: int, tree: bytes, tensors: dict[str, Tensor]) -> int:
    """Write both files and force them to disk."""
    tensors_file, state_file = folder / _TENSORS, folder / _STATE
    save_file(tensors, tensors_file)
    size_bytes = tensors_file.stat().st_size
    facts = {
        "format": _FORMAT,
        "step": step,
        "tensors_bytes": size_bytes,
        "tensors_xxh3": _hash(tensors_file),
    }
    rest = b'",' + json.dumps(facts)[1:-1].encode() + _TREE + tree + _END
    digest = xxhash.xxh3_64_hexdigest(rest).encode()
    state_file.write_bytes(_HEAD + digest + rest)
    tensors_file.chmod(state_file.stat().st_mode)  # safetensors makes it readable only by its owner
    for path in (tensors_file, state_file, folder):
        _sync(path)
    return size_bytes + state_file.stat().st_size


def _put(temporary: Path, target: Path) -> None:
    """Rename the finished folder. At every moment the old or the new checkpoint can be found."""
    aside = target.with_name(target.name + ".replaced")
    if target.exists():
        _discard(aside)
        target.rename(aside)
    try:
        temporary.rename(target)
    except OSError:
        if aside.exists():
            aside.rename(target)
        raise
    _sync(target.parent)


def _tidy(root: Path, step: int, keep: int) -> None:
    """Remove old checkpoints. The new one is safe, so a failure here is only logged."""
    try:
        upto = [found for found in _steps(root) if found[0] <= step]
        kept = sorted({found[0] for found in upto}, reverse=True)[:keep]
        for old_step, aside, path in upto:
            if old_step not in kept or (aside and path.with_suffix("").exists()):
                _discard(path)
        for path in root.glob(f"{_TEMPORARY}*"):
            _sweep(path)
    except OSError as error:
        _log.warning("old checkpoints in %s could not be removed: %s", root, error)


def _discard(path: Path) -> None:
    """Remove a checkpoint so that it is never partly visible under its name."""
    hidden = path.with_name(f"{_TEMPORARY}{uuid.uuid4().hex}")
    try:
        path.rename(hidden)
    except FileNotFoundError:
        return
    shutil.rmtree(hidden, ignore_errors=True)


def _sweep(path: Path) -> None:
    """Remove a hidden folder whose writer is dead, holding its lock so that nobody else takes it."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:
        return
    try:
        if _lock(handle):
            shutil.rmtree(path, ignore_errors=True)
    finally:
        os.close(handle)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


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


def _write_error(error: OSError | SafetensorError, target: Path) -> CheckpointError:
    """The error for a failed write. safetensors reports the system's error only as text."""
    number = error.errno if isinstance(error, OSError) else None
    match = re.search(r"\(os error (\d+)\)", str(error))
    if number is None and match is not None:
        number = int(match[1])
    return CheckpointError(
        f"the checkpoint cannot be written: {os.strerror(number) if number else error}",
        where=str(target),
        fix=_FIXES.get(number or 0, "save to another folder") + "; earlier checkpoints are intact",
    )


# Reading


def _read(path: Path) -> tuple[int, dict[str, Any]]:
    """Step and state of one checkpoint; raises _Damaged or CheckpointError with the reason."""
    try:
        facts, tree = _checked_state(path / _STATE)
        tensors = _checked_tensors(path / _TENSORS, facts)
    except OSError as error:
        raise _Damaged(f"{Path(error.filename or path).name}: {error.strerror or error}") from error
    except (SafetensorError, ValueError, KeyError) as error:
        raise _Damaged(f"{type(error).__name__}: {error}") from error
    state = restore(tree, tensors)
    if not isinstance(state, dict):
        raise _Damaged(f"{_STATE} contains no state")
    return facts["step"], state


def _checked_state(file: Path) -> tuple[dict[str, Any], bytes]:
    """The metadata of the checkpoint, and the state's JSON."""
    data = file.read_bytes()
    head, rest = data[: len(_HEAD) + _DIGITS], data[len(_HEAD) + _DIGITS :]
    if head != _HEAD + xxhash.xxh3_64_hexdigest(rest).encode():
        raise _Damaged(f"{_STATE} is truncated or damaged: its checksum differs")
    written, _, tree = data.partition(_TREE)
    facts: dict[str, Any] = json.loads(written + b"}")
    if facts["format"] != _FORMAT:
        raise _Damaged(f"it has format {facts['format']}; this version of Echelon reads format {_FORMAT}")
    return facts, tree.removesuffix(_END)


def _checked_tensors(file: Path, facts: dict[str, Any]) -> dict[str, Tensor]:
    size_bytes, wanted_bytes = file.stat().st_size, facts["tensors_bytes"]
    if size_bytes != wanted_bytes:
        raise _Damaged(f"{_TENSORS} has {size_bytes} bytes, but {wanted_bytes} were written")
    if _hash(file) != facts["tensors_xxh3"]:
        raise _Damaged(f"{_TENSORS} is damaged: its checksum differs")
    # Read, not memory-mapped: the state must not depend on a file that may be replaced or removed.
    return load_file(file, backend="pread")


def _hash(file: Path) -> str:
    digest = xxhash.xxh3_64()
    with file.open("rb", buffering=0) as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            digest.update(chunk)
    return str(digest.hexdigest())
