"""Which worker failed first, and why; only `read_failures` reads files.

When one worker fails, the others fail because their connections to it break. The launcher names a worker
whose failure is no consequence of another's; among several, the earliest.

If all failures are consequences, they accuse: each names the workers that it lost. A worker that is accused
and accuses nobody is to blame, whether it runs on or has ended with exit code 0. If all who are accused
accuse others too, as on both sides of a cut link, nobody is named: the evidence does not tell.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

import msgspec

from echelon.errors import GradientError, MismatchedCalls, WorkerError
from echelon.observe.run_folder import RunFolder

_OF_SEVERAL = "MismatchedCalls"
_MOST_WITNESSES = 4


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """Why a worker failed. `consequence`: it failed because another worker did.

    `blamed` are the workers that it names as the cause. `unclear`: which worker is to blame is not known;
    `rank` is one of those concerned.
    """

    rank: int
    t: float
    kind: str
    message: str
    text: str = ""
    consequence: bool = False
    blamed: tuple[int, ...] = ()
    unclear: bool = False

    @property
    def cause(self) -> str:
        """Kind and first line of the message."""
        line = self.message.partition("\n")[0]
        return f"{self.kind}: {line}" if self.kind else line

    def sentence(self, node: str) -> str:
        """Who failed and why, in a line; `node` is where that worker is."""
        if self.unclear:
            return f"failed, and it is not known which worker is to blame: {self.cause}"
        if self.kind == _OF_SEVERAL:  # it is nobody's alone, and says who does what
            return f"failed: {self.cause}"
        return f"rank {self.rank} on {node} failed: {self.cause}"


def decide(failures: Iterable[Failure], codes: Mapping[int, int]) -> Failure | None:
    """The failure to report, from what workers have said and how they have ended so far. Pure.

    codes  the exit codes of the workers that have ended
    """
    found = list(failures)
    reported = first(found)
    if reported is None or not reported.consequence:
        return reported
    accusers = {failure.rank for failure in found}
    accused = {rank for failure in found for rank in failure.blamed}
    guilty = accused - accusers
    if guilty:
        rank = min(guilty)
        witness = first(one for one in found if rank in one.blamed)
        assert witness is not None
        return _accused(rank, codes.get(rank), witness)
    cause = first(one for one in found if one.rank in accused and not one.blamed)
    if cause is not None:  # it blames nobody, so its error is the reason
        return cause
    if accused:
        return _mutual(found, accused)
    return reported


def _accused(rank: int, code: int | None, witness: Failure) -> Failure:
    """The failure of a worker that has reported none itself."""
    own = "it reported no error and has not ended" if code is None else f"ended with exit code {code}"
    line = witness.message.partition("\n")[0]
    return Failure(
        rank=rank,
        t=witness.t,
        kind="",
        message=f"{own}; rank {witness.rank} says: {line}",
        text=witness.text,
    )


def _mutual(found: Iterable[Failure], accused: set[int]) -> Failure:
    """Workers accuse each other, and none has an error of its own."""
    concerned = sorted(
        (one for one in found if one.blamed), key=lambda one: (one.rank not in accused, one.rank)
    )
    said = "; ".join(f"rank {one.rank} lost {_ranks(one.blamed)}" for one in concerned[:_MOST_WITNESSES])
    earliest = min(concerned, key=lambda one: (one.t, one.rank))
    return Failure(
        rank=concerned[0].rank,
        t=earliest.t,
        kind=earliest.kind,
        message=f"{said}; all of them ran, so the network between them is cut, or one was stopped",
        text=earliest.text,
        unclear=True,
    )


def _ranks(ranks: Iterable[int]) -> str:
    numbers = [str(rank) for rank in ranks]
    return f"rank {numbers[0]}" if len(numbers) == 1 else f"ranks {', '.join(numbers)}"


def evidence(folder: RunFolder, codes: Mapping[int, int], fine: Collection[int] = (0,)) -> list[Failure]:
    """What workers have said, also those that have not ended yet, and the exit codes of the others.

    fine  exit codes with which a worker has not failed
    """
    told = {failure.rank: failure for failure in read_failures(folder)}
    for rank, code in codes.items():
        if code not in fine and rank not in told:
            told[rank] = from_exit(rank, code, _last_written(folder.log_of(rank)))
    return list(told.values())


def _last_written(log: Path) -> float:
    try:
        return log.stat().st_mtime
    except OSError:
        return time.time()


def first(failures: Iterable[Failure]) -> Failure | None:
    """The failure that caused the others, if any; of several with the same error, the lowest rank's.

    Where all workers make the same mistake, it is chance which one is first, and the leader's is the one to
    show: its output has been seen.
    """
    ordered = sorted(failures, key=lambda failure: (failure.consequence, failure.t))
    same = (failure for failure in ordered if is_alike(failure, ordered[0]))
    return min(same, key=lambda failure: failure.rank, default=None)


def alike(failure: Failure, failures: Iterable[Failure]) -> tuple[int, ...]:
    """The other workers with the same error."""
    others = (other.rank for other in failures if other.rank != failure.rank and is_alike(other, failure))
    return tuple(sorted(others))


def is_alike(one: Failure, other: Failure) -> bool:
    """Whether two workers failed with the same error of their own."""
    if one.consequence or not one.kind:
        return one == other
    return (one.kind, one.message, one.consequence) == (other.kind, other.message, other.consequence)


def read_failures(folder: RunFolder) -> list[Failure]:
    """The errors that workers have left in the run's folder."""
    found = (read_failure(path) for path in sorted(folder.errors.glob("rank-*.json")))
    return [failure for failure in found if failure is not None]


def read_failure(path: Path) -> Failure | None:
    """The error that a worker has left, if it has left one."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Failure)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def from_error(rank: int, error: BaseException, text: str) -> Failure:
    """The failure of a worker that ends with this error; `text` is what it prints."""
    named = error.ranks if isinstance(error, WorkerError) else ()
    own = (
        isinstance(error, GradientError | MismatchedCalls) and rank in named
    )  # all raise it; it names this one
    consequence = isinstance(error, WorkerError) and not own
    return Failure(
        rank=rank,
        t=time.time(),
        kind=type(error).__name__,
        message=str(error),
        text=text,
        consequence=consequence,
        blamed=tuple(named) if consequence else (),
        unclear=isinstance(error, GradientError) and not named,
    )


def from_exit(rank: int, code: int, t: float) -> Failure:
    """A failure of which only the exit code is known."""
    if code < 0:
        name = _signal_name(-code)
        hint = "; the kernel does this when memory runs out" if name == "SIGKILL" else ""
        return Failure(rank=rank, t=t, kind="", message=f"killed by {name}{hint}")
    return Failure(rank=rank, t=t, kind="", message=f"ended with exit code {code} and no exception")


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # most real-time signals have no name
        return f"signal {number}"
