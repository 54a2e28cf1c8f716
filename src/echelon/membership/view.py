"""Who belongs together? A view: its number, its id, and its members in order.

The rules of succession:

- The next view has the next number. Its id follows from the run, the number and the members, so two
  coordinators that decide the same make the same view.
- Survivors keep their order. Sums are computed in this order, and neighbours of a ring stay neighbours.
- New members come after them, by node and slot.
- A slot has one member at most: the one with the latest incarnation.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from uuid import UUID, uuid5

import msgspec


class MemberId(msgspec.Struct, frozen=True, order=True):
    """One process: the worker in a slot of a node; when it is started again it has another incarnation."""

    node: str
    slot: int
    incarnation: int = 0

    @property
    def place(self) -> tuple[str, int]:
        """What stays when the process is started again."""
        return self.node, self.slot

    def __str__(self) -> str:
        again = f", start {self.incarnation + 1}" if self.incarnation else ""
        return f"worker {self.slot} on {self.node}{again}"


class View(msgspec.Struct, frozen=True, kw_only=True):
    """The members that reduce together, in order.

    Members in `healing` do not have the whole state yet: they take part in every exchange with weight zero.
    """

    number: int
    id: UUID
    members: tuple[MemberId, ...]
    healing: tuple[MemberId, ...] = ()

    def __contains__(self, member: object) -> bool:
        return member in self.members

    @property
    def full(self) -> tuple[MemberId, ...]:
        """The members that have the whole state, in order; only they draw samples."""
        return tuple(member for member in self.members if member not in self.healing)

    def follow(self, run: UUID, members: Iterable[MemberId], healing: Iterable[MemberId] = ()) -> View:
        """The next view with these members."""
        latest = latest_of(members)
        stay = [member for member in self.members if member in latest]
        fresh = sorted(latest - set(stay))
        weightless = set(healing)
        return make_view(run, self.number + 1, [*stay, *fresh], [m for m in latest if m in weightless])


def first_view(run: UUID, members: Iterable[MemberId]) -> View:
    """The view that a run begins with."""
    return make_view(run, 1, sorted(latest_of(members)))


def make_view(
    run: UUID, number: int, members: Iterable[MemberId], healing: Iterable[MemberId] = ()
) -> View:
    """A view with the id that follows from its content."""
    ordered = tuple(members)
    if len({member.place for member in ordered}) != len(ordered):
        raise ValueError(f"two members of view {number} have one slot: {ordered}")
    waiting = set(healing)
    weightless = tuple(member for member in ordered if member in waiting)
    content = msgspec.json.encode([number, ordered, weightless]).decode()
    return View(number=number, id=uuid5(run, content), members=ordered, healing=weightless)


def latest_of(members: Iterable[MemberId]) -> set[MemberId]:
    """Of several incarnations in one slot, the latest."""
    latest: dict[tuple[str, int], MemberId] = {}
    for member in members:
        known = latest.get(member.place)
        if known is None or known.incarnation < member.incarnation:
            latest[member.place] = member
    return set(latest.values())


def named(members: Iterable[MemberId], reasons: Mapping[MemberId, str] | None = None) -> str:
    """Members in words, each with its reason."""
    known = reasons or {}
    return "; ".join(f"{member}: {known[member]}" if member in known else str(member) for member in members)
