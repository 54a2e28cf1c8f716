"""A run's members in one process: the real state machines, and exchanges, messages and faults around them.

Nothing is timed and nothing is concurrent: a test chooses what happens next. Messages may be delivered in
any order, twice or not at all. `check` says what must hold after every action.
"""

from __future__ import annotations

from collections.abc import Iterator
from uuid import UUID

from echelon.membership.lateness import LatenessRules
from echelon.membership.ledger import count, new_ledger, used_by
from echelon.membership.log import MemoryLog, ViewDecided
from echelon.membership.machine import MembershipCoordinator, MembershipRules
from echelon.membership.messages import (
    Accuse,
    Announce,
    Exited,
    Fence,
    Join,
    LeaveOut,
    Leaving,
    NewView,
    Report,
    Respawn,
    Stop,
)
from echelon.membership.view import MemberId
from echelon.membership.worker import Act, MemberMachine

RUN = UUID(int=7)
SAMPLES, BATCH = 22, 6


class Process:
    """A worker: its machine, and the results that are in its weights, oldest first."""

    def __init__(self, member):
        self.machine = MemberMachine(member)
        self.alive, self.stopped, self.done = True, False, False
        self.history = None
        self.queue = []
        self.answers = {}
        self.views = set()

    @property
    def runs(self):
        return self.alive and not self.stopped and not self.done


