"""What is a worker doing? In plain words, from the stack of its training thread.

Nothing is noted while training goes on, so this costs nothing per step. Only when another worker asks does
the loop's thread look at the stack. The script's line is that of the innermost frame of the user's own
code. The call is that of the outermost frame of Echelon inside it; if there is none, the worker computes.

All but `stack_of` is pure.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import msgspec

COMPUTING = "computing"
READING = "reading data"
IN_FORWARD = "in a forward pass"
IN_BACKWARD = "in a backward pass"
IN_STEP = "in an optimizer step"
AT_PASS = "at the start or end of a pass over a loader"
AT_EPOCH_END = "at the end of an epoch"
AT_SCRIPT_END = "at the end of its script"

_LAUNCHING = ("echelon.start", "echelon.cli", "echelon.__main__")
_EXCHANGING = ("echelon.comm.", "echelon.train.families.", "echelon.train.session", "echelon.train.script_")
_END_OF_SCRIPT = {"close", "_leave", "__exit__", "tell"}
_MOST_RANKS = 6
_LIBRARIES = tuple(
    path.rstrip(os.sep) + os.sep
    for name, path in sysconfig.get_paths().items()
    if name in ("stdlib", "platstdlib", "purelib", "platlib")
)


class StackFrame(NamedTuple):
    """A function that is running: `function` is its qualified name."""

    module: str
    function: str
    file: str
    line: int


class Doing(msgspec.Struct, frozen=True):
    """What a worker is doing (`in save()`, `computing`), and at which line of the script."""

    call: str = COMPUTING
    site: str = ""

    def __str__(self) -> str:
        return f"{self.call} ({self.site})" if self.site else self.call


def describe(stack: Sequence[StackFrame]) -> Doing:
    """What the thread with this stack is doing; the outermost frame comes first."""
    script = max((at for at, frame in enumerate(stack) if _is_script(frame)), default=-1)
    ours = [frame for frame in stack[script + 1 :] if _is_ours(frame)]
    site = f"{Path(stack[script].file).name}:{stack[script].line}" if script >= 0 else ""
    return Doing(_call(ours), site)


def is_in_a_call(stack: Sequence[StackFrame]) -> bool:
    """Whether the thread with this stack is in a call of Echelon, from the script or from anywhere."""
    return any(_is_ours(frame) for frame in stack)


def _is_ours(frame: StackFrame) -> bool:
    return frame.module.startswith("echelon.") and not frame.module.startswith(_LAUNCHING)


def _is_script(frame: StackFrame) -> bool:
    """Whether the frame is the user's own code: not Echelon's, torch's, Python's or a package's."""
    if frame.module == "__main__":
        return True
    if frame.module.partition(".")[0] in ("echelon", "torch") or frame.file.startswith("<frozen"):
        return False
    return not frame.file.startswith(_LIBRARIES) and "-packages/" not in frame.file


def _call(ours: Sequence[StackFrame]) -> str:
    if ours and ours[0].module == "echelon.train.loader":
        return AT_PASS if any(frame.module.startswith(_EXCHANGING) for frame in ours) else READING
    return next((words for frame in ours if (words := _words(frame))), COMPUTING)


def _words(frame: StackFrame) -> str:
    """The call of one frame of Echelon in words; empty if the frame alone does not tell."""
    module, function = frame.module, frame.function
    name = function.rpartition(".")[2]
    match module.split(".")[1:]:
        case ["train", "weighing"]:
            return IN_FORWARD if name == "_entering" else "" if name == "call" else IN_BACKWARD
        case ["train", "guard" | "forgotten" | "saving" | "order" | "drift" | "streams"]:
            return ""
        case ["train", "batchnorm" | "linear" | "factoring"]:
            return IN_BACKWARD if "backward" in name else IN_FORWARD
        case ["train", "families", *_]:
            return IN_STEP
        case ["train", "session" | "join"] if name in _END_OF_SCRIPT:
            return AT_SCRIPT_END
        case ["train", "script_loop"] if name == "epochs":
            return AT_EPOCH_END
        case ["train", "script_loop" | "script_prepare"] if "step" in function or "adopt" in function:
            return IN_STEP
        case ["reduce", "deferred"]:
            return IN_STEP if function.startswith("_DeferredStep") else "using a parameter"
        case ["reduce", *_]:
            return IN_BACKWARD
        case ["server", "client"]:
            return IN_BACKWARD if "gradient" in name else IN_STEP
    return f"in {name}()" if name.isidentifier() and not name.startswith("_") else ""


def stack_of(thread: int) -> list[StackFrame]:
    """The stack of a running thread, the outermost frame first; empty if it has ended."""
    frame: FrameType | None = sys._current_frames().get(thread)
    found: list[StackFrame] = []
    while frame is not None:
        code = frame.f_code
        module = str(frame.f_globals.get("__name__", ""))
        found.append(StackFrame(module, code.co_qualname, code.co_filename, frame.f_lineno or 0))
        frame = frame.f_back
    return found[::-1]


def site_of(error: BaseException) -> str:
    """The innermost line of the script that an error went through: `train.py:41`."""
    found: list[StackFrame] = []
    trace = error.__traceback__
    while trace is not None:
        frame = trace.tb_frame
        module = str(frame.f_globals.get("__name__", ""))
        found.append(
            StackFrame(module, frame.f_code.co_qualname, frame.f_code.co_filename, trace.tb_lineno)
        )
        trace = trace.tb_next
    return describe(found).site


# In sentences ------------------------------------------------------------------------------------


def sentence(doings: Mapping[int, Doing]) -> str:
    """Who is doing what: `rank 0 is in save() (train.py:52), ranks 1 and 2 in a backward pass (...)`."""
    parts: list[str] = []
    for doing, ranks in by_doing(doings).items():
        verb = "" if parts else "are " if len(ranks) > 1 else "is "
        parts.append(f"{listed(ranks)} {verb}{doing}")
    return ", ".join(parts)


def by_doing(doings: Mapping[int, Doing]) -> dict[Doing, list[int]]:
    """The ranks that do the same."""
    found: dict[Doing, list[int]] = {}
    for rank in sorted(doings):
        found.setdefault(doings[rank], []).append(rank)
    return found


def awaited(ranks: Sequence[int], doings: Mapping[int, Doing], silent: Collection[int]) -> str:
    """What awaited workers do, as far as is known: `rank 1 is computing (train.py:77)`."""
    mute = [rank for rank in ranks if rank in silent]
    known = {rank: doings[rank] for rank in ranks if rank in doings and rank not in silent}
    verb = "do not answer" if len(mute) > 1 else "does not answer"
    quiet = f"{listed(mute)} {verb}: stopped, overloaded, or cut off from the network" if mute else ""
    return ", ".join(part for part in (sentence(known), quiet) if part)


def listed(ranks: Sequence[int]) -> str:
    """Ranks in words: `ranks 1, 2 and 5`, `ranks 1 to 63`."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 2 and ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"ranks {ranks[0]} to {ranks[-1]}"
    shown, left = list(ranks[:_MOST_RANKS]), len(ranks) - _MOST_RANKS
    if left > 0:
        return f"ranks {', '.join(map(str, shown))} and {left} more"
    return f"ranks {', '.join(map(str, shown[:-1]))} and {shown[-1]}"
