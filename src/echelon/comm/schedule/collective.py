"""What a collective is: for each worker, a list of steps that together leave everybody with the same sum.

A step sends ranges of the buffer, and receives ranges that are added to it or overwrite it. Steps are
plain data, so that the same schedule is executed over sockets, checked by a property test for any number
of workers, costed by the planner and drawn in a report. Indices are elements; ranks are positions in the
group.

Schedules and those who execute them keep these rules:

- Between two workers, the k-th send of one is the k-th receive of the other, and of the same length.
  Steps are not numbered across workers: their numbers of steps may differ.
- Within a step a worker sends at most once to a peer, and receives at most once from it.
- A step is over when all its sends and receives are. Nobody has to hold messages that are not awaited
  yet: a schedule ends even if a send waits until its receiver has reached the step that wants it.
- What a step sends is what the buffer holds when the step begins, even where the step's receives change it.
- A range that is overwritten is touched by no other receive of its step. Ranges that are added may overlap.
  Applied in the order listed, they give the same bits in every run; in order of arrival, they still give
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
        """How many elements move."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleStep:
    """What happens at once: sends, receives that are added, receives that overwrite."""

    sends: tuple[Move, ...] = ()
    adds: tuple[Move, ...] = ()
    takes: tuple[Move, ...] = ()


Schedule = list[ScheduleStep]


class Collective(Strategy):
    """A way for a group to sum a buffer. Everybody ends with identical bits."""

    __slots__ = ()

    @abstractmethod
    def schedule(self, rank: int, size: int, length: int) -> Schedule:
        """What worker `rank` of `size` does to sum buffers of `length` elements."""

    def check(self, size: int) -> None:
        """Raise ConfigError if this collective, as configured, does not serve `size` workers.

        `schedule` does so too, and on every rank: were it refused by some only, the others would wait.
        """


class Scattering(Collective):
    """A collective of two halves: first each worker gets the sum of one range, then all get all ranges."""

    __slots__ = ()

    @abstractmethod
    def reduce_scatter(self, rank: int, size: int, length: int) -> Schedule:
        """The first half, of sends and adds only: after it, each worker holds the sum of its own range."""

    @abstractmethod
    def owned_range(self, rank: int, size: int, length: int) -> tuple[int, int]:
        """The range whose sum a worker holds between the halves.

        It may be empty; together the ranges of all workers are the buffer, each element once.
        """

    def all_gather(self, rank: int, size: int, length: int) -> Schedule:
        """The second half: the first one backwards, with finished ranges."""
        return mirrored(self.reduce_scatter(rank, size, length))

    def schedule(self, rank: int, size: int, length: int) -> Schedule:
        """One half after the other."""
        scatter = self.reduce_scatter(rank, size, length)
        return scatter + self.all_gather(rank, size, length)


COLLECTIVES: Registry[Collective] = Registry(
    "collective",
    Collective,  # type: ignore[type-abstract]
    "echelon.comm.schedule.collectives",
)


def pieces(start: int, stop: int, count: int) -> list[tuple[int, int]]:
    """A range cut into `count` nearly equal parts; the first ones are longer by one, some may be empty."""
    whole, rest = divmod(stop - start, count)
    cuts = [start]
    for index in range(count):
        cuts.append(cuts[-1] + whole + (index < rest))
    return list(pairwise(cuts))


def on(members: Sequence[int], schedule: Schedule, offset: int = 0) -> Schedule:
    """A schedule of a subgroup as one of the whole group: positions become ranks, ranges are shifted."""

    def renamed(moves: tuple[Move, ...]) -> tuple[Move, ...]:
        return tuple(Move(members[m.peer], m.start + offset, m.stop + offset) for m in moves)

    return [
        ScheduleStep(sends=renamed(step.sends), adds=renamed(step.adds), takes=renamed(step.takes))
        for step in schedule
    ]


def mirrored(scatter: Schedule) -> Schedule:
    """A reduce-scatter backwards, which is an all-gather: who got a range to add gives back its sum."""
    return [ScheduleStep(sends=step.adds, takes=step.sends) for step in reversed(scatter)]


def trim(schedule: Schedule) -> Schedule:
    """Without empty moves, and without steps that do nothing."""

    def real(moves: tuple[Move, ...]) -> tuple[Move, ...]:
        return tuple(move for move in moves if move.length)

    kept = [ScheduleStep(sends=real(s.sends), adds=real(s.adds), takes=real(s.takes)) for s in schedule]
    return [step for step in kept if step.sends or step.adds or step.takes]
