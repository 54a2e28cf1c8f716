"""Which rows of a random tensor that was drawn for the whole batch belong to one worker? Pure.

Alone, a script draws a tensor of which one dimension is the batch, or a multiple of it: `(64, 100)` noise,
`(64 * heads, length, length)` of an attention, `(length, 64, features)` of a recurrent layer. A worker with
samples 16 to 32 of the batch draws `(16, 100)`, and what it must get are the rows 16 to 32.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPart:
    """A worker's part of one batch: `share` samples from `offset` on, out of `batch`."""

    offset: int
    share: int
    batch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RowCut:
    """Rows `start` to `stop` along one axis, each `every`-th. `guessed`: it is not known to be right."""

    axis: int
    start: int
    stop: int
    every: int = 1
    guessed: bool = False


def cut_of(
    whole: Sequence[int],
    own: Sequence[int],
    parts: Iterable[BatchPart],
    *,
    rank: int,
    workers: int,
    alternate: bool = False,
) -> RowCut | None:
    """The cut that makes a tensor of shape `own` of one of shape `whole`; None if it cannot be known.

    parts      this worker's parts of the batches that were handed out last, the newest first
    alternate  without any part (the script reads data of its own), whether the ranks' rows alternate;
               otherwise each rank has equally many in a row
    """
    if len(whole) != len(own):
        return None
    axes = [axis for axis, (all_rows, mine) in enumerate(zip(whole, own, strict=True)) if all_rows != mine]
    if len(axes) != 1:
        return None
    axis = axes[0]
    all_rows, mine = whole[axis], own[axis]
    known = list(parts)
    if not known and mine * workers == all_rows:
        if alternate:
            return RowCut(axis=axis, start=rank, stop=all_rows, every=workers, guessed=True)
        return RowCut(axis=axis, start=rank * mine, stop=(rank + 1) * mine, guessed=True)
    for part in known:
        times, rest = divmod(mine, part.share)
        if rest == 0 and times * part.batch == all_rows:
            return RowCut(axis=axis, start=part.offset * times, stop=(part.offset + part.share) * times)
    return None
