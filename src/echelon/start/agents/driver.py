"""The launcher's side of agents: wait for them, check them, watch their workers.

`AgentProcesses` offers what `WorkerProcesses` does, for workers on other machines. What they write arrives
in the launcher's own run folder, so that everything else reads the same files as for workers here.
"""

from __future__ import annotations

import contextlib
import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import metadata
from types import TracebackType
from typing import Protocol

from echelon.config.exit_codes import SAVED_AND_STOPPED
from echelon.errors import Corrupt, LaunchError, PeerLost, WorkerError
from echelon.observe.growth import Grown, write_grown
from echelon.observe.run_folder import RunFolder
from echelon.start.agents.agent import ALIVE_S, SILENCE_S
from echelon.start.agents.channel import Channel
from echelon.start.agents.protocol import (
    Alive,
    Begin,
    Finish,
    Interrupt,
    Introduction,
    Message,
    Refusal,
    WorkerEnded,
)
from echelon.start.failure import Failure, decide, evidence

_POLL_S = 0.02
_SETTLE_S = 1.0
_LAST_FILES_S = 5.0


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
    `meets_at` is where its workers find the leader: address and port.
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

    def receive(self) -> list[Message]:
        """The messages that have arrived; an error names the machine and what its agent said last."""
        try:
            found = self.channel.poll()
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


class AgentProcesses:
    """The workers that agents have started: watch them, end them; none is left behind."""

    def __init__(
        self,
        folder: RunFolder,
        agents: Sequence[ConnectedAgent],
        starts: Sequence[Begin],
        *,
        saves: bool = False,
    ) -> None:
        """`saves`: a worker may save and stop, which is no failure."""
        self._folder = folder
        self._fine = (0, SAVED_AND_STOPPED) if saves else (0,)
        self._agents = list(agents)
        self._nodes = {worker.rank: worker.node for begin in starts for worker in begin.workers}
        self._of_agent = {
            id(agent): [worker.rank for worker in begin.workers]
            for agent, begin in zip(agents, starts, strict=True)
        }
        self._codes: dict[int, int] = {}
        self._lost: dict[int, Failure] = {}
        for agent, begin in zip(agents, starts, strict=True):
            agent.send(begin)
            for message in agent.waiting:
                self._take(agent, message)

    @property
    def size(self) -> int:
        """How many workers there are."""
        return len(self._nodes)

    def node_of(self, rank: int) -> str:
        """The node that a worker runs on."""
        return self._nodes[rank]

    def pids_on(self, node: str) -> list[int]:
        """None that this machine could signal."""
        return []

    def pid_of(self, rank: int) -> int | None:
        """None that this machine could signal."""
        return None

    def exit_codes(self) -> dict[int, int]:
        """The exit codes of the workers that have ended; negative is a signal."""
        self._listen()
        return dict(self._codes)

    def all_done(self) -> bool:
        """Whether every worker has ended."""
        return len(self.exit_codes()) == self.size

    def failure(self) -> Failure | None:
        """The failure that caused the others, once any worker has failed."""
        if not self._failures():
            return None
        until = time.monotonic() + _SETTLE_S
        while not self.all_done() and time.monotonic() < until:
            time.sleep(_POLL_S)
        return decide(self._failures(), self._codes)

    def interrupt(self) -> None:
        """Send every worker the signal of Ctrl-C."""
        for agent in self._agents:
            agent.send(Interrupt())

    def terminate(self) -> None:
        """Ask every worker to save and stop."""
        for agent in self._agents:
            agent.send(Interrupt(saves=True))

    def end(self) -> None:
        """End every worker and every agent, and take what they wrote last."""
        for agent in self._agents:
            agent.send(Finish())
        until = time.monotonic() + _LAST_FILES_S
        while self._agents and time.monotonic() < until:
            self._listen(ending=True)
            time.sleep(_POLL_S)
        for agent in self._agents:
            agent.handle.end()
            agent.channel.close()
        self._agents = []

    def _listen(self, *, ending: bool = False) -> None:
        for agent in list(self._agents):
            try:
                for message in agent.receive():
                    self._take(agent, message)
            except LaunchError as error:
                self._lose(agent, error, ending)

    def _take(self, agent: ConnectedAgent, message: Message) -> None:
        match message:
            case Grown():
                self._write(agent, message)
            case WorkerEnded():
                self._codes[message.rank] = message.code
            case Refusal():
                error = LaunchError(message.message, where=message.where or agent.node, fix=message.fix)
                self._lose(agent, error, False)
            case _:
                return

    def _write(self, agent: ConnectedAgent, part: Grown) -> None:
        try:
            write_grown(self._folder.path, part, self._of_agent[id(agent)])
        except Corrupt as error:
            raise LaunchError(
                f"{agent.node} sent a file that is not its own: {part.path!r}", where=agent.node
            ) from error

    def _lose(self, agent: ConnectedAgent, error: LaunchError, ending: bool) -> None:
        """An agent is gone, and with it its workers."""
        self._agents.remove(agent)
        agent.handle.end()
        agent.channel.close()
        for rank in self._of_agent[id(agent)]:
            if rank not in self._codes and not ending:
                self._codes[rank] = 1
                text = f"LaunchError: {error}\n"
                self._lost[rank] = Failure(
                    rank=rank, t=time.time(), kind="LaunchError", message=error.message, text=text
                )

    def _failures(self) -> list[Failure]:
        found = {one.rank: one for one in evidence(self._folder, self.exit_codes(), self._fine)}
        return list((found | self._lost).values())

    def __enter__(self) -> AgentProcesses:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()
