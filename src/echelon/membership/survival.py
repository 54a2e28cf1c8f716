"""Who goes on after workers were lost, and from which operation? Pure: deaths and standings in, views out.

Workers number the operations that all of them carry out in the same order: a round of gradients, a gather,
a broadcast. When one fails because a worker is gone, each survivor says which operation it is at, and
waits. Once all have said so, the next view is decided: the survivors, in their old order, and the operation
of each. One that is behind gets the results that it lacks from one that has them. Then all are at the same
operation, which is carried out again without the lost worker. If nobody is lost, and a message has arrived
damaged, all members meet again and repeat the operation, too.

A worker that has ended in an orderly way is awaited no longer.

A lost worker may come back: a new process with its slot waits until all members stand between two steps to
admit it. If somebody is lost meanwhile, the members go on without that one first. A member that is to leave
does so there, too, as long as enough are left. One that is left out goes there as well, and may wait to
come back later, as a lost one does.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import msgspec

_MOST_REPEATS = 3
_SAME_PLACE = 20  # operations


class SurvivorState(msgspec.Struct, frozen=True, kw_only=True):
    """Where a survivor stands: the view that broke, the operation that failed, batches of each loader.

    admits  nothing has failed: it is between two steps, and waits for workers that come back
    damage  what was wrong with a message, if the operation failed for that
    """

    slot: int
    view: int
    operation: int
    handed: dict[int, int] = {}
    admits: bool = False
    damage: str = ""


class SurvivorView(msgspec.Struct, frozen=True, kw_only=True):
    """The workers that go on: their slots in order, and the operation that each of them is at.

    handed  how many batches of each loader were handed out on the worker that is furthest
    lost    the slots that are not in it any more
    left    the slots that have left in an orderly way
    out     which of these are only left out, and may come back
    joined  the slots that have come back: the last members, which get the state of the first one
    planned all members stood between two steps, and nobody was lost
    damage  nobody was lost, and a message had arrived damaged: its exchange is repeated
    """

    number: int
    members: tuple[int, ...]
    operations: tuple[int, ...] = ()
    handed: dict[int, int] = {}
    lost: tuple[int, ...] = ()
    left: tuple[int, ...] = ()
    out: tuple[int, ...] = ()
    joined: tuple[int, ...] = ()
    planned: bool = False
    damage: str = ""

    @property
    def behind(self) -> range:
        """The operations that some members have completed and others have not."""
        return range(min(self.operations, default=0), max(self.operations, default=0))

    def source(self, operation: int) -> int:
        """The place in this view of the first member that has completed an operation."""
        return next(place for place, at in enumerate(self.operations) if at > operation)


class Survival:
    """The workers of one run. `fewest`: with fewer it does not go on."""

    def __init__(self, workers: int, fewest: int) -> None:
        self.fewest = fewest
        self.view = SurvivorView(number=0, members=tuple(range(workers)))
        self._ready: set[int] = set()
        self._gone: set[int] = set()
        self._left: set[int] = set()
        self._waiting: list[int] = []
        self._leaving: list[int] = []
        self._to_leave_out: set[int] = set()
        self._repeated: list[int] = []  # the last operations that were repeated though nobody was lost
        self._standing: dict[int, SurvivorState] = {}

    @property
    def living(self) -> list[int]:
        """The members of the view that are neither lost nor have left."""
        return [slot for slot in self.view.members if slot not in self._gone | self._left]

    @property
    def gone(self) -> frozenset[int]:
        """All slots that were lost so far."""
        return frozenset(self._gone)

    def ready(self, slot: int) -> None:
        """A worker can go on without others from now on."""
        self._ready.add(slot)

    def left(self, slot: int) -> None:
        """A worker has ended in an orderly way."""
        self._left.add(slot)

    @property
    def leaving(self) -> tuple[int, ...]:
        """The members that are to leave between two steps."""
        return tuple(slot for slot in self._leaving if slot in self.living)

    def may_leave(self, slots: Collection[int]) -> bool:
        """Whether enough workers are left without these, and without those that are to leave."""
        return len(set(self.living) - {*slots, *self._leaving}) >= self.fewest

    def leave(self, slot: int, *, comes_back: bool = False) -> None:
        """A member is to leave between two steps; `comes_back`: it is only left out."""
        if slot in self.living and slot not in self._leaving:
            self._leaving.append(slot)
            if comes_back:
                self._to_leave_out.add(slot)

    @property
    def waiting(self) -> tuple[int, ...]:
        """The lost slots whose new workers wait to be members."""
        return tuple(self._waiting)

    def wait(self, slot: int) -> None:
        """The new worker of a lost slot is ready to be a member."""
        if slot in self._gone and slot not in self._waiting:
            self._waiting.append(slot)

    def expect(self, slot: int) -> None:
        """A further worker is started in a new slot: it is treated as one that was lost before."""
        self._gone.add(slot)

    def give_up(self, slot: int) -> None:
        """The new worker of a lost slot has ended before it was a member."""
        if slot in self._waiting:
            self._waiting.remove(slot)

    def lose(self, slot: int) -> bool:
        """A worker was lost; whether the others can go on without it."""
        if slot in self._gone:
            return True
        if not self.can_lose({slot}):
            return False
        self._gone.add(slot)
        return True

    def can_lose(self, slots: Collection[int]) -> bool:
        """Whether these workers are members without which the others can go on."""
        living = self.living
        known, left = set(slots) <= set(living), len(living) - len(slots)
        return known and left >= self.fewest and self._ready >= set(self.view.members)

    def stand(self, standing: SurvivorState) -> None:
        """A survivor says where it stands."""
        if standing.view == self.view.number:
            self._standing[standing.slot] = standing

    @property
    def broken(self) -> bool:
        """Whether the view has lost a member."""
        return bool(self._gone & set(self.view.members))

    def follow(self) -> SurvivorView | None:
        """The next view, once it is due: all have said where they are, and one is lost or may come back."""
        living = self.living
        if not living or any(slot not in self._standing for slot in living):
            return None
        told = [self._standing[slot] for slot in living]
        planned = not self.broken and all(one.admits for one in told)
        damage = "" if self.broken else next((one.damage for one in told if one.damage), "")
        if not self.broken and not planned and not (damage and self._may_repeat(told)):
            return None
        handed: dict[int, int] = {}
        for one in told:
            for loader, count in one.handed.items():
                handed[loader] = max(count, handed.get(loader, 0))
        furthest = max(one.operation for one in told)
        joined = self._waiting if planned else []
        left = self._depart(living) if planned else []
        stay = [slot for slot in living if slot not in left]
        self.view = SurvivorView(
            number=self.view.number + 1,
            members=(*stay, *joined),
            operations=(
                *(one.operation for one in told if one.slot in stay),
                *[furthest] * len(joined),
            ),
            handed=handed,
            lost=tuple(slot for slot in self.view.members if slot not in living),
            left=tuple(left),
            out=tuple(slot for slot in left if slot in self._gone),
            joined=tuple(joined),
            planned=planned,
            damage=damage,
        )
        if joined:
            self._gone -= set(joined)
            self._ready |= set(joined)
            self._waiting = []
        self._standing = {}
        return self.view

    def _may_repeat(self, told: Sequence[SurvivorState]) -> bool:
        """Whether an exchange is repeated once more: not again and again at one place."""
        at = max(one.operation for one in told)
        self._repeated = [one for one in self._repeated if at - one < _SAME_PLACE]
        if len(self._repeated) >= _MOST_REPEATS:
            return False
        self._repeated.append(at)
        return True

    def _depart(self, living: Sequence[int]) -> list[int]:
        """The members that leave now: those that are to, as long as enough stay."""
        left: list[int] = []
        for slot in self._leaving:
            if slot in living and len(living) - len(left) - 1 >= self.fewest:
                left.append(slot)
        out = set(left) & self._to_leave_out
        self._leaving, self._to_leave_out = [], set()
        self._left |= set(left) - out
        self._gone |= out
        return left
