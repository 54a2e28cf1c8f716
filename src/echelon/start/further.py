"""How does a worker start that joins a running run? As its last worker did, in a slot of its own.

It runs the same script, which must not have changed: it would exchange other things than the members.
"""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from echelon.plan.plan import Plan
from echelon.start.command import WorkerCommand
from echelon.sync.policies.full import Full
from echelon.sync.policies.local import Local
from echelon.sync.policy import POLICIES


def further_worker(last: WorkerCommand, slot: int) -> WorkerCommand:
    """The command of a worker that joins; `last` is that of the last worker that was planned."""
    env = {**last.env, "RANK": str(slot), "WORLD_SIZE": str(slot + 1), "LOCAL_RANK": str(slot)}
    return replace(last, rank=slot, env=env, program=())


def why_nobody_joins(plan: Plan, *, saves: bool = False, elsewhere: bool = False) -> str:
    """What the run has that a further worker cannot take part in yet; empty if there is nothing.

    elsewhere  it would be on another machine than those of the run
    """
    policy = POLICIES.build(plan.sync, where="--sync").resolved()
    alike = isinstance(policy, Full) or (isinstance(policy, Local) and policy.periods is None)
    found = {
        "--checkpoint": saves and elsewhere,
        # Graphs and groups name the workers that they have.
        f"--sync {plan.sync}": not alike or (elsewhere and plan.sync != "full"),
        f"--codec {plan.codec}": elsewhere and plan.codec != "none",
    }
    return next((what for what, has in found.items() if has), "")


class ScriptDigest:
    """What the script was when the run was started. Of a module, its own file counts."""

    def __init__(self, argv: Sequence[str]) -> None:
        self._file = _file_of(argv)
        self._digest = _digest(self._file)

    @property
    def changed(self) -> str:
        """The name of the script, if it is another one now; else empty."""
        if self._file is None or _digest(self._file) == self._digest:
            return ""
        return self._file.name


def script_digests(argv: Sequence[str], folder: Path) -> dict[str, str]:
    """Digests of the Python files below the script's folder, by path from `folder`; of a module, none."""
    script = Path(argv[0])
    if not script.is_file() or not script.resolve().is_relative_to(folder.resolve()):
        return {}
    names = [
        path.relative_to(folder.resolve())
        for path in sorted(script.resolve().parent.rglob("*.py"))
        if path.is_relative_to(folder.resolve())
    ]
    own = [name for name in names if not any(_is_foreign(part) for part in name.parts)]
    return {str(name): digest_of(folder / name) for name in own}


def _is_foreign(part: str) -> bool:
    return part.startswith(".") or part in ("venv", "site-packages")


def digest_of(file: Path) -> str:
    """A digest of a file; empty if it cannot be read."""
    return _digest(file).hex()


def _file_of(argv: Sequence[str]) -> Path | None:
    if argv[:1] != ["-m"]:
        return Path(argv[0]).absolute()
    try:
        found = importlib.util.find_spec(argv[1])
    except (ImportError, ValueError):
        return None
    return Path(found.origin) if found is not None and found.origin else None


def _digest(file: Path | None) -> bytes:
    try:
        return hashlib.sha256(file.read_bytes()).digest() if file is not None else b""
    except OSError:
        return b""
