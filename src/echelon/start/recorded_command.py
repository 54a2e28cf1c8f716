"""What a run ran, kept in its folder, so that `echelon resume` can start it again."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from echelon.errors import LaunchError
from echelon.observe.run_folder import RunFolder


class RecordedCommand(msgspec.Struct, frozen=True, kw_only=True):
    """A script or module with its arguments, and the folder it was started in.

    Its words may hold bytes that are no text; they are kept as Python keeps them in `sys.argv`.
    """

    kind: Literal["run", "train", "function"]
    argv: list[str]
    name: str
    cwd: str


def keep(folder: RunFolder, command: RecordedCommand) -> None:
    """Write it to the run's folder. Nothing but `echelon resume` needs it, so a failure is no error."""
    words = [word.encode(errors="surrogateescape").decode("latin-1") for word in command.argv]
    try:
        folder.command.write_bytes(msgspec.json.encode(msgspec.structs.replace(command, argv=words)))
    except OSError:
        folder.command.unlink(missing_ok=True)


def read(folder: RunFolder) -> RecordedCommand:
    """The command of a run; raises LaunchError if it has none that can be started again."""
    try:
        found = msgspec.json.decode(folder.command.read_bytes(), type=RecordedCommand)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise LaunchError(
            f"the run's folder does not say what it ran: {error}",
            where=str(folder.command),
            fix="start it again with `echelon run --checkpoint FOLDER`, with the folder of its checkpoints",
        ) from error
    if found.kind == "function":
        raise LaunchError(
            "the run's workers ran a function, which only the program that called it can start",
            where=str(folder.path),
            fix="run that program again, with the same folder of checkpoints",
        )
    if not Path(found.cwd).is_dir():
        raise LaunchError(
            f"the run was started in {found.cwd}, which does not exist",
            where=str(folder.command),
            fix="start it again with `echelon run --checkpoint FOLDER`, with the folder of its checkpoints",
        )
    words = [word.encode("latin-1").decode(errors="surrogateescape") for word in found.argv]
    return msgspec.structs.replace(found, argv=words)
