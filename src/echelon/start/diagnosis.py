"""What do a machine's answers mean for a run there? Pure: answers in, findings out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from echelon.cluster.checkup.finding import Finding, Level
from echelon.cluster.checkup.hardware import resources
from echelon.config.units import show_bytes, show_seconds
from echelon.start.agents.driver import ConnectedAgent, versions
from echelon.start.agents.pairs import (
    FIX,
    Attempt,
    listens_at,
    meeting_addresses,
    offered_to,
    ports_of,
    reached,
    same_machine,
    why_not,
)
from echelon.start.agents.protocol import Introduction, MachineDescription

CONNECTIONS = "connections"
_WORKER_BYTES = 250_000_000
_CLOCK_S = 0.1
_MOST_NAMES = 3
_FIXES = {
    "Could not resolve hostname": "correct the name, or add it to ~/.ssh/config or /etc/hosts",
    "Permission denied": "give ssh a key that works without a password: ssh-copy-id {node}",
    "Host key verification failed": "log in once by hand, and accept the key: ssh {node} true",
    "Connection refused": "start the ssh server there, or name its port in ~/.ssh/config",
    "timed out": "check that the machine is up, and that its firewall allows ssh",
}


def unreached(node: str, way: str, python: str, said: str) -> Finding:
    """Why there is no agent on a machine; `said` is what the way there, such as ssh, printed."""
    last = said.strip().splitlines()[-1] if said.strip() else "it printed nothing"
    if "No module named" in said:
        return _problem(
            node,
            "Echelon",
            f"{python} has no Echelon there: {last}",
            f'install Echelon there, or name the Python that has it: --on "{way}(python=/path/to/python)"',
        )
    if any(python in line and "ssh:" not in line for line in said.splitlines()):
        return _problem(
            node,
            "Python",
            f"{python} does not run there: {last}",
            f'install the same environment there, or name its Python: --on "{way}(python=/path/to/python)"',
        )
    if "what is not a message" in said:
        return _problem(
            node,
            "shell",
            "the shell there prints something before the agent",
            "let its start files (.bashrc, .profile) print only if the shell is interactive",
        )
    fix = next((fix for text, fix in _FIXES.items() if text in said), "try it by hand: ssh {node} true")
    return _problem(node, way, said.strip() or "no connection", fix.format(node=node))


def not_in_time(node: str, way: str, said: str, timeout_s: float) -> Finding:
    """A machine that has not answered."""
    printed = f"; it printed: {said.strip()}" if said.strip() else ""
    return _problem(
        node,
        way,
        f"no answer within {timeout_s:g} s{printed}",
        "check that the machine is up and its name is right; a longer wait is --timeout-s",
    )


def silent(node: str, message: str) -> Finding:
    """A machine whose agent answered, and does not any more."""
    return _problem(node, "agent", message, "check that the machine is up and not overloaded")


def introduced(node: str, way: str, said: Introduction) -> Iterator[Finding]:
    """An agent is there; are its versions the same as here?"""
    yield _ok(node, way, f"connected; the machine calls itself {said.host}")
    differ = {name: pair for name, pair in versions(said).items() if pair[0] != pair[1]}
    for name, (there, here) in differ.items():
        yield _problem(
            node,
            name,
            f"{there}, this machine has {here}",
            f"install {name} {here} there, or run from an environment with the same version",
        )
    same = [f"{name} {there}" for name, (there, _) in versions(said).items() if name not in differ]
    if same:
        yield _ok(node, "versions", f"{', '.join(same)}, as here")


def described(
    node: str, slots: int, said: MachineDescription, off_s: float, within_s: float
) -> Iterator[Finding]:
    """Has the machine what its workers need? Its clock is `off_s` ahead, known to `within_s`."""
    yield _ok(node, "Python", said.executable)
    for finding in resources(said.machine):
        yield replace(finding, topic=node)
    cores, memory = said.machine.cores_usable, said.machine.memory_available_bytes
    count = f"{slots} worker{'s' if slots > 1 else ''}"
    if slots * _WORKER_BYTES > memory:
        yield _problem(
            node,
            "workers",
            f"{count} need at least {show_bytes(slots * _WORKER_BYTES)} of memory",
            f"give it fewer: {node}:{max(1, memory // _WORKER_BYTES)}",
        )
    elif slots > cores:
        text = f"{count} share {cores} core{'s' if cores > 1 else ''}"
        yield Finding(level="note", topic=node, subject="workers", text=text, fix=f"{node}:{cores}")
    yield _clock(node, off_s, within_s)


def _clock(node: str, off_s: float, within_s: float) -> Finding:
    if abs(off_s) <= max(_CLOCK_S, within_s):
        return _ok(
            node, "clock", f"agrees with this machine's to {show_seconds(max(abs(off_s), within_s))}"
        )
    way = "ahead of" if off_s > 0 else "behind"
    return Finding(
        level="note",
        topic=node,
        subject="clock",
        text=f"{show_seconds(abs(off_s))} {way} this machine's: times of its workers in reports are off",
        fix="run chrony or systemd-timesyncd on both",
    )


def connections(
    agents: Sequence[ConnectedAgent],
    attempts: Sequence[Attempt],
    described: Mapping[str, MachineDescription],
    seconds: float,
) -> Iterator[Finding]:
    """Which machines connect to which, at which address of which interface; and which do not, and why."""
    if not agents:
        return
    lead, others = agents[0], agents[1:]
    candidates = lead.introduction.addresses if lead.introduction is not None else []
    meets_at = meeting_addresses(lead.node, [other.node for other in others], candidates, attempts)
    tried = {(one.source, one.target) for one in attempts}
    for target in agents:
        names = {one.address: one.name for one in described[target.node].interfaces}
        works: dict[str, list[str]] = {}
        for source in agents:
            pair = source.node, target.node
            if source is target or (pair not in tried and offered_to(source, target)):
                continue  # it has no port open, or did not answer: told already
            found = reached(*pair, attempts)
            if not found:
                yield _apart(*pair, attempts, seconds)
                continue
            first = listens_at(target.node, lead.node, meets_at.get(target.node, ""), attempts)
            first = meets_at.get(source.node, "") if target is lead else first
            works.setdefault(first if first in found else found[0], []).append(source.node)
        if works:
            yield _ok(
                CONNECTIONS,
                f"to {target.node}",
                "; ".join(
                    f"{_listed(sources, len(agents) - 1)} to {address}{_named(names.get(address))}"
                    for address, sources in works.items()
                )
                + f"; port {ports_of(target.node, attempts)}",
            )
    for other in others:
        if same_machine(lead, other):
            text = f"{lead.node} and {other.node} are one machine"
            yield Finding(level="note", topic=CONNECTIONS, subject=other.node, text=text)


def _listed(names: Sequence[str], count: int) -> str:
    return f"all {count} others" if len(names) == count > _MOST_NAMES else ", ".join(names)


def _named(interface: str | None) -> str:
    return f" ({interface})" if interface else ""


def _apart(source: str, target: str, attempts: Sequence[Attempt], seconds: float) -> Finding:
    text = why_not(source, target, attempts, seconds)
    return _problem(CONNECTIONS, f"{source} to {target}", text, FIX)


def _ok(topic: str, subject: str, text: str) -> Finding:
    return _finding("ok", topic, subject, text)


def _problem(topic: str, subject: str, text: str, fix: str) -> Finding:
    return _finding("problem", topic, subject, text, fix)


def _finding(level: Level, topic: str, subject: str, text: str, fix: str = "") -> Finding:
    return Finding(level=level, topic=topic, subject=subject, text=text, fix=fix)
