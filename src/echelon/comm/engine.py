"""A group on Echelon's own transports: schedules over TCP between hosts, shared memory within one.

The collective is chosen by name and its schedule is made once for every length. Groups that are forked from
each other share connections and keep their messages apart by channel.
"""

from __future__ import annotations

import logging
import os
import time
from functools import lru_cache

import torch
from torch import Tensor

from echelon.comm import mesh
from echelon.comm.collective import COLLECTIVES, Collective, Schedule, pieces
from echelon.comm.connection import Connection
from echelon.comm.exchange import Exchange
from echelon.comm.group import Group, Op, Pending
from echelon.comm.loop import Loop
from echelon.comm.place import Place
from echelon.comm.rendezvous import Meeting, interface_address
from echelon.comm.shm import Team
from echelon.comm.spread import broadcast, gather_all
from echelon.errors import LaunchError, WorkerError

SECRET_VARIABLE = "ECHELON_SECRET"
_LARGE_BYTES = 64 * 1024  # from here on, spreading in few bytes beats spreading in few steps
_MOST_LANES = 4
_LANE_BYTES = 1 << 20
_log = logging.getLogger(__name__)


class Engine:
    """A worker's connections, shared by all groups that are forked from one."""

    def __init__(
        self, meeting: Meeting, loop: Loop, view: bytes, *, shared_memory: bool, deadline_s: float
    ) -> None:
        self.meeting = meeting
        self.loop = loop
        self.deadline_s = deadline_s
        self.view = view
        self.channels = 0
        self.shared_memory = shared_memory

    @classmethod
    def connect(
        cls, meeting: Meeting, place: Place, *, shared_memory: bool, deadline_s: float, timeout_s: float
    ) -> Engine:
        """Connect workers that have met."""
        given = os.environ.get(SECRET_VARIABLE)
        view, secret = mesh.agree_on_view(meeting, given.encode() if given else None)
        address = interface_address(meeting, place)
        sockets = mesh.connect(meeting, address, view=view, secret=secret, timeout_s=timeout_s)
        names = {member.rank: str(member) for member in meeting.members}
        connections = {
            rank: Connection(sock, view=view, peer=names[rank]) for rank, sock in sockets.items()
        }
        loop = Loop(connections, names)
        return cls(meeting, loop, view, shared_memory=shared_memory, deadline_s=deadline_s)

    def next_channel(self) -> int:
        """Channels are opened by all workers in the same order, so their numbers agree."""
        self.channels += 1
        return self.channels


