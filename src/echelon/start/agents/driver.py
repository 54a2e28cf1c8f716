"""The launcher's side of agents: wait for them, talk to them, check what they are."""

from __future__ import annotations

import contextlib
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from typing import Protocol

from echelon.errors import Corrupt, LaunchError, PeerLost, WorkerError
from echelon.start.agents.agent import ALIVE_S, SILENCE_S
from echelon.start.agents.channel import Channel
from echelon.start.agents.protocol import Alive, Introduction, Message, Refusal

_POLL_S = 0.02


class AgentHandle(Protocol):
    """What started an agent, and can tell why it is gone and end it."""

    def why(self) -> str:
        """What it said on its error output, or its exit code."""

    def end(self) -> None:
        """End it; safe to call twice."""


@dataclass(slots=True)
class ConnectedAgent:
    """An agent and the machine that it is on.

    `node` is how the user calls the machine; `slots` is how many workers it gets. `private`: what is sent
    to it cannot be read on the way; then `env` is what its workers need that nobody else may read.
    `meets_at` is where its workers find the leader: address and port. `reader` gives the messages that
    have arrived, if another thread reads the channel. `shared` is what workers of all machines need,
    however it reaches them. `gone`: nobody talks to it any more.
    """

    node: str
    channel: Channel
    handle: AgentHandle
    slots: int = 1
    private: bool = False
    introduction: Introduction | None = None
    waiting: list[Message] = field(default_factory=list)
    meets_at: tuple[str, int] = ("", 0)
    told_at: float = 0.0
    env: dict[str, str] = field(default_factory=dict, repr=False)
    reader: Callable[[], list[Message]] | None = None
    shared: dict[str, str] = field(default_factory=dict, repr=False)
    gone: bool = False

    def receive(self) -> list[Message]:
        """The messages that have arrived; an error names the machine and what its agent said last."""
        try:
            found = self.channel.poll() if self.reader is None else self.reader()
            now = time.monotonic()
            if now - self.told_at > ALIVE_S:
                self.told_at = now
                self.channel.send(Alive())
            if now - self.channel.heard_at > SILENCE_S:
                raise PeerLost(f"{self.node} has not answered for {SILENCE_S:g} s", where=self.node)
        except (PeerLost, Corrupt) as error:
            raise LaunchError(
                f"the agent on {self.node} is gone: {self.handle.why() or error.message}",
                where=self.node,
                fix="see what the command to reach it prints; `echelon doctor --hosts` checks every step",
            ) from error
        return found

    def send(self, message: Message) -> None:
        """Send; that the agent is gone is noticed when it is next listened to."""
        with contextlib.suppress(WorkerError):
            self.channel.send(message)


def expect(agents: Sequence[ConnectedAgent], kind: type, timeout_s: float, doing: str) -> list[Message]:
    """Wait for one message of this kind from each agent, in their order."""
    found: dict[int, Message] = {}
    until = time.monotonic() + timeout_s
    while len(found) < len(agents):
        for at, agent in enumerate(agents):
            for message in agent.receive():
                if isinstance(message, Refusal):
                    raise LaunchError(message.message, where=message.where or agent.node, fix=message.fix)
                if isinstance(message, kind):
                    found[at] = message
                elif not isinstance(message, Alive):
                    agent.waiting.append(message)
        missing = [agent.node for at, agent in enumerate(agents) if at not in found]
        if missing and time.monotonic() > until:
            raise LaunchError(
                f"{', '.join(missing)} did not answer within {timeout_s:g} s while {doing}",
                where=", ".join(missing),
                fix="check that the machine is up and not overloaded; `echelon doctor --hosts`",
            )
        time.sleep(_POLL_S)
    return [found[at] for at in range(len(agents))]


def introduce(agents: Sequence[ConnectedAgent], timeout_s: float) -> None:
    """Wait until all agents have said who they are, and refuse versions that do not fit this machine's."""
    new = [agent for agent in agents if agent.introduction is None]
    for agent, said in zip(new, expect(new, Introduction, timeout_s, "starting"), strict=True):
        assert isinstance(said, Introduction)
        agent.introduction = said
    for agent in agents:
        assert agent.introduction is not None
        check_versions(agent.node, agent.introduction)


def check_versions(node: str, said: Introduction) -> None:
    """Refuse a machine with another Echelon, torch or minor version of Python."""
    for name, (there, here) in versions(said).items():
        if there != here:
            raise LaunchError(
                f"{node} has {name} {there}, this machine has {here}",
                where=node,
                fix=f"install {name} {here} there, or run from an environment with the same version",
            )


def versions(said: Introduction) -> dict[str, tuple[str, str]]:
    """The versions that have to be equal: there, and here."""
    return {
        "Echelon": (said.echelon, metadata.version("echelon")),
        "torch": (said.torch, metadata.version("torch")),
        "Python": (_minor(said.python), _minor(platform.python_version())),
    }


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])
