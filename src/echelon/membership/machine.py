"""Who is in the next view, and when does it begin? The coordinator: events in, instructions out.

It is asked only when members change. Members step without it: if it is gone, they train on until one of
them is lost.

    forming   members join; when all are there, or the time is over and enough are, the first view begins
    running   reports come in; nobody waits for an answer
    fencing   members were told to stop the view's exchanges; when all that stay have said where they stand,
              decision.py says what becomes of the step, the log gets the new view, and members are told.
              With fewer than `min_workers` it waits for more, and stops the run after `wait_s`

If a member is lost, the fence is at once. Joining, leaving and becoming whole wait for the end of a step.
Whoever does not answer a fence in time is silent; one that answers after all is a member again, until the
next view is decided. Every decision is in the log before anybody is told.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from uuid import UUID

from echelon.membership.decision import decide, holders
from echelon.membership.lateness import LatenessRules, MemberProgress
from echelon.membership.ledger import Ledger
from echelon.membership.log import Log, RunStopped, SlotFailed, SlotStarted, ViewDecided
from echelon.membership.messages import (
    Accuse,
    Announce,
    AnnouncedKind,
    Ended,
    Evidence,
    Exited,
    Fence,
    Fenced,
    FromWorker,
    Healed,
    Installed,
    Instruction,
    Join,
    LeaveOut,
    Leaving,
    NewView,
    Report,
    Respawn,
    StepState,
    Stop,
)
from echelon.membership.readmission import Readmission
from echelon.membership.respawn import RespawnRule
from echelon.membership.view import MemberId, View, first_view, latest_of, named


@dataclass(frozen=True, slots=True, kw_only=True)
class MembershipRules:
    """workers       how many the run begins with
    min_workers   with fewer it does not go on; 0: half of `workers`, rounded up
    join_s        how long the first view waits for all workers
    fence_s       how long a fence waits for an answer
    resend_s      how often what is not answered is said again
    wait_s        how long a run with too few workers waits for more
    respawn       how often in a row a worker is started again
    """

    workers: int
    min_workers: int = 0
    join_s: float = 60.0
    fence_s: float = 1.0
    resend_s: float = 0.1
    wait_s: float = 60.0
    respawn: int = 3
    lateness: LatenessRules = field(default_factory=LatenessRules)

    @property
    def fewest(self) -> int:
        """The least number of members."""
        return self.min_workers or -(-self.workers // 2)


@dataclass(slots=True)
class _Fence:
    """A fence under way; `after` is the step after which members stop, None: at once."""

    began: float
    after: int | None
    said: float
    short_since: float | None = None


class MembershipCoordinator:
    """The members of one run."""

    def __init__(self, run: UUID, rules: MembershipRules, log: Log, ledger: Ledger) -> None:
        self._run = run
        self._rules = rules
        self._log = log
        self._ledger = ledger
        self._respawn = RespawnRule(rules.respawn)
        self._readmission = Readmission()
        self._lateness = MemberProgress(rules.lateness)
        self._record: NewView | None = None
        self._decided_at = self._said_at = 0.0
        self._installed: set[MemberId] = set()
        self._acks: dict[MemberId, StepState] = {}
        self._out: dict[MemberId, tuple[Evidence, str]] = {}
        self._silent: set[MemberId] = set()
        self._leaving: dict[MemberId, tuple[Evidence, str]] = {}
        self._joining: dict[MemberId, float] = {}
        self._changed: set[MemberId] = set()
        self._accusals: Counter[tuple[str, int]] = Counter()
        self._without_progress = 0
        self._fence: _Fence | None = None
        self._incarnations: Counter[tuple[str, int]] = Counter()
        self._began: float | None = None
        self.ended: str | None = None
        self._restore()

    def _restore(self) -> None:
        """Go on from the log: with the last view, which may or may not be known to its members."""
        for entry in self._log.read():
            if isinstance(entry, ViewDecided):
                self._record = entry.record
            elif isinstance(entry, SlotFailed):
                self._respawn.failed(entry.member, entry.failure, entry.step)
            elif isinstance(entry, SlotStarted):
                self._incarnations[entry.member.place] = entry.member.incarnation
            elif isinstance(entry, RunStopped):
                self.ended = entry.reason
        if self._record is not None:
            self._lateness.begin(self._record.view.members, self._record.committed, 0.0)
            # Whether a fence was under way is not known, and a fence loses nothing.
            self._fence = _Fence(began=float("-inf"), after=None, said=float("-inf"))

    @property
    def view(self) -> View | None:
        """The current view."""
        return self._record.view if self._record is not None else None

    @property
    def is_fencing(self) -> bool:
        """Whether members were told to stop."""
        return self._fence is not None

    def tick(self, now: float) -> list[Instruction]:
        """Time has passed: say again what was not answered, and leave out who is late or silent."""
        if self.ended is not None:
            return []
        told: list[Instruction] = []
        if self._began is None:
            self._began = self._decided_at = now
            if self._fence is not None:
                self._fence.began = now
        if self._record is not None:
            if self._fence is not None:
                told += self._press(self._fence, now)
            else:
                told += self._look(self._record, now)
        return told + self._go_on(now)

    def handle(self, event: FromWorker | Exited, now: float) -> list[Instruction]:
        """Something was said or has happened."""
        if self.ended is not None:
            return []
        told: list[Instruction] = []
        if isinstance(event, Exited):
            told += self._exited(event, now)
        elif isinstance(event, Join):
            told += self._join(event, now)
        elif isinstance(event, Leaving):
            self._leave(event.member, "leaving", "it asked to leave")
        elif not self._is_of_view(event.member, event.view):
            return self._correct(event.member)
        else:
            told += self._from_member(event, now)
        return told if self.ended is not None else told + self._go_on(now)

    # What members and the launcher say

    def _from_member(
        self, event: Report | Accuse | Fenced | Installed | Healed, now: float
    ) -> list[Instruction]:
        member = event.member
        self._installed.add(member)
        if isinstance(event, Report):
            self._lateness.note(event, now)
            if event.needs_state and self.view is not None and member in self.view.healing:
                self._changed.add(member)
            if self._record is not None and event.step > self._record.committed:
                self._respawn.progressed(member)
                self._respawn.forget_failures()
                self._without_progress = 0
                self._accusals.clear()
        elif isinstance(event, Fenced):
            self._acks.setdefault(member, event.state)
            self._silent.discard(member)
            if self._fence is None:
                return self._begin_fence(now, at_once=True)
        elif isinstance(event, Accuse):
            if event.whom != member and self.view is not None and event.whom in self.view:
                self._accusals[event.whom.place] += 1
                return self._begin_fence(now, at_once=True)
        elif isinstance(event, Healed) and self.view is not None and member in self.view.healing:
            self._changed.add(member)
        return []

    def _is_of_view(self, member: MemberId, view: UUID) -> bool:
        return self.view is not None and self.view.id == view and member in self.view.members

    def _correct(self, member: MemberId) -> list[Instruction]:
        """Somebody speaks of another view: say which one there is."""
        if self._record is None:
            return []
        if member in self._record.view.members:
            return [(member, self._record)]
        if member in self._joining:
            return []
        return [(member, self._left_out(member, "the others have gone on without it"))]

    def _left_out(self, member: MemberId, reason: str) -> LeaveOut:
        number = self._record.view.number if self._record is not None else 0
        return LeaveOut(member=member, number=number, reason=reason)

    def _join(self, event: Join, now: float) -> list[Instruction]:
        member = event.member
        if self._record is not None and member in self._record.view and member not in self._out:
            return [(member, self._record)]
        if member.incarnation < self._incarnations[member.place]:
            return [(member, self._left_out(member, "a later process has its slot"))]
        self._incarnations[member.place] = member.incarnation
        for other in [*self._joining, *(self.view.members if self.view is not None else ())]:
            if other.place == member.place and other != member:
                self._lose(other, "exited", "a later process has its slot")
        well = None if event.well_s is None else self._lateness.is_well(event.well_s)
        if self._readmission.may_join(member, well, now):
            self._joining[member] = now
        return []

    def _exited(self, event: Exited, now: float) -> list[Instruction]:
        member = event.member
        if event.member.incarnation < self._incarnations[member.place]:
            return []  # told twice, and started again since
        told: list[Instruction] = []
        reason = event.failure or (f"ended by signal {event.signal}" if event.signal else "ended")
        step = self._record.committed if self._record is not None else 0
        self._log.append(SlotFailed(member=member, failure=event.failure, step=step))
        self._respawn.failed(member, event.failure, step)
        self._lose(member, "exited", reason)
        common = self._respawn.common(self.view.members if self.view is not None else [member])
        if event.failure and common:
            return self._end(common, member, now, checkpoint=False)
        refusal = self._respawn.refusal(member)
        if refusal or self._rules.respawn == 0:
            self._incarnations[member.place] = member.incarnation + 1
            why = refusal or "workers are not started again"
            told.append(Announce(kind="left-out", member=member, text=f"{member} is left out: {why}"))
            return told
        again = MemberId(member.node, member.slot, member.incarnation + 1)
        self._log.append(SlotStarted(member=again))
        self._incarnations[member.place] = again.incarnation
        self._readmission.started_again(again)
        return [*told, Respawn(member=again)]

    def _lose(self, member: MemberId, evidence: Evidence, reason: str) -> None:
        self._joining.pop(member, None)
        if self.view is not None and member in self.view.members:
            self._out.setdefault(member, (evidence, reason))

    def _leave(self, member: MemberId, evidence: Evidence, reason: str) -> None:
        self._joining.pop(member, None)
        if self.view is not None and member in self.view.members:
            self._leaving.setdefault(member, (evidence, reason))

    # Time

    def _press(self, fence: _Fence, now: float) -> list[Instruction]:
        """A fence is under way: repeat it; whoever takes too long is silent."""
        assert self._record is not None
        waited_s = now - fence.began
        if fence.after is not None and waited_s > self._lateness.limit_s:
            fence.after, fence.began, waited_s = (
                None,
                now,
                0.0,
            )  # the step does not end
        missing = [m for m in self._staying() if m not in self._acks]
        if fence.after is None and waited_s > self._rules.fence_s:
            self._silent.update(missing)
        if now - fence.said < self._rules.resend_s:
            return []
        fence.said = now
        return [
            (member, Fence(record=self._record, after=fence.after))
            for member in self._record.view.members
            if member not in self._acks and member not in self._out
        ]

    def _look(self, record: NewView, now: float) -> list[Instruction]:
        """No fence is under way: is everybody in the view, and does everybody keep up?"""
        told: list[Instruction] = []
        missing = [m for m in record.view.members if m not in self._installed]
        if missing and now - self._decided_at > max(self._rules.fence_s, self._lateness.limit_s):
            for member in missing:
                self._out.setdefault(member, ("silent", f"did not begin view {record.view.number}"))
        elif missing and now - self._said_at >= self._rules.resend_s:
            self._said_at = now
            told += [(member, record) for member in missing]
        limit_s = self._lateness.limit_s
        for member in self._lateness.late(record.view.members, now):
            reason = f"others have waited for it for more than {limit_s:.3g} s"
            self._out.setdefault(member, ("late", reason))
        for member, evidence in self._lateness.unwell(record.view.full).items():
            self._leave(member, evidence, f"it is {evidence}")
        return told

    # Views

    def _go_on(self, now: float) -> list[Instruction]:
        """Form the first view, begin a fence, or decide the next view: whatever can be done now."""
        if self._record is None:
            return self._form(now)
        told: list[Instruction] = []
        if self._fence is None:
            if self._out:
                told += self._begin_fence(now, at_once=True)
            elif self._joining or self._changed or self._leaving:
                told += self._begin_fence(now, at_once=False)
        elif self._out and self._fence.after is not None:
            self._fence.after, self._fence.began, self._fence.said = None, now, float("-inf")
            told += self._press(self._fence, now)
        if self._fence is not None and all(m in self._acks for m in self._staying()):
            told += self._try_decide(self._fence, now)
        return told

    def _form(self, now: float) -> list[Instruction]:
        waited_s = now - self._began if self._began is not None else 0.0
        members = latest_of(self._joining)
        enough = len(members) >= self._rules.workers
        if not enough and not (waited_s > self._rules.join_s and len(members) >= self._rules.fewest):
            if waited_s > self._rules.join_s + self._rules.wait_s:
                reason = f"{len(members)} of {self._rules.workers} workers have joined"
                return self._end(reason, None, now, checkpoint=False)
            return []
        view = first_view(self._run, members)
        return self._begin_view(NewView(view=view, committed=0, ledger=self._ledger, how="draw"), now)

    def _begin_fence(self, now: float, *, at_once: bool) -> list[Instruction]:
        record = self._record
        if record is None:
            return []
        if self._fence is None:
            front = max(self._lateness.front, record.committed)
            self._fence = _Fence(began=now, after=None if at_once else front + 2, said=float("-inf"))
        elif at_once and self._fence.after is not None:
            self._fence.after, self._fence.began, self._fence.said = None, now, float("-inf")
        return self._press(self._fence, now)

    def _staying(self) -> list[MemberId]:
        """The members whose answers are awaited; also of those that leave in an orderly way."""
        assert self._record is not None
        return [m for m in self._record.view.members if m not in self._out and m not in self._silent]

    def _try_decide(self, fence: _Fence, now: float) -> list[Instruction]:
        """All have answered: begin the next view, if enough members and a whole state are there."""
        assert self._record is not None
        states = {member: self._acks[member] for member in self._staying()}
        self._drop_accused(states)
        joining = [m for m in latest_of([*states, *self._joining]) if m not in states]
        stays = {m: state for m, state in states.items() if m not in self._leaving}
        whole = holders(states)
        newest = max((states[m].holds or 0 for m in whole), default=-1)
        if any(stays[m].holds == newest for m in holders(stays)):
            states = stays  # else only one that leaves has the last step, and gives it away first
        if len(states) + len(joining) < self._rules.fewest or not whole:
            return self._wait(fence, len(states) + len(joining), bool(whole), now)
        record = decide(self._run, self._record.view, states, joining)
        return self._begin_view(record, now)

    def _drop_accused(self, states: dict[MemberId, StepState]) -> None:
        """If members accuse each other again before any step, the most accused one is left out."""
        if not self._accusals or self._without_progress == 0 or len(states) < 2:
            return
        worst = max(states, key=lambda m: self._accusals[m.place])
        if self._accusals[worst.place]:
            self._out[worst] = ("accused", "others cannot reach it")
            del states[worst]

    def _wait(self, fence: _Fence, there: int, whole: bool, now: float) -> list[Instruction]:
        """Too few, or nobody with a state: wait for more, and then stop."""
        if fence.short_since is None:
            fence.short_since = now
            text = f"waiting: {there} workers, {self._rules.fewest} are needed"
            if not whole:
                text = "waiting: no worker has the whole state"
            return [Announce(kind="waiting", member=None, text=text)]
        if now - fence.short_since <= self._rules.wait_s:
            return []
        reason = f"{there} workers are left, {self._rules.fewest} are needed"
        if not whole:
            reason = "no worker that is left has the whole state"
        return self._end(reason, None, now, checkpoint=whole)

    def _begin_view(self, record: NewView, now: float) -> list[Instruction]:
        """Write it down, then tell everybody."""
        before = self._record.view if self._record is not None else None
        gone = [m for m in before.members if m not in record.view] if before is not None else []
        why = {m: self._why(m) for m in gone}
        self._log.append(ViewDecided(record=record, out=tuple((m, why[m][1]) for m in gone)))
        told: list[Instruction] = [(member, record) for member in record.view.members]
        for member in gone:
            evidence, reason = why[member]
            if evidence != "exited":
                self._readmission.left_out(member, evidence, now)
            told.append((member, LeaveOut(member=member, number=record.view.number, reason=reason)))
            orderly = evidence == "leaving"
            lost = evidence in ("exited", "silent")
            kind: AnnouncedKind = "left" if orderly else "lost" if lost else "left-out"
            told.append(Announce(kind=kind, member=member, text=f"{member}: {reason}"))
        told += self._tell_joined(before, record)
        self._record, self._fence = record, None
        self._decided_at = self._said_at = now
        self._installed, self._acks, self._out, self._silent = set(), {}, {}, set()
        self._leaving = {m: why for m, why in self._leaving.items() if m in record.view}
        self._joining = {m: at for m, at in self._joining.items() if m not in record.view}
        self._changed = set()
        self._without_progress += 1
        self._lateness.begin(record.view.members, record.committed, now)
        return told

    def _tell_joined(self, before: View | None, record: NewView) -> list[Instruction]:
        view = record.view
        if before is None:
            return [Announce(kind="formed", member=None, text=f"{len(view.members)} workers")]
        told: list[Instruction] = []
        for member in view.members:
            if member not in before:
                told.append(Announce(kind="joined", member=member, text=f"{member} joins"))
            elif member in before.healing and member not in view.healing:
                text = f"{member} takes part from step {record.committed + 1}"
                told.append(Announce(kind="back", member=member, text=text))
        return told

    def _why(self, member: MemberId) -> tuple[Evidence, str]:
        if member in self._out:
            return self._out[member]
        if member in self._leaving:
            return self._leaving[member]
        return "silent", f"did not answer within {self._rules.fence_s:g} s"

    def _end(
        self, reason: str, member: MemberId | None, now: float, *, checkpoint: bool
    ) -> list[Instruction]:
        self._log.append(RunStopped(reason=reason))
        self.ended = reason
        members = self.view.members if self.view is not None else ()
        told: list[Instruction] = [(m, Stop(reason=reason, checkpoint=checkpoint)) for m in members]
        lost = {m: text for m, (_, text) in self._out.items()}
        text = f"{reason}; {named(lost, lost)}" if lost else reason
        return [
            *told,
            Announce(kind="stopped", member=member, text=text),
            Ended(reason=reason, member=member),
        ]
