"""Echelon's errors as torch's users expect them: RuntimeErrors that name the worker at fault.

Scripts written for torch.distributed catch RuntimeError, or DistBackendError, which is one. Such an error
keeps Echelon's three lines, and the original is its cause.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch.distributed as dist

from echelon.errors import EchelonError, JoinTimeout, RoundTimeout

_DEADLINE = "it is stuck, stopped or very slow; a longer deadline is timeout= of the group or the call"


def translated(error: BaseException, ranks: Sequence[int] = ()) -> BaseException:
    """The error to raise. `ranks`: the members' global ranks, if those in the message are not."""
    if not isinstance(error, EchelonError):
        return error
    if isinstance(error, JoinTimeout):
        error.fix = error.fix.partition(";")[0]  # the rest names options of Echelon's own launcher
    if isinstance(error, RoundTimeout):
        error.fix = _DEADLINE
    text = str(error)
    if isinstance(error, RoundTimeout):
        text = f"a timeout has passed: {text}"
    if ranks:
        text += f"\n  ranks: counted in the group of the global ranks {', '.join(map(str, ranks))}"
    found = dist.DistBackendError(text)
    found.__cause__ = error
    return found


@contextmanager
def translating(ranks: Sequence[int] = ()) -> Iterator[None]:
    """Translate the errors of a block."""
    try:
        yield
    except EchelonError as error:
        raise translated(error, ranks) from error
