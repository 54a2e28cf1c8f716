"""Which pairs of machines can connect, at which addresses, and where do the workers meet?

All machines try all addresses of all others at once, so the check takes as long as one attempt. What
follows from the attempts is decided by pure functions.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from echelon.errors import LaunchError
from echelon.start.agents.driver import ConnectedAgent
from echelon.start.agents.protocol import (
    Alive,
    Listen,
    Listening,
    Message,
    Reached,
    ReachOutcome,
    ReachTarget,
    Refusal,
    TryReach,
)

REACH_S = 3.0
_SPARE_S = 0.25
ANSWER_S = 5.0
_POLL_S = 0.01
AT_ONCE = 16
"""So many machines are tried at a time."""

_CAUSES = {
    "refused": "the connection is refused: nothing listens there, or a firewall rejects it",
    "reset": "the connection is cut at once: a firewall or a proxy is between them",
    "timeout": "no answer within {seconds:g} s: a firewall drops it, or there is no way back",
    "no-route": "no route leads there, or a firewall says so",
    "forbidden": "the firewall of the machine that connects, or a route of type prohibit there, forbids it",
    "blackhole": "the machine that connects has a route of type blackhole for it",
    "another": "another machine or program answers there",
    "not-awaited": "no answer yet",
}
FIX = (
    "allow TCP connections between the machines, in both directions, at the port where workers meet "
    "(--port, or 20000 to 29999) and at those that the system chooses (sysctl net.ipv4.ip_local_port_range)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One machine tried one address of another."""

    source: str
    target: str
    address: str
    port: int
    outcome: ReachOutcome

    @property
    def works(self) -> bool:
        """Whether it got there."""
        return not self.outcome.problem


def cause(problem: str, seconds: float) -> str:
    """Why an attempt failed, in words."""
    return _CAUSES.get(problem, problem).format(seconds=seconds)


# Asking ------------------------------------------------------------------------------------------


def answers(
    agents: Sequence[ConnectedAgent],
    kind: type,
    timeout_s: float,
    doing: str,
    came_at: dict[str, float] | None = None,
) -> dict[str, Message | LaunchError]:
    """A message of this kind from each agent, or why there is none. One that fails hides no other.

    `came_at` is filled with the (monotonic) times at which the messages came.
    """
    found: dict[str, Message | LaunchError] = {}
    until = time.monotonic() + timeout_s
    while len(found) < len(agents) and time.monotonic() < until:
        for agent in agents:
            if isinstance(found.get(agent.node), LaunchError):
                continue
            said = _heard(agent, kind)  # also of those that have answered: they would miss the launcher
            if said is not None and agent.node not in found:
                found[agent.node] = said
                if came_at is not None:
                    came_at[agent.node] = time.monotonic()
        time.sleep(_POLL_S)
    for agent in agents:
        if agent.node not in found:
            found[agent.node] = LaunchError(
                f"{agent.node} did not answer within {timeout_s:g} s while {doing}",
                where=agent.node,
                fix="check that the machine is up and not overloaded",
            )
    return {agent.node: found[agent.node] for agent in agents}


def _heard(agent: ConnectedAgent, kind: type) -> Message | LaunchError | None:
    try:
        for message in agent.receive():
            if isinstance(message, Refusal):
                return LaunchError(message.message, where=message.where or agent.node, fix=message.fix)
            if isinstance(message, kind):
                return message
            if not isinstance(message, Alive):
                agent.waiting.append(message)
    except LaunchError as error:
        return error
    return None


def open_ports(
    agents: Sequence[ConnectedAgent], port: int = 0
) -> tuple[dict[str, list[Listening]], list[LaunchError]]:
    """Each machine opens any port for the others to try, and the first one a second one, for the meeting.

    That is `port`, if it is not 0. Also returned: what could not be opened, and who did not answer.
    """
    opened: dict[str, list[Listening]] = {}
    problems: list[LaunchError] = []
    for asked, listen in ((agents, Listen()), (agents[:1], Listen(port, steady=not port))):
        for agent in asked:
            agent.send(listen)
        for node, said in answers(asked, Listening, ANSWER_S, "opening a port").items():
            if isinstance(said, LaunchError):
                problems.append(said)
            elif isinstance(said, Listening) and said.problem:
                problems.append(_not_opened(node, said))
            elif isinstance(said, Listening):
                opened.setdefault(node, []).append(said)
    return opened, problems


