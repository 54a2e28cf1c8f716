"""Is a run's record whole? Figures from a record with damaged or missing events are not the run's.

Workers that were lost, left or joined have taken only a part of the steps, which is no damage.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from echelon.observe.events import (
    EVENT_TYPES,
    LAUNCHER,
    MembersChanged,
    RunEnded,
    StepEnded,
    decode_line,
    read_events,
)
from echelon.observe.run_folder import RunFolder
from echelon.observe.sync import policy_of, steps_together


def damage_of(folder: RunFolder) -> list[str]:
    """A sentence for each file of events that is damaged, cut off, or lacks steps."""
    said: list[str] = []
    last: dict[str, int] = {}
    completed = False
    partly = _partly_there(folder)
    for file in sorted(folder.events.glob("*.jsonl")):
        broken, missing, ended = _read(file, last, folder_has_ended=folder.summary.exists())
        completed |= ended
        if broken:
            said.append(f"{broken:,} line{'s' if broken > 1 else ''} of {file.name} cannot be read")
        if file.name in partly:
            last.pop(file.name, None)
        elif missing:
            are = "steps are" if missing > 1 else "step is"
            said.append(f"{missing:,} {are} missing in {file.name}")
    if completed and steps_together(policy_of(folder)) and last:
        end = max(last.values())
        said += [
            f"{name} ends at step {step}, others at step {end}" for name, step in last.items() if step < end
        ]
    return said


def _partly_there(folder: RunFolder) -> set[str]:
    """The files of workers that were no members for a part of the run."""
    told = folder.events_of(LAUNCHER)
    if not told.exists():
        return set()
    changes = (event for event in read_events(told) if isinstance(event, MembersChanged))
    return {folder.events_of(event.worker).name for event in changes if event.what != "met again"}


def _read(file: Path, last: dict[str, int], *, folder_has_ended: bool) -> tuple[int, int, bool]:
    """How many lines cannot be read and how many steps are missing, and whether it says that the run ended.

    Sets the file's last step in `last`.
    """
    broken = missing = 0
    completed = False
    with file.open("rb") as lines:
        for line in lines:
            event = decode_line(line)
            if event is None:
                being_written = not line.endswith(b"\n") and not folder_has_ended
                broken += not being_written and not _is_newer(line)
            elif isinstance(event, StepEnded):
                before = last.get(file.name, event.step)
                missing += max(0, event.step - before - 1)
                last[file.name] = event.step
            elif isinstance(event, RunEnded):
                completed = event.outcome == "completed"
    return broken, missing, completed


class _Typed(msgspec.Struct):
    type: str


def _is_newer(line: bytes) -> bool:
    """Whether a newer version wrote the line: it is whole, and its type is not known here."""
    try:
        return msgspec.json.decode(line, type=_Typed).type not in EVENT_TYPES
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return False
