"""What does a worker do when its view is fenced, and when the next one begins?

Calls come from two sides. The training thread reports `began`, `sent`, `spoiled` and `landed`; the
coordinator's messages come to `fence`, `install`, `left_out`. Both are answered by messages to the
coordinator, or by an Act for the worker's engine. The shell around it holds one lock for all calls: after
`fence` has answered, `may_send` is false and nothing lands until the next view is installed, so the answer
stays true.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal
from uuid import UUID

from echelon.membership.ledger import Ledger, Parts, Span, count, used_by
from echelon.membership.messages import (
    Fence,
    Fenced,
    Healed,
    Healing,
    How,
    Installed,
    NewView,
    StepPhase,
    StepState,
)
from echelon.membership.view import MemberId, View

Do = Literal["go-on", "draw", "reduce-again", "repeat", "heal"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Act:
    """What the engine does once it is connected in the new view.

    go-on         take part with weight zero: it receives the state already, or has no samples in this step
    draw          ask the loader for the next part
    reduce-again  send the gradients that are held, with the new weight
    repeat        give up this iteration: its optimizer step does nothing, and the loader gives the
                  step's samples again
    heal          receive the state from `source`, and keep the sums that land meanwhile
    give_to       members that receive this worker's state as it is now
    """

    do: Do
    source: Healing | None = None
    give_to: tuple[MemberId, ...] = ()


class MemberMachine:
    """One worker's part in views, from the first view that it is a member of."""

    def __init__(self, member: MemberId) -> None:
        self.member = member
        self.view: View | None = None
        self.fenced = False
        self.parts: Parts = {}
        self.following = 0
        self.holds: int | None = None
        self._ledger: Ledger | None = None
        self._held: Ledger | None = None
        self.phase: StepPhase = "undrawn"
        self.healing: Healing | None = None
        self._stop_after: int | None = None
        self._answer: Fenced | None = None
        self._seen = 0  # the number of the latest view that it heard of, also of one without it
        self._busy = False  # the script is between drawing a part and its optimizer step

    # The training thread reports

    @property
    def step(self) -> int:
        """The step under way."""
        return self.following + 1

    @property
    def ledger(self) -> Ledger:
        """After the last step whose sum landed here."""
        if self._ledger is None:
            raise RuntimeError(f"{self.member} is not a member of a view")
        return self._ledger

    @property
    def part(self) -> tuple[Span, ...]:
        """This worker's samples of the step under way."""
        return self.parts.get(self.member, ())

    @property
    def weight(self) -> float:
        """The weight of this worker's gradients in the step under way."""
        return count(self.part) / max(1, count(used_by(self.parts)))

    @property
    def may_send(self) -> bool:
        """Whether gradients may be sent, and sums may land."""
        return self.view is not None and not self.fenced

    def began(self) -> None:
        """The worker has drawn its part: from here on it holds something of the step."""
        self._busy = True
        if self.phase == "undrawn":
            self.phase = "held"

    def spoiled(self) -> None:
        """A sum has overwritten part of its own gradients, and nothing of it was kept."""
        self.phase = "partial"

    def landed(self) -> list[Fenced]:
        """All sums of the step under way have landed."""
        if not self.may_send:
            raise RuntimeError(f"{self.member} is fenced: nothing may land")
        current = self.holds == self.following
        self._busy = False
        self.following += 1
        self._ledger = self.ledger.after(used_by(self.parts))
        if current:
            self.holds, self._held = self.following, self._ledger
        self._plan()
        return self.stop_here()

    def overwriting(self) -> bool:
        """Its kept state is replaced piece by piece from now on, so none is whole; not while fenced."""
        if self.fenced:
            return False  # the others count on the answer
        self.holds = self._held = None
        return True

    def received(self, base: int) -> list[Healed]:
        """The state after step `base` is complete, and the sums that landed since are applied to it.

        Not while it is fenced: the others count on the answer. It is said again in the next view.
        """
        if self.fenced or self.healing is None or self.healing.base != base or self.view is None:
            return []  # of a transfer that was given up
        self.healing = None
        self.holds, self._held = self.following, self._ledger
        return [Healed(member=self.member, view=self.view.id)]

    def transfer_failed(self, base: int) -> None:
        """The transfer of the state after step `base` has ended early: another one is needed."""
        if self.healing is not None and self.healing.base == base:
            self.healing = None

    @property
    def needs_state(self) -> bool:
        """Whether it has no whole state, and nobody sends it one; its reports say so."""
        return self.view is not None and self.holds != self.following and self.healing is None

    def stop_here(self) -> list[Fenced]:
        """Stop if a fence asked to stop after a step that has landed."""
        due = self._stop_after is not None and self.following >= self._stop_after
        return self._freeze() if due else []

    def stand_with(self, other: MemberMachine) -> None:
        """Take over where another member of the same view stands: for a simulation, where one member's
        steps stand for those of all.
        """
        assert other.view is self.view or other.view == self.view
        if self.holds == self.following:
            self.holds, self._held = other.following, other._ledger
        self.following, self._ledger, self.parts = other.following, other._ledger, other.parts
        self.phase, self._busy = other.phase, other._busy

    # The coordinator says

    def fence(self, message: Fence) -> list[Fenced | Act]:
        """Stop, at once or after a step, and say where this worker stands; perhaps begin the view first."""
        record = message.record
        if self.member not in record.view or self._is_older(record.view):
            return []
        act = self.install(record)
        acts: list[Fenced | Act] = [] if act is None else [act]
        if message.after is not None and self.following < message.after and not self.fenced:
            self._stop_after = message.after
            return acts
        return [*acts, *self._freeze()]

    def install(self, record: NewView) -> Act | None:
        """Begin the next view; None if this worker has begun it already, or a later one."""
        view, before = record.view, self.view
        if self.member not in view or self._is_older(view) or (before is not None and before.id == view.id):
            return None
        source = dict(record.sources).get(self.member)
        goes_on = source is not None and source == self.healing and self.following == record.committed
        stayed = before is not None and before.number + 1 == view.number
        held = stayed and self.phase == "held"
        self.view, self.fenced, self._stop_after, self._seen = view, False, None, view.number
        self.following, self._ledger, self.healing = record.committed, record.ledger, source
        if source is None:
            self.holds, self._held = record.committed, record.ledger
        elif not stayed or (self.holds is not None and self.holds >= record.committed):
            self.holds = self._held = None  # of steps that the others may have decided otherwise
        self._plan(dict(record.parts) if record.how == "reduce" else None)
        give_to = tuple(m for m, heal in record.sources if heal.source == self.member)
        return Act(do=self._do(record.how, held, goes_on), source=source, give_to=give_to)

    def _do(self, how: How, held: bool, goes_on: bool) -> Do:
        if self.healing is not None:
            return "go-on" if goes_on else "heal"
        if how != "reduce":
            return "repeat" if self._busy else "draw"
        if not held or not self.part:
            return "draw" if self.part else "go-on"
        self.phase = "held"
        return "reduce-again"

    def installed(self) -> list[Installed]:
        """The confirmation that this worker exchanges in its view."""
        return [] if self.view is None else [Installed(member=self.member, view=self.view.id)]

    def left_out(self, number: int) -> bool:
        """A view of this number does not have this worker. Whether that is news."""
        if self.view is None or number <= self.view.number:
            return False
        self._seen = max(self._seen, number)
        self.view, self.fenced, self._stop_after, self.healing = None, False, None, None
        self.holds = self._held = None
        return True

    def is_of_view(self, view: UUID) -> bool:
        """Whether a frame of this view may be used; others are refused."""
        return self.may_send and self.view is not None and self.view.id == view

    def state(self) -> StepState:
        """Where it stands."""
        return StepState(
            following=self.following,
            ledger=self.ledger,
            holds=self.holds,
            held=self._held if self.holds != self.following else None,
            phase=self.phase,
            part=self.part,
            healing=self.healing,
        )

    def _is_older(self, view: View) -> bool:
        return view.number < self._seen or (self.view is None and view.number == self._seen > 0)

    def _freeze(self) -> list[Fenced]:
        """Stop, and answer. The training thread may go on to compute, but the answer stays as it is."""
        assert self.view is not None
        if not self.fenced or self._answer is None:
            self._answer = Fenced(member=self.member, view=self.view.id, state=self.state())
        self.fenced, self._stop_after = True, None
        return [self._answer]

    def _plan(self, parts: Parts | None = None) -> None:
        """Who draws what in the step under way: as told, or the first samples that are open."""
        assert self.view is not None
        self.parts = self.ledger.draw(self.view.full) if parts is None else parts
        self.phase = "undrawn"
