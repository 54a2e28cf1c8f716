"""A worker's connections and shared memory, which a group and its forks share."""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING
from weakref import WeakSet

from echelon.comm.meet import mesh, secret
from echelon.comm.meet.place import Place
from echelon.comm.meet.rendezvous import Rendezvous, further_addresses, interface_address
from echelon.comm.meet.tls import Certificates
from echelon.comm.memory.messages import MachineMessages
from echelon.comm.memory.operations import MemoryOperations
from echelon.comm.memory.pairs import PairRings
from echelon.comm.memory.rails import Rails
from echelon.comm.memory.segment import Gather, Handle
from echelon.comm.memory.shm import SharedMemoryTeam
from echelon.comm.memory.slots import SlotTeam
from echelon.comm.wire.all_to_all import AllToAll
from echelon.comm.wire.connection import Connection
from echelon.comm.wire.loop import Loop
from echelon.comm.wire.summing import SumServers
from echelon.config.choices import Integrity
from echelon.errors import WorkerError

if TYPE_CHECKING:
    from echelon.comm.engine import EngineGroup


NESTED_CHANNELS = 1 << 19  # the channels of groups inside subgroups, whose other workers do not count them


class Engine:
    """A worker's connections, shared by a group and its forks."""

    def __init__(
        self,
        rendezvous: Rendezvous,
        loop: Loop,
        view: bytes,
        *,
        shared_memory: bool,
        deadline_s: float,
        servers: int = 0,
        sums: bool = True,
    ) -> None:
        self.rendezvous = rendezvous
        self.loop = loop
        self.deadline_s = deadline_s
        self.view = view
        self.channels = 0
        self.nested = 0
        self.workers = rendezvous.members[: len(rendezvous.members) - servers]
        self.shared_memory = shared_memory and not (servers and sums)
        self.servers: SumServers | None = None
        if servers and sums:
            me = rendezvous.me.rank
            self.servers = SumServers(loop, rank=me, workers=len(self.workers), servers=servers)
        here = (rendezvous.me.host, rendezvous.me.node)
        self.near_servers = tuple(  # with which this worker can share memory
            member.rank
            for member in rendezvous.members[len(self.workers) :]
            if self.shared_memory and (member.host, member.node) == here
        )
        self.rails: list[Rails] = []
        self.teams: list[SharedMemoryTeam] = []  # their members compute sums when they wait
        self.slots: list[SlotTeam] = []  # the same for operations through slots
        self.messages: MachineMessages | None = None  # between two workers of this machine
        self.all_to_alls: deque[AllToAll] = deque()  # in flight, oldest first
        self.piece_bytes = 0  # unknown
        self.warned = False  # that there is no shared memory
        self.whole: WeakSet[EngineGroup] = WeakSet()  # the groups of all workers
        self.arrangement: tuple[str, tuple[tuple[int, ...], ...]] | None = None
        loop.progress = self.progress
        loop.watch.workers = frozenset(range(len(self.workers)))

    @classmethod
    def connect(
        cls,
        rendezvous: Rendezvous,
        place: Place,
        *,
        shared_memory: bool,
        deadline_s: float,
        timeout_s: float,
        sums: bool = True,
        integrity: Integrity = "authenticated",
        silent_s: float = 0.0,
    ) -> Engine:
        """Connect the workers and servers of a rendezvous. `sums`: whether the servers sum.

        `silent_s`: a connection to a machine that has answered nothing for so long is closed; 0: never.
        """
        view = mesh.agree_on_view(rendezvous)
        known, _ = secret.find(os.environ, place.address)
        address = interface_address(rendezvous, place)
        certificates = Certificates.from_environment(os.environ)
        links = mesh.connect(
            rendezvous,
            address,
            further=further_addresses(rendezvous, address),
            view=view,
            secret=known,
            timeout_s=timeout_s,
            certificates=certificates,
            authenticated=integrity == "authenticated",
        )
        names = {member.rank: str(member) for member in rendezvous.members}
        connections = {
            rank: Connection(link.sock, view=view, peer=names[rank], keys=link.keys, silent_s=silent_s)
            for rank, link in links.items()
        }
        loop = Loop(connections, names, me=names[rendezvous.me.rank])
        return cls(
            rendezvous,
            loop,
            view,
            shared_memory=shared_memory,
            deadline_s=deadline_s,
            servers=place.servers,
            sums=sums,
        )

    def close(self) -> None:
        """Disconnect. The peers learn this worker's last error, if it has reported one."""
        if not any(self.rendezvous.departure_causes):
            self.loop.progress = _no_progress
            while self.all_to_alls:
                self.all_to_alls.popleft().finish_sending()
            if self.messages is not None:
                self.messages.finish_sending()
            if self.servers is not None:
                with contextlib.suppress(WorkerError):  # the servers have noticed already
                    self.servers.dismiss()
        self.loop.watch.on_waiting = None
        self.loop.close(self.rendezvous.departure_causes[-1] if self.rendezvous.departure_causes else "")
        for rails in self.rails:
            rails.close()
        if self.messages is not None:
            self.messages.rings.close()

    def open_memory(self, ranks: Sequence[int], channel: int, gather: Gather) -> MemoryOperations:
        """Operations in shared memory among workers of one machine, who call this together."""
        opened = MemoryOperations(
            ranks.index(self.rendezvous.me.rank),
            ranks,
            [self.workers[rank].pid for rank in ranks],
            self.loop,
            channel=channel,
            gather=gather,
            meanwhile=self.advance,
            deadline_s=lambda: self.deadline_s,
        )
        self.slots.append(opened.team)
        return opened

    def open_messages(self, on_machines: Sequence[Sequence[int]], gather: Gather) -> None:
        """Messages between the workers of each machine. All workers call this together."""
        me = self.rendezvous.me.rank
        mates = next(ranks for ranks in on_machines if me in ranks)
        most = max(len(ranks) for ranks in on_machines)
        if most == 1 or not PairRings.fits(most):
            return
        order = [*mates, *(rank for rank in range(len(self.workers)) if rank not in mates)]

        def mates_first(mine: Handle) -> list[Handle]:
            handles = gather(mine)
            return [handles[rank] for rank in order]

        self.messages = MachineMessages(
            mates,
            [self.workers[rank].pid for rank in mates],
            self.loop,
            rank=me,
            gather=mates_first,
            meanwhile=self.advance,
            deadline_s=lambda: self.deadline_s,
        )
        self.loop.tick = self.messages.rings.take_all

    def start(self, all_to_all: AllToAll) -> None:
        """Begin an all-to-all, and remember it while it is in flight."""
        self.all_to_alls.append(all_to_all)
        self.loop.submit(all_to_all)
        with contextlib.suppress(IndexError):  # several threads may remove entries at once
            while self.all_to_alls[0].ended:
                self.all_to_alls.popleft()

    def progress(self) -> bool:
        """Compute this worker's part of all sums in shared memory that have begun.

        Of other operations there, as much as needs no waiting; returns whether some are left.
        """
        for team in self.teams:
            team.finish_all(self.deadline_s)
        left = [slots for slots in self.slots if slots.advance()]
        return (self.messages is not None and self.messages.rings.advance()) or bool(left)

    def advance(self) -> None:
        """As far as that needs no waiting; for a worker that waits for one of its teams."""
        for team in self.teams:
            team.advance()
        for slots in self.slots:
            slots.advance()
        if self.messages is not None:
            self.messages.rings.advance()

    def next_channel(self) -> int:
        """The next channel's number; all workers open channels in the same order."""
        self.channels += 1
        return self.channels


def _no_progress() -> bool:
    """Replaces `progress` when this worker leaves."""
    return False