class World:
    """A coordinator, its workers, and the messages between them."""

    def __init__(self, workers=4, **rules):
        self.now = 0.0
        self.log = MemoryLog()
        lateness = LatenessRules(floor_s=0.5, first_s=3.0)
        options = {"workers": workers, "wait_s": 300.0, "respawn": 2, "lateness": lateness, **rules}
        self.rules = MembershipRules(**options)
        self.ledger = new_ledger(SAMPLES, BATCH)
        self.mail = []  # to whom (None: the coordinator), what
        self.sent = {}  # (view, step): the members that have sent their gradients
        self.results = {}  # (view, step): who had which samples in it
        self.said = []
        self.workers = {}
        self.coordinator = MembershipCoordinator(RUN, self.rules, self.log, self.ledger)
        self.tick(0.0)
        for slot in range(workers):
            self.spawn(MemberId(f"node-{slot % 2}", slot))

    # Processes

    def spawn(self, member):
        self.workers[member] = Process(member)
        self.mail.append((None, Join(member=member)))

    def kill(self, process, failure="", signal=9):
        process.alive = False
        told = Exited(member=process.machine.member, failure=failure, signal=0 if failure else signal)
        self.mail.append((None, told))

    def restart_coordinator(self):
        self.coordinator = MembershipCoordinator(RUN, self.rules, self.log, self.ledger)

    # Messages

    def tick(self, seconds):
        self.now += seconds
        self.carry_out(self.coordinator.tick(self.now))

    def carry_out(self, instructions):
        for one in instructions:
            if isinstance(one, Announce):
                self.said.append(one)
            elif isinstance(one, Respawn):
                self.spawn(one.member)
            elif isinstance(one, tuple):
                self.mail.append(one)

    def deliver(self, at, *, keep=False):
        to, message = self.mail[at] if keep else self.mail.pop(at)
        if to is None:
            self.carry_out(self.coordinator.handle(message, self.now))
            return
        process = self.workers[to]
        if process.stopped:
            self.mail.append((to, message))  # it waits in the socket
        elif process.alive:
            self._receive(process, message)

    def drop(self, at):
        """A message is lost. That a state is lost is noticed, because its connection ends."""
        to, message = self.mail.pop(at)
        if isinstance(message, tuple):
            self.workers[to].machine.transfer_failed(message[2])

    def _receive(self, process, message):
        machine = process.machine
        if isinstance(message, Stop):
            process.done = True
        elif isinstance(message, tuple):  # a state
            self._take_state(process, *message)
        elif isinstance(message, NewView):
            self._carry_act(process, machine.install(message))
            self.mail += [(None, one) for one in machine.installed()]
        elif isinstance(message, Fence):
            for one in machine.fence(message):
                if isinstance(one, Act):
                    self._carry_act(process, one)
                else:
                    self._answer(process, one)
        elif isinstance(message, LeaveOut) and machine.left_out(message.number):
            process.history, process.queue = None, []
            self.mail.append((None, Join(member=machine.member, well_s=0.01)))

    def _answer(self, process, fenced):
        known = process.answers.setdefault(fenced.view, fenced.state)
        assert fenced.state == known, "a member has moved after it was fenced"
        self.mail.append((None, fenced))

    def _carry_act(self, process, act):
        if act is None:
            return
        machine = process.machine
        process.views.add(machine.view.id)
        if act.source is None:
            if process.history is None:
                process.history = []
            assert len(process.history) == machine.holds, "a member does not have the committed step"
        elif machine.holds is None:
            process.history = None
        if act.do != "go-on" or act.source is None:
            process.queue = []
        for member in act.give_to:
            copy = list(process.history)
            self.mail.append((member, ("state", machine.view.id, machine.following, copy)))

    def _take_state(self, process, _, view, base, history):
        machine = process.machine
        if view not in process.views:
            self.mail.append((machine.member, ("state", view, base, history)))  # it waits for the view
            return
        if machine.healing is None or machine.healing.base != base or len(history) != base:
            return
        found = machine.received(base)
        if found:
            process.history, process.queue = history + process.queue, []
            self.mail += [(None, one) for one in found]
        elif machine.fenced:
            self.mail.append((machine.member, ("state", view, base, history)))  # it is said again

    # Training

    def begin(self, process):
        if process.machine.view is not None and process.machine.part:
            process.machine.began()

    def send(self, process):
        machine = process.machine
        if not machine.may_send or (machine.part and machine.phase == "undrawn"):
            return
        if machine.phase == "partial":
            return
        self.sent.setdefault((machine.view.id, machine.step), set()).add(machine.member)

    def has_sent(self, process):
        machine = process.machine
        key = machine.view.id, machine.step
        return machine.member in self.sent.get(key, ())

    def spoil(self, process):
        machine = process.machine
        if machine.may_send and machine.phase == "held" and self.has_sent(process):
            machine.spoiled()

    def can_land(self, process):
        machine = process.machine
        if not machine.may_send:
            return False
        return set(machine.view.members) == self.sent.get((machine.view.id, machine.step), set())

    def land(self, process):
        machine = process.machine
        if not self.can_land(process):
            return
        current = machine.holds == machine.following
        key = machine.view.id, machine.step
        parts = frozenset(used_by(machine.parts))
        assert self.results.setdefault(key, parts) == parts, "two results of one step in one view"
        result = (*key, parts)
        for one in machine.landed():
            self._answer(process, one)
        if current:
            process.history.append(result)
        else:
            process.queue.append(result)

    def report(self, process):
        machine = process.machine
        if machine.view is None:
            self.mail.append((None, Join(member=machine.member, well_s=0.01)))
            return
        arrived = not machine.fenced and self.has_sent(process)
        told = Report(member=machine.member, view=machine.view.id, step=machine.following, arrived=arrived)
        self.mail.append((None, told))

    def accuse(self, process, whom):
        if process.machine.view is not None:
            told = Accuse(member=process.machine.member, view=process.machine.view.id, whom=whom)
            self.mail.append((None, told))

    def leave(self, process):
        self.mail.append((None, Leaving(member=process.machine.member)))

    # What must hold

    def check(self):
        decided = [entry.record for entry in self.log.read() if isinstance(entry, ViewDecided)]
        assert [record.view.number for record in decided] == list(range(1, len(decided) + 1))
        assert len({record.view.id for record in decided}) == len(decided)
        view = self.coordinator.view
        together = [
            one
            for one in self.workers.values()
            if one.alive and view is not None and one.machine.view == view and one.history is not None
        ]
        for one in together:
            exactly_once(one.history)
            assert len(one.history) == one.machine.holds
        full = [one for one in together if one.machine.member in view.full]
        for one in together:
            for other in full:
                shared = min(len(one.history), len(other.history))
                assert one.history[:shared] == other.history[:shared], "members have different steps"
        lengths = [len(one.history) for one in full]
        assert not lengths or max(lengths) - min(lengths) <= 1, "members are more than a step apart"

    def settle(self, rounds=600):
        """No more faults: everything is delivered, time passes, everybody trains."""
        goal = None
        for process in self.workers.values():
            process.stopped = False
        for turn in range(rounds):
            for _ in range(len(self.mail)):
                self.deliver(0)
            for process in [one for one in self.workers.values() if one.runs]:
                for act in (self.begin, self.send, self.land):
                    act(process)
                self.report(process)
            self.check()
            self.tick(0.2 if turn < 400 else 5.0)
            if self.coordinator.ended is not None:
                return
            if self._is_whole():
                step = min(one.machine.following for one in self.live())
                goal = step + 4 if goal is None else goal
                if step >= goal:
                    return
        raise AssertionError(f"no progress: {self.story()}")

    def live(self):
        return [one for one in self.workers.values() if one.runs]

    def _is_whole(self):
        """All live workers are full members of the current view."""
        view = self.coordinator.view
        return (
            view is not None
            and bool(self.live())
            and all(one.machine.view == view and one.machine.member in view.full for one in self.live())
        )

    def story(self):
        return [
            (
                str(one.machine.member),
                one.alive,
                one.machine.view and one.machine.view.number,
                one.machine.fenced,
                one.machine.following,
                one.machine.holds,
                one.machine.phase,
            )
            for one in self.workers.values()
        ] + [self.coordinator.view, self.coordinator.is_fencing]


def exactly_once(history):
    """Every sample of a pass is in one step, and a pass begins when the one before is complete."""
    drawn = set()
    for _, _, parts in history:
        positions = [at for start, stop in parts for at in range(start, stop)]
        assert count(parts) == len(set(positions)), "a sample is twice in a step"
        assert not drawn & set(positions), "a sample is in two steps of a pass"
        drawn |= set(positions)
        if len(drawn) == SAMPLES:
            drawn = set()


def runs_of(world) -> Iterator[Process]:
    """The workers that can do something."""
    return (one for one in world.workers.values() if one.runs)
