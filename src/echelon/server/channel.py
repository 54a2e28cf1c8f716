"""A worker's post to the servers: messages out, messages in, and whom to blame when none come."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from echelon.comm.wire.mailbox import Mailbox
from echelon.errors import RoundTimeout, WorkerError
from echelon.server.protocol import (
    AskAwaited,
    AwaitedWorkers,
    Bye,
    ServerMessage,
    ToWorker,
    WeightsPiece,
    refused,
)

if TYPE_CHECKING:
    from echelon.server.client import Table

_NOTHING = memoryview(b"")
_ANSWER_S = 5.0


class ServerChannel:
    """A worker's post to the servers, shared by its tables. `servers` and `names` are by rank."""

    def __init__(self, deadline_s: float, servers: Sequence[int], names: dict[int, str], rank: int) -> None:
        self.servers = list(servers)
        self.deadline_s = deadline_s
        self.names = names
        self.rank = rank
        self.me = names[rank]
        self.tables: list[Table] = []
        self.mailbox: Mailbox[ToWorker] | None = None

    @property
    def coordinator(self) -> int:
        """The server that decides."""
        return self.servers[0]

    def place(self, peer: int, message: ToWorker, length: int) -> memoryview | None:
        """Weights are received straight into the table's memory. Runs in the loop's thread."""
        table = self._table(peer, message)
        return table.place(peer, message, length) if isinstance(message, WeightsPiece) else None

    def _table(self, peer: int, message: ToWorker) -> Table:
        if message.table >= len(self.tables):
            raise refused(self.names[peer], message, f"this worker has no table {message.table}")
        return self.tables[message.table]

    def send(self, server: int, message: ServerMessage, payload: memoryview = _NOTHING) -> None:
        """Queue a message to a server."""
        assert self.mailbox is not None
        self.mailbox.send(server, message, payload)

    def until(
        self, there: Callable[[], bool], table: int, silent: Callable[[], list[int]] | None = None
    ) -> float:
        """Take in messages until something is there; returns how long that took.

        `silent` names the servers whose messages are missing; where none is given, the coordinator is
        asked whom it waits for.
        """
        assert self.mailbox is not None
        begun = time.perf_counter()
        while not there():
            left = self.deadline_s - (time.perf_counter() - begun)
            delivery = self.mailbox.receive(left) if left > 0 else None
            if delivery is not None:
                self._table(delivery.peer, delivery.message).hear(delivery)
            elif time.perf_counter() - begun >= self.deadline_s:
                raise self._late(self._awaited(table) if silent is None else silent())
        return time.perf_counter() - begun

    def _awaited(self, table: int) -> list[int]:
        """Those whom the coordinator waits for; itself, if it does not say."""
        assert self.mailbox is not None
        self.send(self.coordinator, AskAwaited(table=table))
        until = time.perf_counter() + _ANSWER_S
        while time.perf_counter() < until:
            delivery = self.mailbox.receive(until - time.perf_counter())
            if delivery is not None and isinstance(delivery.message, AwaitedWorkers):
                return delivery.message.ranks
        return [self.coordinator]

    def _late(self, ranks: list[int]) -> WorkerError:
        who = ", ".join(self.names[rank] for rank in ranks) or "nobody: this is a defect of the policy"
        servers = set(ranks) <= set(self.servers)
        told = f"{who} did not answer" if servers else f"no answer from the server, which waits for {who},"
        return RoundTimeout(
            f"{told} within {self.deadline_s:g} s",
            ranks=tuple(ranks),
            where=self.me,
            fix="see that worker's log, raise --round-timeout-s, or use a policy that does not wait",
        )

    def close(self) -> None:
        """Say goodbye to the servers."""
        if self.mailbox is None or self.mailbox.error is not None:
            return
        self.mailbox.leave(self.servers, Bye(), _ANSWER_S)
