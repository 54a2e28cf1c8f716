"""The errors for workers that died, failed, left or are late. Pure.

`names` says how errors call workers ("rank 3 on gpu-b"), `where` is the worker that noticed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from echelon.comm.wire import mismatch
from echelon.comm.wire.doing import Doing, sentence
from echelon.errors import PeerLost, RoundTimeout

Names = Mapping[int, str] | Sequence[str]


def died(names: Names, ranks: Sequence[int], where: str) -> PeerLost:
    """They left no reason: killed, or disconnected."""
    return PeerLost(
        f"{listed(names, ranks)} is gone: it died without reporting an error, or the network to it is cut",
        ranks=tuple(ranks),
        where=where,
        fix="see its log; it may have been killed, for lack of memory for example",
    )


def failed(names: Names, rank: int, cause: str, where: str) -> PeerLost:
    """It reported the cause."""
    return PeerLost(
        f"{names[rank]} failed: {cause}",
        ranks=(rank,),
        where=where,
        fix="see that worker's log",
    )


def ended(
    names: Names, ranks: Sequence[int], where: str, waiting: Mapping[int, Doing] | None = None
) -> PeerLost:
    """They left without an error. `waiting`: what workers do that need them."""
    return PeerLost(
        f"{listed(names, ranks)} ended while the others were still training"
        + (f": {sentence(waiting)}" if waiting else ""),
        ranks=tuple(ranks),
        where=where,
        fix=mismatch.fix_of_early_end(waiting or {}),
    )


def late(
    names: Names, ranks: Sequence[int], deadline_s: float, where: str, doing: str = ""
) -> RoundTimeout:
    """They did not arrive before the deadline. `doing`: what they do instead, as far as is known."""
    return RoundTimeout(
        f"{listed(names, ranks)} did not arrive within {deadline_s:g} s" + (f": {doing}" if doing else ""),
        ranks=tuple(ranks),
        where=where,
        fix="it is stuck, stopped or very slow; a longer deadline is round_timeout_s",
    )


def listed(names: Names, ranks: Sequence[int]) -> str:
    """The names of several workers."""
    return ", ".join(names[rank] for rank in ranks) or "a worker"
