"""What `echelon bench step --script` asks of its workers, and what they note: files in a folder."""

from __future__ import annotations

from pathlib import Path

import msgspec


class ScriptRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A script with its arguments, and how many steps to note. `beside`: where it looks for modules too."""

    program: list[str]
    steps: int
    beside: str = ""


class ScriptStep(msgspec.Struct, frozen=True, kw_only=True):
    """From the end of one optimizer step to that of the next, and two parts of it."""

    step_s: float
    backward_s: float
    update_s: float


class ScriptNote(msgspec.Struct, frozen=True, kw_only=True):
    """The steps of one worker."""

    rank: int
    steps: list[ScriptStep]


def write_script_request(folder: Path, request: ScriptRequest) -> None:
    """Write what is asked."""
    (folder / "request.json").write_bytes(msgspec.json.encode(request))


def read_script_request(folder: Path) -> ScriptRequest:
    """Read what is asked."""
    return msgspec.json.decode((folder / "request.json").read_bytes(), type=ScriptRequest)


def write_script_note(folder: Path, note: ScriptNote) -> None:
    """Write what one worker has noted, whole: the launcher waits for it."""
    file = _file(folder, note.rank)
    file.with_suffix(".tmp").write_bytes(msgspec.json.encode(note))
    file.with_suffix(".tmp").rename(file)


def has_all_notes(folder: Path, workers: int) -> bool:
    """Whether every worker has written its notes."""
    return all(_file(folder, rank).exists() for rank in range(workers))


def read_script_notes(folder: Path, workers: int) -> list[ScriptNote]:
    """What the workers have noted, by rank."""
    return [
        msgspec.json.decode(_file(folder, rank).read_bytes(), type=ScriptNote) for rank in range(workers)
    ]


def _file(folder: Path, rank: int) -> Path:
    return folder / f"worker-{rank}.json"
