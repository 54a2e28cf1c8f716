"""The workers that agents have started: watch them, start them again, end them. None is left behind.

`AgentProcesses` offers what `WorkerProcesses` does, for workers on other machines. What they write arrives
in the launcher's own run folder, so that everything else reads the same files as for workers here.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Collection, Sequence
from types import TracebackType

from echelon.config.exit_codes import SAVED_AND_STOPPED
from echelon.errors import Corrupt, LaunchError
from echelon.observe.growth import Grown, write_grown
from echelon.observe.run_folder import RunFolder
from echelon.start.agents.board import AgentBoard
from echelon.start.agents.driver import ConnectedAgent
from echelon.start.agents.protocol import (
    Begin,
    EndWorker,
    Finish,
    Interrupt,
    Message,
    Refusal,
    StartAgain,
    WorkerEnded,
)
from echelon.start.failure import Failure, decide, evidence

_POLL_S = 0.02
_SETTLE_S = 1.0
_LAST_FILES_S = 5.0


class AgentProcesses:
    """The workers of one run on the machines of its agents."""

    def __init__(
        self,
        folder: RunFolder,
        agents: Sequence[ConnectedAgent],
        starts: Sequence[Begin],
        *,
        saves: bool = False,
        board: AgentBoard | None = None,
    ) -> None:
        """`saves`: a worker may save and stop, which is no failure. `board`: workers may be lost."""
        self._folder = folder
        self._fine = (0, SAVED_AND_STOPPED) if saves else (0,)
        self._agents = list(agents)
        self._nodes = {worker.rank: worker.node for begin in starts for worker in begin.workers}
        self._of_agent = {
            id(agent): [worker.rank for worker in begin.workers]
            for agent, begin in zip(agents, starts, strict=True)
        }
        self._codes: dict[int, int] = {}
        self._cut_off: dict[int, Failure] = {}
        self._board = board
        self.lost: frozenset[int] = frozenset()  # workers without which the others go on
        self.excused: frozenset[int] = frozenset()  # workers whose failures do not end the run
        self.judged: Collection[int] | None = None  # workers whose ends count so far; None: all
        for agent, begin in zip(agents, starts, strict=True):
            agent.send(begin)
            for message in agent.waiting:
                self._take(agent, message)
        if board is not None:
            board.attach(self._agents)

    def attach(self, agent: ConnectedAgent, start: Begin) -> None:
        """Start the workers of a further machine."""
        assert self._board is not None
        self._agents.append(agent)
        self._of_agent[id(agent)] = [worker.rank for worker in start.workers]
        self._nodes |= {worker.rank: worker.node for worker in start.workers}
        agent.send(start)
        self._board.attach([agent])

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

    def machine_gone(self, rank: int) -> str:
        """Why a worker's machine is out of reach; empty if it is not."""
        found = self._cut_off.get(rank)
        return found.message if found is not None else ""

    def kill(self, rank: int) -> None:
        """End one worker at once."""
        self._send(rank, EndWorker(rank))

    def restart(self, rank: int) -> None:
        """Start a new process in the place of one that has ended, on its machine."""
        del self._codes[rank]
        self._send(rank, StartAgain(rank))

    def _send(self, rank: int, message: Message) -> None:
        for agent in self._agents:
            if rank in self._of_agent[id(agent)]:
                agent.send(message)

    def exit_codes(self) -> dict[int, int]:
        """The exit codes of the workers that have ended; negative is a signal."""
        self._listen()
        return dict(self._codes)

    def all_done(self) -> bool:
        """Whether every worker has ended; not counting those without which the others go on."""
        return len(self.exit_codes().keys() | self.lost) == self.size

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
            self._close(agent)
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
        self._close(agent)
        for rank in self._of_agent[id(agent)]:
            if rank not in self._codes and not ending:
                self._codes[rank] = 1 if self._board is None else -signal.SIGKILL
                text = f"LaunchError: {error}\n"
                self._cut_off[rank] = Failure(
                    rank=rank, t=time.time(), kind="LaunchError", message=error.message, text=text
                )

    def _close(self, agent: ConnectedAgent) -> None:
        if self._board is not None:
            self._board.detach(agent)
        agent.gone = True
        agent.handle.end()
        agent.channel.close()

    def _failures(self) -> list[Failure]:
        codes = {
            rank: code
            for rank, code in self.exit_codes().items()
            if rank not in self.excused and (self.judged is None or rank in self.judged)
        }
        found = {one.rank: one for one in evidence(self._folder, codes, self._fine)}
        found |= {rank: one for rank, one in self._cut_off.items() if rank in codes}
        return [failure for rank, failure in found.items() if rank not in self.excused]

    def __enter__(self) -> AgentProcesses:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()