class EngineGroup(Group):
    """All workers of a view, on one channel."""

    def __init__(self, engine: Engine, collective: str) -> None:
        self.rank = engine.meeting.me.rank
        self.size = len(engine.meeting.members)
        self._engine = engine
        self._text = collective
        self._collective: Collective = COLLECTIVES.build(collective, where="--collective")
        self._collective.check(self.size)
        self._channel = engine.next_channel()
        self._count = 0
        self._team: Team | None = None
        if engine.shared_memory:
            self._team = self._gather_team()

    def all_reduce(self, tensor: Tensor, op: Op = "sum", *, priority: int = 0) -> Pending:
        """Combine in place, in the background; in shared memory, by whoever waits."""
        flat = tensor.view(-1)
        if self._team is not None and self._team.holds(flat):
            return self._in_memory(self._team, flat, op)
        lanes = [
            self._start(lane, _schedule(self._collective, self.rank, self.size, lane.numel()), op, priority)
            for lane in self._lanes(flat)
        ]

        def wait() -> Tensor:
            for lane in lanes:
                lane.wait()
            return tensor

        return Pending(wait, lambda: all(lane.done() for lane in lanes))

    def _lanes(self, flat: Tensor) -> list[Tensor]:
        """A large buffer goes in several parts at once: while one is between two steps, another moves."""
        count = min(_MOST_LANES, max(1, flat.numel() * flat.element_size() // _LANE_BYTES))
        return [flat[start:stop] for start, stop in pieces(0, flat.numel(), count)]

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Everybody's tensor, by rank."""
        flat = tensor.contiguous().view(-1)
        length = flat.numel()
        whole = flat.new_empty(length * self.size)
        mine = slice(self.rank * length, (self.rank + 1) * length)
        whole[mine] = flat
        if length:
            large = length * flat.element_size() > _LARGE_BYTES
            self._start(whole, gather_all(self.rank, self.size, length, large=large), "sum", 0).wait()
        return [part.view(tensor.shape) for part in whole.split(length or 1)][: self.size] or [
            tensor.clone() for _ in range(self.size)
        ]

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        """Everybody gets the source's values."""
        flat = tensor.view(-1)
        if not flat.numel():
            return
        large = flat.numel() * flat.element_size() > _LARGE_BYTES
        self._start(
            flat, broadcast(self.rank, self.size, flat.numel(), source, large=large), "sum", 0
        ).wait()

    def _start(self, flat: Tensor, schedule: Schedule, op: Op, priority: int) -> Pending:
        self._count += 1
        exchange = Exchange(
            self._channel << 40 | self._count,
            flat,
            schedule,
            op=op,
            deadline_s=self._engine.deadline_s,
            priority=priority,
        )
        self._engine.loop.submit(exchange)

        def wait() -> Tensor:
            try:
                exchange.wait()
            except (OSError, WorkerError) as error:
                raise self._engine.meeting.explain(error, deadline_s=self._engine.deadline_s) from error
            return flat

        return Pending(wait, lambda: exchange.ended)

    def buffer(self, length: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A buffer in shared memory, where all members can map it."""
        if self._team is not None and device.type == "cpu":
            try:
                return self._team.buffer(length, dtype)
            except LaunchError as error:
                _log.warning("%s; these %d elements go over TCP instead", error.message, length)
        return super().buffer(length, dtype, device)

    def sent_bytes(self, tensor: Tensor) -> int:
        """What this member gives to others: as its schedule says, or as it writes to their memory."""
        flat = tensor.view(-1)
        if self._team is not None and self._team.holds(flat):
            return (self.size - 1) * flat.numel() * flat.element_size() // self.size
        schedules = [
            _schedule(self._collective, self.rank, self.size, lane.numel()) for lane in self._lanes(flat)
        ]
        moved = sum(move.length for steps in schedules for step in steps for move in step.sends)
        return moved * flat.element_size()

    def release(self, buffer: Tensor) -> None:
        """Forget a buffer; its memory goes with the last tensor that uses it."""
        if self._team is not None:
            self._team.release(buffer)

    def _gather_team(self) -> Team | None:
        """The members as users of one shared memory; None on all of them if it fails on any."""
        try:
            return Team(
                f"echelon-{self._engine.view.hex()}-{self._channel}",
                self.rank,
                self.size,
                meet=self.barrier,
                check=self._engine.loop.check,
            )
        except LaunchError as error:
            if self.rank == 0:
                _log.warning("%s; workers of this machine use TCP instead", error.message)
            return None

    def _in_memory(self, team: Team, flat: Tensor, op: Op) -> Pending:
        turn = team.ready()
        deadline_s = self._engine.deadline_s

        def wait() -> Tensor:
            try:
                team.reduce(flat, op, turn, time.monotonic() + deadline_s)
            except (TimeoutError, WorkerError) as error:
                raise self._engine.meeting.explain(error, deadline_s=deadline_s) from error
            return flat

        return Pending(wait, lambda: False)

    def fork(self) -> Group:
        """The same connections, another channel."""
        return EngineGroup(self._engine, self._text)

    def close(self) -> None:
        """Leave; peers that still need us notice at once."""
        self._engine.loop.close()


@lru_cache(maxsize=256)
def _schedule(collective: Collective, rank: int, size: int, length: int) -> Schedule:
    return collective.schedule(rank, size, length)
