"""Where the settings of checkpoints come from: the script's `join`, or the run's config.toml."""

from __future__ import annotations

import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from echelon.checkpoint.retention import Best
from echelon.config.choices import flag
from echelon.config.every import Every
from echelon.config.registry import convert
from echelon.config.resolve import resolve
from echelon.config.schema import RunSettings
from echelon.errors import ConfigError
from echelon.observe.run_folder import RunFolder
from echelon.train.script_checkpoints import CheckpointSettings
from echelon.train.session import Session

_EVERY = "1epoch"


def checkpoint_settings(launched: RunFolder | None, asked: Mapping[str, Any]) -> RunSettings:
    """The settings that the script asks for; those that it does not mention are the launcher's."""
    if launched is not None and launched.config.is_file():
        settings = resolve(RunSettings, asked, launched.config).settings
    else:
        hints = typing.get_type_hints(RunSettings)
        given = {name: value for name, value in asked.items() if value is not None}
        settings = RunSettings(
            **{name: convert(value, hints[name], where=flag(name)) for name, value in given.items()}
        )
    if settings.checkpoint_best is not None:
        Best.parse(settings.checkpoint_best, where="--checkpoint-best")
    return settings


def save_as_asked(session: Session, settings: RunSettings) -> None:
    """Let the session save by itself, if it is asked to."""
    if not settings.saves:
        return
    root = settings.checkpoint
    if root is None and session.folder is not None:
        root = str(session.folder.checkpoints)
    if root is None:
        raise ConfigError(
            "the run has no folder, so there is no place for checkpoints",
            where="checkpoint_every",
            fix='name a folder: checkpoint="checkpoints"',
        )
    best = settings.checkpoint_best
    session.save_by_itself(
        CheckpointSettings(
            root=Path(root).absolute(),
            every=Every.parse(settings.checkpoint_every or _EVERY, where="--checkpoint-every"),
            keep=settings.checkpoint_keep,
            best=None if best is None else Best.parse(best, where="--checkpoint-best"),
        )
    )
