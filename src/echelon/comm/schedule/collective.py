"""The contract of a collective: one list of steps per worker that leave the same sum on every worker.

A step sends ranges of the buffer, and receives ranges that are added to it or overwrite it. Steps are
plain data, so that the same schedule can be executed over sockets, checked by a property test for any
number of workers, costed by the planner and drawn in a report. Indices count elements; ranks are positions
in the group.

Rules for schedules and for the code that executes them:

- Between two workers, the k-th send of one is the k-th receive of the other, and of the same length.
  Workers may have different numbers of steps.
- Within a step a worker sends at most once to a peer, and receives at most once from it.
- A step ends when all its sends and receives have ended. No buffering is required: a schedule ends even if
  each send waits until its receiver has reached the matching step.
- A step sends the values that the buffer holds when the step begins, even where the step's receives change
it.
- No other receive of a step touches a range that the step overwrites. Ranges that are added may overlap.
  Applied in the listed order, they give the same bits in every run; in order of arrival, they still give
  the same bits to every member.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from echelon.config.registry import Registry, Strategy


@dataclass(frozen=True, slots=True)
class Move:
    """Elements `start` to `stop`, to or from a peer."""

    peer: int
    start: int
    stop: int

    @property
    def length(self) -> int:
        """Number of elements."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleStep:
    """Moves that happen at the same time: sends, receives to add, receives that overwrite."""

    sends: tuple[Move, ...] = ()
    adds: tuple[Move, ...] = ()
    takes: tuple[Move, ...] = ()


Schedule = list[ScheduleStep]


class Collective(Strategy):
    """A way for a group to sum a buffer. All workers end with identical bits."""

    __slots__ = ()

    @abstractmethod
    def schedule(self, rank: int, size: int, length: int) -> Schedule:
        """The steps of worker `rank` of `size` to sum buffers of `length` elements."""

    def check(self, size: int) -> None:
        """Raise ConfigError if this collective, as configured, does not support `size` workers.

        `schedule` also raises it, and on every rank: if only some ranks refused, the others would wait.
        """


class Scattering(Collective):
    """A collective in two halves: a reduce-scatter, then an all-gather."""

    __slots__ = ()

    @abstractmethod
    def reduce_scatter(self, rank: int, size: int, length: int) -> Schedule:
        """The first half, with sends and adds only: it leaves each worker with the sum of its own range."""

    @abstractmethod
    def owned_range(self, rank: int, size: int, length: int) -> tuple[int, int]:
        """The range whose sum a worker holds between the halves; it may be empty.

        The ranges of all workers cover each element of the buffer exactly once.
        """

    def all_gather(self, rank: int, size: int, length: int) -> Schedule:
        """The second half: the first half reversed, with the finished ranges."""
        return mirrored(self.reduce_scatter(rank, size, length))

    def schedule(self, rank: int, size: int, length: int) -> Schedule:
        """Both halves in sequence."""
        scatter = self.reduce_scatter(rank, size, length)
        return scatter + self.all_gather(rank, size, length)


COLLECTIVES: Registry[Collective] = Registry(
    "collective",
    Collective,  # type: ignore[type-abstract]
    "echelon.comm.schedule.collectives",
)


def pieces(start: int, stop: int, count: int) -> list[tuple[int, int]]:
    """Cut a range into `count` nearly equal parts; the first may be one element longer, some are empty."""
    whole, rest = divmod(stop - start, count)
    cuts = [start]
    for index in range(count):
        cuts.append(cuts[-1] + whole + (index < rest))
    return list(pairwise(cuts))


def on(members: Sequence[int], schedule: Schedule, offset: int = 0) -> Schedule:
    """Translate a schedule of a subgroup to the whole group: positions become ranks, ranges are shifted."""

    def renamed(moves: tuple[Move, ...]) -> tuple[Move, ...]:
        return tuple(Move(members[m.peer], m.start + offset, m.stop + offset) for m in moves)

    return [
        ScheduleStep(sends=renamed(step.sends), adds=renamed(step.adds), takes=renamed(step.takes))
        for step in schedule
    ]


def mirrored(scatter: Schedule) -> Schedule:
    """Reverse a reduce-scatter into an all-gather: a worker that added a range returns its sum."""
    return [ScheduleStep(sends=step.adds, takes=step.sends) for step in reversed(scatter)]


def trim(schedule: Schedule) -> Schedule:
    """Remove empty moves and empty steps."""

    def real(moves: tuple[Move, ...]) -> tuple[Move, ...]:
        return tuple(move for move in moves if move.length)

    kept = [ScheduleStep(sends=real(s.sends), adds=real(s.adds), takes=real(s.takes)) for s in schedule]
    return [step for step in kept if step.sends or step.adds or step.takes]
