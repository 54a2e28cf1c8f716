"""Which pairs of machines can connect, at which addresses, and where do the workers meet?

All machines try all addresses of all others at once, so the check takes as long as one attempt. What
follows from the attempts is decided by pure functions.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from echelon.errors import LaunchError
from echelon.launch.agents.driver import ConnectedAgent
from echelon.launch.agents.protocol import (
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
_ANSWER_S = 5.0
_POLL_S = 0.01
AT_ONCE = 16
"""So many machines are tried at a time."""

_CAUSES = {
    "refused": "the connection is refused: nothing listens there, or a firewall rejects it",
    "reset": "the connection is cut at once: a firewall or a proxy is between them",
    "timeout": "no answer within {seconds:g} s: a firewall drops it, or there is no way back",
    "no-route": "no route leads there, or a firewall says so",
    "forbidden": "this machine's own firewall, or a route of type prohibit, forbids it",
    "blackhole": "a route of type blackhole swallows it",
    "another": "another machine or program answers there",
    "not-awaited": "no answer yet",
}
FIX = (
    "allow TCP connections between the machines, in both directions, at the port where workers meet "
    "(--port) and at those that the system chooses (sysctl net.ipv4.ip_local_port_range)"
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """Where workers meet: a port of the first machine, and the address to reach it by, for each machine."""

    port: int
    addresses: Mapping[str, str]


def cause(problem: str, seconds: float) -> str:
    """Why an attempt failed, in words."""
    return _CAUSES.get(problem, problem).format(seconds=seconds)


# Asking ------------------------------------------------------------------------------------------


def answers(
    agents: Sequence[ConnectedAgent], kind: type, timeout_s: float, doing: str
) -> dict[str, Message | LaunchError]:
    """A message of this kind from each agent, or why there is none. One that fails hides no other."""
    found: dict[str, Message | LaunchError] = {}
    until = time.monotonic() + timeout_s
    while len(found) < len(agents) and time.monotonic() < until:
        for agent in agents:
            if agent.node in found:
                continue
            try:
                for message in agent.receive():
                    if isinstance(message, Refusal):
                        found[agent.node] = LaunchError(message.message, where=agent.node, fix=message.fix)
                    elif isinstance(message, kind):
                        found[agent.node] = message
                    elif not isinstance(message, Alive):
                        agent.waiting.append(message)
            except LaunchError as error:
                found[agent.node] = error
        time.sleep(_POLL_S)
    for agent in agents:
        if agent.node not in found:
            found[agent.node] = LaunchError(
                f"{agent.node} did not answer within {timeout_s:g} s while {doing}",
                where=agent.node,
                fix="check that the machine is up and not overloaded",
            )
    return {agent.node: found[agent.node] for agent in agents}


def open_ports(agents: Sequence[ConnectedAgent], port: int = 0) -> dict[str, Listening | LaunchError]:
    """Each machine opens a port for the others to try: the first one this port, if it is not 0."""
    for at, agent in enumerate(agents):
        agent.send(Listen(port if at == 0 else 0))
    found = answers(agents, Listening, _ANSWER_S, "opening a port")
    opened: dict[str, Listening | LaunchError] = {}
    for node, said in found.items():
        if isinstance(said, Listening) and said.problem:
            opened[node] = LaunchError(
                f"port {said.port} of {node} cannot be opened: {said.problem}",
                where=f"{node}, port {said.port}",
                fix="end the program that uses it, or give another --port, or none",
            )
        elif isinstance(said, Listening | LaunchError):
            opened[node] = said
    return opened


def try_pairs(
    agents: Sequence[ConnectedAgent],
    opened: Mapping[str, Listening],
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
        found = answers(asked, Reached, timeout_s + _ANSWER_S, "trying to reach the others")
        for node, said in found.items():
            if isinstance(said, LaunchError):
                silent[node] = said
            elif isinstance(said, Reached):
                attempts += _attempts(node, wanted[node], said)
    return attempts, silent


def _targets(
    agent: ConnectedAgent, others: Sequence[ConnectedAgent], opened: Mapping[str, Listening]
) -> list[ReachTarget]:
    return [
        ReachTarget(other.node, address, opened[other.node].port, opened[other.node].token)
        for other in others
        if other.node != agent.node and other.introduction is not None
        for address in other.introduction.addresses
    ]


def _attempts(node: str, targets: Sequence[ReachTarget], said: Reached) -> Iterator[Attempt]:
    for target, outcome in zip(targets, said.outcomes, strict=True):
        yield Attempt(
            source=node, target=target.node, address=target.address, port=target.port, outcome=outcome
        )


# Deciding ----------------------------------------------------------------------------------------


def same_machine(one: ConnectedAgent, other: ConnectedAgent) -> bool:
    """Whether two agents are on one machine."""
    a, b = one.introduction, other.introduction
    return a is not None and b is not None and (a.host, a.addresses) == (b.host, b.addresses)


def meeting_addresses(
    lead: str, others: Sequence[str], candidates: Sequence[str], attempts: Sequence[Attempt]
) -> dict[str, str]:
    """By which address each other machine reaches the first one: one for all of them, if there is one.

    A machine that reaches none is left out.
    """
    reached: dict[str, list[str]] = {other: [] for other in others}
    for one in attempts:
        if one.target == lead and one.works and one.source in reached:
            reached[one.source].append(one.address)
    shared = [address for address in candidates if all(address in reached[other] for other in others)]
    if shared:
        return dict.fromkeys(others, shared[0])
    return {other: found[0] for other, found in reached.items() if found}


def used_address(source: str, target: str, attempts: Sequence[Attempt], preferred: str = "") -> str:
    """The address that workers on `source` use for those on `target`; "" if none works."""
    found = [one.address for one in attempts if (one.source, one.target) == (source, target) and one.works]
    return preferred if preferred in found else next(iter(found), "")


def listening_address(node: str, lead: str, meets_at: str, attempts: Sequence[Attempt]) -> str:
    """Where workers of a machine listen first: the address from which they reach the first machine."""
    for one in attempts:
        if (one.source, one.target, one.address) == (node, lead, meets_at) and one.works:
            return one.outcome.source.removeprefix("::ffff:")
    return ""


def why_not(source: str, target: str, attempts: Sequence[Attempt], seconds: float) -> str:
    """What happened at each address that was tried, in words."""
    tried = [one for one in attempts if (one.source, one.target) == (source, target)]
    parts = [f"{one.address} port {one.port}: {cause(one.outcome.problem, seconds)}" for one in tried]
    return "; ".join(parts) or "it has no address that others could reach"


# For a run ---------------------------------------------------------------------------------------


def meeting_place(
    agents: Sequence[ConnectedAgent], *, port: int | None = None, both_ways: bool = False
) -> Meeting:
    """Where the workers of these machines meet; raises LaunchError, which names a pair that cannot connect.

    A worker connects to those of lower rank, so a machine has to reach those before it; with `both_ways`,
    as servers need it, also those after it.
    """
    lead, others = agents[0], agents[1:]
    opened: dict[str, Listening] = {}
    for node, said in open_ports(agents, port or 0).items():
        if isinstance(said, LaunchError):
            raise said
        opened[node] = said
    place = opened[lead.node].port
    if all(same_machine(lead, other) for other in others):
        return Meeting(port=place, addresses=dict.fromkeys([agent.node for agent in agents], "127.0.0.1"))
    spare_s = _SPARE_S
    while True:
        attempts, silent = try_pairs(agents, opened, spare_s=spare_s)
        for error in silent.values():
            raise error
        found = _decided(agents, attempts)
        # Without an address for all, it may be one that was not awaited.
        if len(set(found.values())) == 1 or spare_s == REACH_S:
            break
        spare_s = REACH_S
    for source, target in _needed([agent.node for agent in agents], both_ways):
        if not used_address(source, target, attempts):
            raise _cannot_connect(source, target, attempts)
    return Meeting(port=place, addresses={lead.node: next(iter(found.values())), **found})


def _decided(agents: Sequence[ConnectedAgent], attempts: Sequence[Attempt]) -> dict[str, str]:
    lead, others = agents[0], agents[1:]
    candidates = lead.introduction.addresses if lead.introduction is not None else []
    return meeting_addresses(lead.node, [other.node for other in others], candidates, attempts)


def _needed(nodes: Sequence[str], both_ways: bool) -> Iterator[tuple[str, str]]:
    for at, source in enumerate(nodes):
        for target in nodes[:at]:
            yield source, target
            if both_ways:
                yield target, source


def _cannot_connect(source: str, target: str, attempts: Sequence[Attempt]) -> LaunchError:
    ports = {one.port for one in attempts if one.target == target}
    return LaunchError(
        f"{source} cannot connect to {target} ({why_not(source, target, attempts, REACH_S)})",
        where=f"{source} to {target}, port {', '.join(map(str, sorted(ports))) or '-'}",
        fix=f"{FIX}; `echelon doctor --hosts` checks all pairs",
    )
