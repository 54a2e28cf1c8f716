"""What do workers and the coordinator of a run's members say to each other? One class per message.

A worker says Join, Report, Accuse, Leaving, Fenced, Installed, Healed. The launcher says Exited. The
coordinator says Fence, NewView, LeaveOut, Stop to a worker, and Respawn, Ended to the launcher; Announce
becomes an event. Messages may be lost, repeated or reordered: each says which view it is about, and is
handled alike however often it comes.
"""

from __future__ import annotations

from typing import Literal
from uuid import UUID

import msgspec

from echelon.membership.ledger import Ledger, Span
from echelon.membership.view import MemberId, View

StepPhase = Literal["undrawn", "held", "partial"]
How = Literal["draw", "reduce", "repeat"]
Evidence = Literal["exited", "closed", "silent", "late", "slow", "diverging", "leaving", "accused"]

AnnouncedKind = Literal["formed", "lost", "left-out", "left", "joined", "back", "waiting", "stopped"]


class Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", forbid_unknown_fields=True):
    """Base of all messages; the tag is the class's name."""


class Healing(msgspec.Struct, frozen=True, kw_only=True):
    """Where a member takes the state from: `source` has it as it was after step `base`."""

    source: MemberId
    base: int


class StepState(msgspec.Struct, frozen=True, kw_only=True):
    """Where a worker stands when its view is fenced. It does not change after that.

    following  the last step whose sum landed here
    ledger     the ledger after that step
    holds      the step after which it has the whole state: weights, optimizer, codecs; None if it has none.
               It is less than `following` for a worker that heals and keeps its old state meanwhile
    held       the ledger after step `holds`
    phase      of step following + 1: "undrawn", nothing was computed; "held", its own gradients are
               intact; "partial", they were overwritten by half a sum
    part       the samples of step following + 1 that are this worker's
    healing    from whom it receives the state
    """

    following: int
    ledger: Ledger
    holds: int | None
    held: Ledger | None = None
    phase: StepPhase = "undrawn"
    part: tuple[Span, ...] = ()
    healing: Healing | None = None

    @property
    def current(self) -> bool:
        """Whether it has the whole state of the last step that landed here."""
        return self.holds == self.following


# A worker says


class Join(Message, frozen=True, kw_only=True, tag="join"):
    """A process asks to take part: at the beginning, later, or after it was left out.

    fingerprint  which script, model and versions it has
    well_s       how long it computes a step now, if it was left out
    """

    member: MemberId
    fingerprint: str = ""
    well_s: float | None = None


class Report(Message, frozen=True, kw_only=True, tag="report"):
    """How far a worker's training thread is. `arrived`: all gradients of the step after `step` are sent.

    compute_s    how long its last step took without waiting for others
    finite       whether its last gradients were finite
    needs_state  whether the transfer of the state to it has failed
    """

    member: MemberId
    view: UUID
    step: int
    arrived: bool = False
    compute_s: float | None = None
    finite: bool = True
    needs_state: bool = False


class Accuse(Message, frozen=True, kw_only=True, tag="accuse"):
    """A member cannot reach another one."""

    member: MemberId
    view: UUID
    whom: MemberId
    detail: str = ""


class Leaving(Message, frozen=True, kw_only=True, tag="leaving"):
    """A member asks to leave in an orderly way."""

    member: MemberId


class Fenced(Message, frozen=True, kw_only=True, tag="fenced"):
    """A member has stopped all exchanges of the view, and stands here."""

    member: MemberId
    view: UUID
    state: StepState


class Installed(Message, frozen=True, kw_only=True, tag="installed"):
    """A member exchanges in this view now."""

    member: MemberId
    view: UUID


class Healed(Message, frozen=True, kw_only=True, tag="healed"):
    """A member has received the whole state, and has applied all steps since."""

    member: MemberId
    view: UUID


# The launcher says


class Exited(Message, frozen=True, kw_only=True, tag="exited"):
    """A process has ended. `failure` is empty if a signal ended it; else exception, message and line."""

    member: MemberId
    failure: str = ""
    signal: int = 0


# The coordinator says to workers


class NewView(Message, frozen=True, kw_only=True, tag="new-view"):
    """The next view, and where it begins.

    committed  the last committed step; `ledger` is the ledger after it
    how        what becomes of step committed + 1: "draw" it, nobody had begun; "reduce" it from the
               gradients that members hold, with the parts of `parts`; "repeat" it, from the same samples
    parts      with "reduce": who has which samples in it
    sources    the members that heal, and from whom
    """

    view: View
    committed: int
    ledger: Ledger
    how: How
    parts: tuple[tuple[MemberId, tuple[Span, ...]], ...] = ()
    sources: tuple[tuple[MemberId, Healing], ...] = ()


class Fence(Message, frozen=True, kw_only=True, tag="fence"):
    """Stop all exchanges of this view and say where you stand: at once, or after step `after`.

    It has the whole record of the view, for members that have not installed it yet.
    """

    record: NewView
    after: int | None = None


class LeaveOut(Message, frozen=True, kw_only=True, tag="left-out"):
    """This process is not a member of the current view. It may ask to join again."""

    member: MemberId
    number: int
    reason: str


class Stop(Message, frozen=True, kw_only=True, tag="stop"):
    """End training in an orderly way, with a checkpoint of the last committed step if `checkpoint`."""

    reason: str
    checkpoint: bool


# The coordinator says to the launcher, and to the record


class Respawn(Message, frozen=True, kw_only=True, tag="respawn"):
    """Start the worker of this slot again, as this member."""

    member: MemberId


class Ended(Message, frozen=True, kw_only=True, tag="ended"):
    """The run ends with this error; `member` failed first."""

    reason: str
    member: MemberId | None = None


class Announce(Message, frozen=True, kw_only=True, tag="announce"):
    """One line for the user, and an event."""

    kind: AnnouncedKind
    member: MemberId | None
    text: str


FromWorker = Join | Report | Accuse | Leaving | Fenced | Installed | Healed
ToWorker = NewView | Fence | LeaveOut | Stop
Instruction = tuple[MemberId, ToWorker] | Respawn | Ended | Announce