def _not_opened(node: str, said: Listening) -> LaunchError:
    return LaunchError(
        f"port {said.port} of {node} cannot be opened: {said.problem}",
        where=f"{node}, port {said.port}",
        fix="end the program that uses it, or give another --port, or none",
    )


def try_pairs(
    agents: Sequence[ConnectedAgent],
    opened: Mapping[str, Sequence[Listening]],
    *,
    timeout_s: float = REACH_S,
    spare_s: float = _SPARE_S,
) -> tuple[list[Attempt], dict[str, LaunchError]]:
    """All machines try all addresses of all others whose port is open; and which ones did not answer."""
    attempts: list[Attempt] = []
    silent: dict[str, LaunchError] = {}
    listening = [agent for agent in agents if agent.node in opened]
    for begin in range(0, len(listening), AT_ONCE):
        wanted = {
            agent.node: _targets(agent, listening[begin : begin + AT_ONCE], opened) for agent in agents
        }
        asked = [agent for agent in agents if wanted[agent.node] and agent.node not in silent]
        for agent in asked:
            agent.send(TryReach(wanted[agent.node], timeout_s, spare_s))
        found = answers(asked, Reached, timeout_s + ANSWER_S, "trying to reach the others")
        for node, said in found.items():
            if isinstance(said, LaunchError):
                silent[node] = said
            elif isinstance(said, Reached):
                attempts += _attempts(node, wanted[node], said)
    return attempts, silent


def _targets(
    agent: ConnectedAgent, others: Sequence[ConnectedAgent], opened: Mapping[str, Sequence[Listening]]
) -> list[ReachTarget]:
    return [
        ReachTarget(other.node, address, listening.port, listening.token)
        for other in others
        if other.node != agent.node
        for address in offered_to(agent, other)
        for listening in opened[other.node]
    ]


def offered_to(agent: ConnectedAgent, other: ConnectedAgent) -> list[str]:
    """The addresses of the other machine, without those that the agent's machine has, too.

    Containers may have other host names and yet the same interfaces: then their addresses are the same.
    """
    a, b = agent.introduction, other.introduction
    if a is None or b is None:
        return []
    alike = same_machine(agent, other) or (a.network == b.network != "")
    return [address for address in b.addresses if alike or address not in a.addresses]


def _attempts(node: str, targets: Sequence[ReachTarget], said: Reached) -> Iterator[Attempt]:
    for target, outcome in zip(targets, said.outcomes, strict=True):
        yield Attempt(
            source=node, target=target.node, address=target.address, port=target.port, outcome=outcome
        )


# Deciding ----------------------------------------------------------------------------------------


def same_machine(one: ConnectedAgent, other: ConnectedAgent) -> bool:
    """Whether two agents are on one machine."""
    a, b = one.introduction, other.introduction
    return a is not None and b is not None and a.machine == b.machine


def reached(source: str, target: str, attempts: Sequence[Attempt]) -> list[str]:
    """The addresses of `target` at which `source` reaches all ports that it tried."""
    outcomes: dict[str, bool] = {}
    for one in attempts:
        if (one.source, one.target) == (source, target):
            outcomes[one.address] = outcomes.get(one.address, True) and one.works
    return [address for address, works in outcomes.items() if works]


def meeting_addresses(
    lead: str, others: Sequence[str], candidates: Sequence[str], attempts: Sequence[Attempt]
) -> dict[str, str]:
    """By which address each other machine reaches the first one: one for all of them, if there is one.

    A machine that reaches none is left out.
    """
    by = {other: reached(other, lead, attempts) for other in others}
    shared = [address for address in candidates if all(address in by[other] for other in others)]
    if shared:
        return dict.fromkeys(others, shared[0])
    return {other: found[0] for other, found in by.items() if found}


