"""What the script saves goes to a temporary folder, and is loaded from there: its own files stay as is.

Covers `torch.save` and `torch.load` with a path, `session.save` and `session.load`. A file that the script
opens by itself is written as in any run.
"""

from __future__ import annotations

import hashlib
import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from echelon.check.patches import replace
from echelon.train.saving import WholeSaves
from echelon.train.session import Session


class RedirectedSaves:
    """Where saves go instead, and how many there were."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder = folder
        self._rank = rank
        self.count = 0

    def install(self, stack: ExitStack) -> None:
        """Redirect saves until the stack is closed."""
        mine = f"rank-{self._rank}"  # each worker its own: all may save to the same path

        def save_tensors(original: Any) -> Any:
            def save(thing: Any, f: Any, *args: Any, **options: Any) -> Any:
                return original(thing, self._aside(f, mine), *args, **options)

            return save

        def load_tensors(original: Any) -> Any:
            def load(f: Any, *args: Any, **options: Any) -> Any:
                return original(self._found(f, mine), *args, **options)

            return load

        def save_session(original: Any) -> Any:
            def save(session: Session, path: Any, **options: Any) -> Any:
                return original(session, self._aside(path, "session"), **options)

            return save

        def load_session(original: Any) -> Any:
            def load(session: Session, path: Any, **options: Any) -> Any:
                return original(session, self._found(path, "session"), **options)

            return load

        # Every worker has files of its own here, so none must be kept from writing over another's.
        replace(stack, WholeSaves, "install", lambda original: lambda saves: None)
        replace(stack, torch, "save", save_tensors)
        replace(stack, torch, "load", load_tensors)
        replace(stack, Session, "save", save_session)
        replace(stack, Session, "load", load_session)

    def _aside(self, path: Any, whose: str) -> Any:
        """The path to write to; an open file is the script's own."""
        if not isinstance(path, (str, os.PathLike)):
            return path
        self.count += 1
        aside = self._path(path, whose)
        aside.parent.mkdir(parents=True, exist_ok=True)
        return aside

    def _found(self, path: Any, whose: str) -> Any:
        """The path to read from: where the script's own save went, or as given."""
        if not isinstance(path, (str, os.PathLike)):
            return path
        aside = self._path(path, whose)
        return aside if aside.exists() else path

    def _path(self, path: str | os.PathLike[Any], whose: str) -> Path:
        name = hashlib.sha256(os.fsencode(Path(os.fsdecode(path)).absolute())).hexdigest()[:16]
        return self._folder / "saved" / whose / name
