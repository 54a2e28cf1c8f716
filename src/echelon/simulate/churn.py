"""What do losses cost? The members' state machines under the virtual clock, with up to 1,000 workers.

Coordinator and members are those of `membership/`; nothing is trained. A step takes `step_s`, of which the
last part is the exchange. A loss during the exchange overwrites gradients half, so the step is repeated;
before it the step is reduced again. One member's steps stand for those of all, until a fence.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass
from statistics import median
from typing import Any
from uuid import UUID

from echelon.config.call import parse_call
from echelon.config.registry import build_options
from echelon.errors import ConfigError, UnknownName
from echelon.membership.ledger import new_ledger
from echelon.membership.log import MemoryLog, ViewDecided
from echelon.membership.machine import MembershipCoordinator, MembershipRules
from echelon.membership.messages import (
    Exited,
    Fence,
    FromWorker,
    Instruction,
    Join,
    LeaveOut,
    NewView,
    Report,
    Respawn,
    Stop,
    ToWorker,
)
from echelon.membership.view import MemberId
from echelon.membership.worker import Act, MemberMachine
from echelon.simulate.clock import Clock

EXCHANGE = 0.2  # this part of a step is the exchange
_TICK_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class KillChurn:
    """`rate` workers per second are killed, of all workers together, at random."""

    rate: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StopChurn:
    """`rate` workers per second are stopped for `seconds`, then go on."""

    rate: float
    seconds: float = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class KillOutage:
    """At time `at` the fraction `part` of all workers is killed."""

    at: float
    part: float = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class CutOutage:
    """At time `at` the fraction `part` of all workers cannot be reached, for `seconds`."""

    at: float
    part: float = 0.5
    seconds: float = 5.0


Churn = KillChurn | StopChurn
Outage = KillOutage | CutOutage
_CHURN: dict[str, type[Any]] = {"kill": KillChurn, "stop": StopChurn}
_OUTAGE: dict[str, type[Any]] = {"kill": KillOutage, "cut": CutOutage}


def parse_churn(text: str) -> Churn:
    """What `--churn` says."""
    found: Churn = _parse(text, _CHURN, "--churn")
    return found


def parse_outage(text: str) -> Outage:
    """What `--outage` says."""
    found: Outage = _parse(text, _OUTAGE, "--outage")
    return found


def _parse(text: str, kinds: dict[str, type[Any]], where: str) -> Any:
    call = parse_call(text)
    if call.name not in kinds:
        raise UnknownName("fault", call.name, kinds, where=where)
    if call.args:
        raise ConfigError(
            f"{text}: options are given by name", where=where, fix=f"write {call.name}(name=value)"
        )
    found = build_options(kinds[call.name], call.options, where=where)
    for name, low, high in (
        ("rate", 0.0, 1e4),
        ("part", 0.0, 1.0),
        ("at", 0.0, 1e9),
        ("seconds", 0.0, 1e9),
    ):
        value = getattr(found, name, None)
        if value is not None and not low < value <= high:
            raise ConfigError(
                f"{name} is {value:g}", where=where, fix=f"give a number above {low:g}, up to {high:g}"
            )
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class ChurnSetting:
    """step_s a step without faults; start_s until a killed worker's new process joins; heal_s until it has
    the state; detect_s until the launcher has seen that a process ended.
    """

    workers: int
    seconds: float
    churn: tuple[Churn, ...] = ()
    outages: tuple[Outage, ...] = ()
    step_s: float = 0.02
    latency_s: float = 0.001
    start_s: float = 3.0
    heal_s: float = 0.5
    detect_s: float = 0.005
    min_workers: int = 0
    batch: int = 0
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ChurnFigures:
    """steps         committed; `ideal` is how many there were without faults
    availability  steps / ideal
    reduced       steps that were reduced again; `repeated` those that were computed again
    pauses        times between two steps beyond a step's own, where they are more than half a step
    ended         why the run was stopped; empty if it was not
    """

    steps: int
    ideal: int
    availability: float
    faults: int
    views: int
    reduced: int
    repeated: int
    median_pause_s: float
    worst_pause_s: float
    mean_members: float
    ended: str


class _ChurnRun:
    def __init__(self, setting: ChurnSetting) -> None:
        self._set = setting
        self._clock = Clock()
        self._rng = random.Random(setting.seed)
        self._log = MemoryLog()
        rules = MembershipRules(
            workers=setting.workers, min_workers=setting.min_workers, respawn=10_000, wait_s=60.0
        )
        batch = setting.batch or 8 * setting.workers
        ledger = new_ledger(1000 * batch, batch)
        self._coordinator = MembershipCoordinator(UUID(int=setting.seed), rules, self._log, ledger)
        self._machines: dict[MemberId, MemberMachine] = {}
        self._away: set[MemberId] = set()
        self._lead: MemberMachine | None = None
        self._began = 0.0
        self._token = 0
        self._last = 0.0
        self._waiting_first = True
        self._pauses: list[float] = []
        self.steps = 0
        self.faults = 0
        self._member_steps = 0

    def run(self) -> ChurnFigures:
        """Until the time is over."""
        setting, clock = self._set, self._clock
        self._tick()
        for slot in range(setting.workers):
            self._spawn(MemberId("node", slot))
        for one in setting.churn:
            self._plan_next(one)
        for outage in setting.outages:
            clock.at(outage.at, lambda outage=outage: self._strike(outage))  # type: ignore[misc]
        clock.run(setting.seconds)
        records = [entry.record for entry in self._log.read() if isinstance(entry, ViewDecided)]
        hows = Counter(record.how for record in records)
        if setting.seconds - self._last > 2 * setting.step_s:
            self._pauses.append(setting.seconds - self._last)
        ideal = max(1, int(setting.seconds / setting.step_s))
        return ChurnFigures(
            steps=self.steps,
            ideal=ideal,
            availability=min(1.0, self.steps / ideal),
            faults=self.faults,
            views=len(records),
            reduced=hows["reduce"],
            repeated=hows["repeat"],
            median_pause_s=median(self._pauses) if self._pauses else 0.0,
            worst_pause_s=max(self._pauses, default=0.0),
            mean_members=self._member_steps / max(1, self.steps),
            ended=self._coordinator.ended or "",
        )

    # Faults

    def _plan_next(self, churn: Churn) -> None:
        def strike() -> None:
            there = self._reachable()
            if there:
                self._hit(self._rng.choice(there), churn)
            self._plan_next(churn)

        self._clock.after(self._rng.expovariate(churn.rate), strike)

    def _strike(self, outage: Outage) -> None:
        there = self._reachable()
        for member in self._rng.sample(there, min(len(there), round(outage.part * len(there)))):
            self._hit(member, outage)

    def _reachable(self) -> list[MemberId]:
        return [member for member in self._machines if member not in self._away]

    def _hit(self, member: MemberId, fault: Churn | Outage) -> None:
        self.faults += 1
        if isinstance(fault, KillChurn | KillOutage):
            self._freeze_members()
            del self._machines[member]
            told = Exited(member=member, signal=9)
            self._clock.after(self._set.detect_s, lambda: self._tell(told))
            return
        self._freeze_members()
        self._away.add(member)
        self._clock.after(fault.seconds, lambda: self._come_back(member))

    def _come_back(self, member: MemberId) -> None:
        self._away.discard(member)
        machine = self._machines.get(member)
        if machine is not None:
            self._report(machine, arrived=False)
            self._try_step()

    def _freeze_members(self) -> None:
        """The step under way cannot end: give every member what the leading one's steps stand for."""
        lead = self._lead
        if lead is None or lead.view is None:
            return
        elapsed = (self._clock.now - self._began) / self._set.step_s
        if not lead.fenced:
            lead.began()
            if elapsed > 1 - EXCHANGE:
                lead.spoiled()
        for machine in self._machines.values():
            if machine is not lead and machine.view is lead.view and not machine.fenced:
                machine.stand_with(lead)
        self._lead = None
        self._token += 1
        self._clock.after(self._set.step_s, self._report_arrivals)

    def _report_arrivals(self) -> None:
        """Workers that wait for one that is away say that they have arrived."""
        for machine in list(self._machines.values()):
            if machine.view is not None and not machine.fenced:
                self._report(machine, arrived=True)

    # Messages

    def _spawn(self, member: MemberId) -> None:
        self._machines[member] = MemberMachine(member)
        self._say(member, Join(member=member))

    def _report(self, machine: MemberMachine, *, arrived: bool) -> None:
        if machine.view is None:
            self._say(machine.member, Join(member=machine.member, well_s=self._set.step_s))
            return
        step, view = machine.following, machine.view.id
        self._say(machine.member, Report(member=machine.member, view=view, step=step, arrived=arrived))

    def _say(self, member: MemberId, message: FromWorker) -> None:
        if member not in self._away:
            self._clock.after(self._set.latency_s, lambda: self._tell(message))

    def _tell(self, message: FromWorker | Exited) -> None:
        self._carry_out(self._coordinator.handle(message, self._clock.now))

    def _tick(self) -> None:
        self._carry_out(self._coordinator.tick(self._clock.now))
        self._clock.after(_TICK_S, self._tick)

    def _carry_out(self, instructions: list[Instruction]) -> None:
        for one in instructions:
            if isinstance(one, Respawn):
                again = one.member
                self._clock.after(self._set.start_s, lambda again=again: self._spawn(again))  # type: ignore[misc]
            elif isinstance(one, tuple):
                to, message = one
                self._clock.after(
                    self._set.latency_s,
                    lambda to=to, message=message: self._receive(to, message),  # type: ignore[misc]
                )

    def _receive(self, to: MemberId, message: ToWorker) -> None:
        machine = self._machines.get(to)
        if machine is None or to in self._away or isinstance(message, Stop):
            return
        if isinstance(message, NewView):
            self._carry_act(machine, machine.install(message))
            for installed in machine.installed():
                self._say(to, installed)
            self._try_step()
        elif isinstance(message, Fence):
            if message.after is None:
                self._freeze_members()
            for answer in machine.fence(message):
                if isinstance(answer, Act):
                    self._carry_act(machine, answer)
                else:
                    self._say(to, answer)
        elif isinstance(message, LeaveOut) and machine.left_out(message.number):
            self._clock.after(_TICK_S, lambda: self._report(machine, arrived=False))

    def _carry_act(self, machine: MemberMachine, act: Act | None) -> None:
        if act is not None and act.do == "heal" and act.source is not None:
            base = act.source.base
            self._clock.after(self._set.heal_s, lambda: self._healed(machine, base))

    def _healed(self, machine: MemberMachine, base: int) -> None:
        if self._lead is not None and machine.view is self._lead.view and machine is not self._lead:
            machine.stand_with(self._lead)
        for healed in machine.received(base):
            self._say(machine.member, healed)
        if machine.fenced and machine.healing is not None:
            self._clock.after(_TICK_S, lambda: self._healed(machine, base))

    # Steps

    def _try_step(self) -> None:
        """If all members of the view are there, the next step begins."""
        view = self._coordinator.view
        if view is None or self._lead is not None:
            return
        there: list[MemberMachine] = []
        for member in view.members:
            machine = self._machines.get(member)
            if machine is None or machine.view is not view or machine.fenced or member in self._away:
                return
            there.append(machine)
        self._lead = next(machine for machine in there if machine.member in view.full)
        self._begin_step()

    def _begin_step(self) -> None:
        self._began = self._clock.now
        self._token += 1
        token = self._token
        self._clock.after(self._set.step_s, lambda: self._landed(token))

    def _landed(self, token: int) -> None:
        lead = self._lead
        if token != self._token or lead is None or lead.view is None:
            return
        view, now = lead.view, self._clock.now
        if not self._waiting_first and now - self._last > 1.5 * self._set.step_s:
            self._pauses.append(now - self._last - self._set.step_s)
        self._last, self._waiting_first = now, False
        self.steps += 1
        self._member_steps += len(view.full)
        answers = lead.landed()
        self._report(lead, arrived=False)
        if not answers:
            self._begin_step()
            return
        self._lead = None
        for answer in answers:
            self._say(lead.member, answer)
        for member in view.members:  # all stop after the same step
            machine = self._machines.get(member)
            if machine is not None and machine is not lead and machine.view is view:
                machine.stand_with(lead)
                if not machine.fenced:
                    for one in machine.stop_here():
                        self._say(member, one)


def simulate_churn(setting: ChurnSetting) -> ChurnFigures:
    """Run it; the same setting gives the same figures."""
    return _ChurnRun(setting).run()