def listens_at(node: str, lead: str, meets_at: str, attempts: Sequence[Attempt]) -> str:
    """Where workers of a machine listen first: the address from which they reach the first machine."""
    for one in attempts:
        if (one.source, one.target, one.address) == (node, lead, meets_at) and one.works:
            return one.outcome.source
    return ""


def why_not(source: str, target: str, attempts: Sequence[Attempt], seconds: float) -> str:
    """What happened at each address that was tried, in words."""
    ports: dict[tuple[str, str], list[int]] = {}
    for one in attempts:
        if (one.source, one.target) == (source, target) and not one.works:
            ports.setdefault((one.address, one.outcome.problem), []).append(one.port)
    parts = [
        f"{address} port {', '.join(map(str, sorted(found)))}: {cause(problem, seconds)}"
        for (address, problem), found in ports.items()
    ]
    return "; ".join(parts) or "it has no address that others could reach"


def ports_of(target: str, attempts: Sequence[Attempt]) -> str:
    """The ports of a machine that were tried."""
    return ", ".join(str(port) for port in sorted({one.port for one in attempts if one.target == target}))


# For a run ---------------------------------------------------------------------------------------


def meet(agents: Sequence[ConnectedAgent], *, port: int | None = None, both_ways: bool = False) -> None:
    """Decide where workers find the leader: `meets_at` of each agent. Raises if a pair cannot connect.

    A worker connects to those of lower rank, so a machine has to reach those before it; with `both_ways`,
    as servers need it, also those after it. The error names the pair, the port and the cause.
    """
    asked = one_each(agents)
    if not asked:
        return
    lead, others = asked[0], asked[1:]
    opened, problems = open_ports(asked, port or 0)
    for error in problems:
        raise error
    meeting_port = opened[lead.node][-1].port
    found = dict.fromkeys([agent.node for agent in asked], "127.0.0.1")
    if not all(same_machine(lead, other) for other in others):
        found = _tried(asked, opened, both_ways)
        found[lead.node] = next(iter(found.values()))
    for agent in agents:
        agent.meets_at = found[agent.node], meeting_port


def one_each(agents: Sequence[ConnectedAgent]) -> list[ConnectedAgent]:
    """The first agent of each node: an engine may have started several on one machine."""
    first: dict[str, ConnectedAgent] = {}
    for agent in agents:
        first.setdefault(agent.node, agent)
    return list(first.values())


def _tried(
    agents: Sequence[ConnectedAgent], opened: Mapping[str, Sequence[Listening]], both_ways: bool
) -> dict[str, str]:
    """By which address each machine after the first reaches the first one."""
    lead, others = agents[0], [agent.node for agent in agents[1:]]
    needed = list(_needed([agent.node for agent in agents], both_ways))
    candidates = lead.introduction.addresses if lead.introduction is not None else []
    for spare_s in (_SPARE_S, REACH_S):
        attempts, silent = try_pairs(agents, opened, spare_s=spare_s)
        for error in silent.values():
            raise error
        found = meeting_addresses(lead.node, others, candidates, attempts)
        apart = [pair for pair in needed if not reached(*pair, attempts)]
        if not apart and len(set(found.values())) == 1:
            return found
        if all(one.outcome.problem != "not-awaited" for one in attempts):
            break
        # A better address may be among those that were not awaited: once more, with more time.
    if apart:
        raise _cannot_connect(*apart[0], attempts)
    return found


def _needed(nodes: Sequence[str], both_ways: bool) -> Iterator[tuple[str, str]]:
    for at, source in enumerate(nodes):
        for target in nodes[:at]:
            yield source, target
            if both_ways:
                yield target, source


def _cannot_connect(source: str, target: str, attempts: Sequence[Attempt]) -> LaunchError:
    return LaunchError(
        f"{source} cannot connect to {target} ({why_not(source, target, attempts, REACH_S)})",
        where=f"{source} to {target}, port {ports_of(target, attempts) or '-'}",
        fix=f"{FIX}; `echelon doctor --hosts` checks all pairs",
    )
