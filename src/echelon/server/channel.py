"""A worker's channel to the servers: sends messages, waits for answers, and names silent peers.

Every wait has the same deadline. If it passes, RoundTimeout names the servers that did not answer, or the
workers that the coordinator waits for.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from echelon.comm.wire.mailbox import Delivery, Mailbox
from echelon.errors import LaunchError, RoundTimeout, WorkerError
from echelon.server.mail import MemoryMailbox
from echelon.server.protocol import (
    AskAwaited,
    AwaitedWorkers,
    Bye,
    MemoryOpened,
    OpenMemory,
    ServerMessage,
    ToWorker,
    WeightsPiece,
    refused,
)

if TYPE_CHECKING:
    from echelon.comm.group import Group
    from echelon.server.client import ServerClient

_NOTHING = memoryview(b"")
_ANSWER_S = 5.0
_LOOK_EVERY_S = 2e-4
_log = logging.getLogger(__name__)

Request = tuple[int, ServerMessage, memoryview]  # server, message, payload


class ServerChannel:
    """One worker's channel, shared by its clients; the client of table i is `clients[i]`.

    `servers` are ranks, and `names` are the names of ranks in errors.
    """

    def __init__(self, deadline_s: float, servers: Sequence[int], names: dict[int, str], rank: int) -> None:
        self.servers = list(servers)
        self.deadline_s = deadline_s
        self.names = names
        self.rank = rank
        self.me = names[rank]
        self.clients: list[ServerClient] = []
        self.near: tuple[int, ...] = ()  # servers that this worker can share memory with
        self._has_asked = False  # them for memory
        self._mailbox: MemoryMailbox[ToWorker] | None = None

    @classmethod
    def open(cls, group: Group) -> ServerChannel:
        """The channel of a group's member to the servers of its run."""
        channel = cls(group.deadline_s, group.servers, dict(group.names), group.ranks[group.rank])
        channel.connect(group.mailbox(ToWorker, channel.place))
        channel.near = group.near_servers
        return channel

    def connect(self, mailbox: Mailbox[ToWorker]) -> None:
        """Send and receive through this mailbox."""
        self._mailbox = MemoryMailbox(
            mailbox, ToWorker, place=self.place, peers=self.servers, deadline_s=self.deadline_s
        )

    def open_memory(self) -> None:
        """Let messages to and from servers of this machine go through memory, where that can be had."""
        if self._has_asked or not self.near:
            return
        assert self._mailbox is not None
        self._has_asked = True
        try:
            own = self._mailbox.open_memory()
        except LaunchError as error:
            _log.warning("%s; messages to servers of this machine go over TCP instead", error.message)
            self.near = ()
            return
        requests = [
            (server, OpenMemory(memory=own, place=self.servers.index(server)), _NOTHING)
            for server in self.near
        ]
        for server, answer, _ in self.request(requests, MemoryOpened):
            assert isinstance(answer, MemoryOpened)
            try:
                if answer.memory is None:
                    raise LaunchError(f"{self.names[server]} has no memory to share")
                self._mailbox.use_memory(server, answer.memory, answer.place)
            except LaunchError as error:
                _log.warning("%s; messages to that server go over TCP instead", error.message)
                self.near = tuple(one for one in self.near if one != server)
        self._mailbox.close()

    @property
    def coordinator(self) -> int:
        """The rank of the server that decides."""
        return self.servers[0]

    def place(self, peer: int, message: ToWorker, length: int) -> memoryview | None:
        """The memory that a payload is received into. Runs in the loop's thread."""
        if isinstance(message, WeightsPiece):
            return self._client(peer, message).weights.place(self.names[peer], message, length)
        return None

    def _client(self, peer: int, message: ToWorker) -> ServerClient:
        assert not isinstance(message, MemoryOpened)
        if message.table >= len(self.clients):
            raise refused(self.names[peer], message, f"this worker has no table {message.table}")
        return self.clients[message.table]

    def send(self, server: int, message: ServerMessage, payload: memoryview = _NOTHING) -> None:
        """Queue a message to a server."""
        assert self._mailbox is not None
        self._mailbox.send(server, message, payload)

    def request(self, requests: Sequence[Request], answer: type[ServerMessage]) -> list[Delivery[ToWorker]]:
        """Send requests to servers and wait for an answer of this class to each."""
        awaited = Counter(server for server, *_ in requests)
        answers: list[Delivery[ToWorker]] = []

        def take(delivery: Delivery[ToWorker]) -> None:
            if isinstance(delivery.message, answer):
                answers.append(delivery)
                awaited[delivery.peer] -= 1

        for server, message, payload in requests:
            self.send(server, message, payload)
        self._receive_until(
            lambda: len(answers) == len(requests),
            lambda: sorted(server for server, count in awaited.items() if count > 0),
            take,
        )
        return answers

    def wait_for_servers(self, is_done: Callable[[], bool], silent: Callable[[], list[int]]) -> float:
        """Receive messages until `is_done`; returns the seconds. `silent` are the indices of servers."""
        return self._receive_until(is_done, lambda: [self.servers[index] for index in silent()])

    def wait_for_memory(self, is_done: Callable[[], bool], silent: Callable[[], list[int]]) -> float:
        """As `wait_for_servers`, for what servers write to shared memory without a message."""
        return self._receive_until(
            is_done, lambda: [self.servers[index] for index in silent()], look_every_s=_LOOK_EVERY_S
        )

    def wait_for_answer(self, is_done: Callable[[], bool], table: int) -> float:
        """As `wait_for_servers`, for an answer of the coordinator, which is asked whom it waits for."""
        return self._receive_until(is_done, lambda: self._awaited_workers(table))

    def _receive_until(
        self,
        is_done: Callable[[], bool],
        missing: Callable[[], list[int]],
        take: Callable[[Delivery[ToWorker]], None] = lambda delivery: None,
        look_every_s: float = math.inf,
    ) -> float:
        assert self._mailbox is not None
        begun = time.perf_counter()
        while not is_done():
            left = self.deadline_s - (time.perf_counter() - begun)
            delivery = self._mailbox.receive(min(left, look_every_s)) if left > 0 else None
            if delivery is not None:
                if not isinstance(delivery.message, MemoryOpened):
                    self._client(delivery.peer, delivery.message).receive(delivery)
                take(delivery)
            elif time.perf_counter() - begun >= self.deadline_s:
                raise self._timeout(missing())
        return time.perf_counter() - begun

    def _awaited_workers(self, table: int) -> list[int]:
        """The ranks that the coordinator waits for; its own rank if it does not answer."""
        assert self._mailbox is not None
        self.send(self.coordinator, AskAwaited(table=table))
        until = time.perf_counter() + _ANSWER_S
        while time.perf_counter() < until:
            delivery = self._mailbox.receive(until - time.perf_counter())
            if delivery is not None and isinstance(delivery.message, AwaitedWorkers):
                return delivery.message.ranks
        return [self.coordinator]

    def _timeout(self, ranks: list[int]) -> WorkerError:
        who = ", ".join(self.names.get(rank, f"rank {rank}") for rank in ranks)
        who = who or "nobody: this is a defect of the policy"
        servers = set(ranks) <= set(self.servers)
        what = f"{who} did not answer" if servers else f"no answer from the server, which waits for {who},"
        return RoundTimeout(
            f"{what} within {self.deadline_s:g} s",
            ranks=tuple(ranks),
            where=self.me,
            fix="see that worker's log, raise --round-timeout-s, or use a policy that does not wait",
        )

    def close(self) -> None:
        """Say goodbye to the servers."""
        if self._mailbox is not None and self._mailbox.error is None:
            self._mailbox.leave(self.servers, Bye(), _ANSWER_S)
