"""Will a run on these machines work? Asks each machine, step by step, before any worker is started.

connect    an agent on each machine, all at once
describe   versions, cores, memory, shared memory, clock
ports      each machine opens a port, the first one also that where workers meet
pairs      each machine tries to connect to each other one

A machine that fails a step is left out of the next ones; the others go on. Every step has a deadline.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain

from echelon.cluster.checkup.finding import Finding
from echelon.errors import EchelonError, LaunchError
from echelon.start import diagnosis
from echelon.start.agents.driver import ConnectedAgent
from echelon.start.agents.pairs import (
    ANSWER_S,
    AT_ONCE,
    Attempt,
    answers,
    one_each,
    open_ports,
    try_pairs,
)
from echelon.start.agents.protocol import Describe, Finish, Introduction, MachineDescription
from echelon.start.hosts import Host
from echelon.start.launcher import LAUNCHERS, Launcher, Wanted

_REACH_S = 5.0
_SPARE_S = 1.0
_END_S = 5.0
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class MachinesAsked:
    """What to check: machines, the way there, and the port where workers will meet, if it is fixed."""

    on: str
    hosts: Sequence[Host]
    port: int = 0
    timeout_s: float = 30.0

    @property
    def bound_s(self) -> float:
        """How long the check takes at most."""
        waves = max(1, -(-len(self.hosts) // AT_ONCE))
        return self.timeout_s + 3 * ANSWER_S + waves * (_REACH_S + ANSWER_S) + _END_S


@dataclass(slots=True)
class MachinesChecked:
    """What was found: by machine and step, the answers, and every attempt to connect."""

    findings: list[Finding] = field(default_factory=list)
    introductions: dict[str, Introduction] = field(default_factory=dict)
    descriptions: dict[str, MachineDescription] = field(default_factory=dict)
    attempts: list[Attempt] = field(default_factory=list)


def check_machines(asked: MachinesAsked, say: Say) -> MachinesChecked:
    """Carry out all steps; `say` is told what is awaited. Nothing is left running."""
    launcher = LAUNCHERS.build(asked.on, where="--on")
    checked = MachinesChecked()
    try:
        wanted = Wanted(workers=0, hosts=asked.hosts, timeout_s=asked.timeout_s, env={})
        agents = launcher.connect(wanted)
    except LaunchError as error:
        checked.findings.append(_refused(launcher.name, error))
        return checked
    try:
        _ask(agents, launcher, asked, checked, say)
    finally:
        for agent in agents:
            agent.send(Finish())
        for agent in agents:
            agent.handle.end()
            agent.channel.close()
    return checked


def _refused(topic: str, error: EchelonError) -> Finding:
    return Finding(level="problem", topic=topic, subject="start", text=error.message, fix=error.fix)


def _ask(
    agents: Sequence[ConnectedAgent],
    launcher: Launcher,
    asked: MachinesAsked,
    checked: MachinesChecked,
    say: Say,
) -> None:
    by_machine: dict[str, list[Finding]] = {agent.node: [] for agent in agents}
    if not agents:
        nothing = LaunchError(f"{launcher.name} has no machine", fix="name machines: --hosts a:2,b:4")
        checked.findings.append(_refused(launcher.name, nothing))
    say(f"waiting for {_named(agents)}, by {launcher.name}, for at most {asked.timeout_s:g} s")
    there = one_each(_introduced(agents, launcher, asked.timeout_s, checked, by_machine))
    if there:
        say(f"asking {_named(there)} for cores, memory and clock, for at most {ANSWER_S:g} s")
    there = _described(there, checked, by_machine)
    if len(there) > 1:
        say(f"trying all pairs of {_named(there)}, for at most {_REACH_S + 3 * ANSWER_S:g} s")
    opened, problems = open_ports(there, asked.port) if len(there) > 1 or asked.port else ({}, [])
    tried, silent = try_pairs(there, opened, timeout_s=_REACH_S, spare_s=_SPARE_S)
    checked.attempts += tried
    for node, error in silent.items():
        by_machine[node].append(diagnosis.silent(node, error.message))
    checked.findings += chain.from_iterable(by_machine.values())
    checked.findings += [_refused(diagnosis.CONNECTIONS, problem) for problem in problems]
    checked.findings += diagnosis.connections(there, tried, checked.descriptions, _REACH_S)


def _introduced(
    agents: Sequence[ConnectedAgent],
    launcher: Launcher,
    timeout_s: float,
    checked: MachinesChecked,
    findings: dict[str, list[Finding]],
) -> list[ConnectedAgent]:
    """The agents that answered and have the same versions."""
    python = str(getattr(launcher, "python", "") or sys.executable)
    new = [agent for agent in agents if agent.introduction is None]
    answered = answers(new, Introduction, timeout_s, "starting")
    there = []
    for agent in agents:
        found, node = findings[agent.node], agent.node
        said = agent.introduction or answered[node]
        if not isinstance(said, Introduction):
            late = isinstance(said, LaunchError) and "did not answer" in said.message
            printed = agent.handle.why() if late else _cause(said)
            found.append(
                diagnosis.not_in_time(node, launcher.name, printed, timeout_s)
                if late
                else diagnosis.unreached(node, launcher.name, python, printed)
            )
            continue
        agent.introduction = said
        if node not in checked.introductions:
            checked.introductions[node] = said
            found += diagnosis.introduced(node, launcher.name, said)
        if not any(finding.level == "problem" for finding in found):
            there.append(agent)
    return there


def _cause(said: object) -> str:
    """What the way to a machine printed: the end of the error's message."""
    return said.message.partition(" is gone: ")[2] or said.message if isinstance(said, LaunchError) else ""


def _described(
    agents: Sequence[ConnectedAgent], checked: MachinesChecked, findings: dict[str, list[Finding]]
) -> list[ConnectedAgent]:
    """The agents that have described their machines."""
    wall_s = time.time() - time.monotonic()
    asked_at: dict[str, float] = {}
    came_at: dict[str, float] = {}
    for agent in agents:
        asked_at[agent.node] = time.monotonic()
        agent.send(Describe())
    said = answers(agents, MachineDescription, ANSWER_S, "describing the machine", came_at)
    there = []
    for agent in agents:
        node, answer = agent.node, said[agent.node]
        if not isinstance(answer, MachineDescription):
            message = answer.message if isinstance(answer, LaunchError) else "it did not describe itself"
            findings[node].append(diagnosis.silent(node, message))
            continue
        checked.descriptions[node] = answer
        within_s = (came_at[node] - asked_at[node]) / 2
        off_s = answer.t - (wall_s + asked_at[node] + within_s)
        findings[node] += diagnosis.described(node, agent.slots, answer, off_s, within_s)
        there.append(agent)
    return there


def _named(agents: Sequence[ConnectedAgent]) -> str:
    return ", ".join(agent.node for agent in agents)
