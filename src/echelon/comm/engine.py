"""A group on Echelon's own transports: schedules over TCP between machines, shared memory within one.

A collective's schedule is made once for every length. Groups that are forked from each other share
connections; each has a channel of its own.

Buffers that the group has made are in shared memory if workers share a machine: on one machine they are
reduced there (`shm.py`); on several, some workers of each machine exchange sums with the others
(`rails.py`). All other tensors go over TCP.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any

import torch
import xxhash
from torch import Tensor

from echelon.cluster import probe
from echelon.comm.endpoint import NESTED_CHANNELS
from echelon.comm.endpoint import Engine as Engine
from echelon.comm.future import CallerFuture, Future
from echelon.comm.group import Group, Messages, Op, blocks, check_messages
from echelon.comm.meet.links import Links, measure
from echelon.comm.memory.operations import MemoryOperations
from echelon.comm.memory.rails import TAGS, RailLayout, Rails, machines
from echelon.comm.memory.segment import Handle, share
from echelon.comm.memory.shm import SharedMemoryTeam
from echelon.comm.schedule.arrange import arranged
from echelon.comm.schedule.collective import (
    COLLECTIVES,
    Collective,
    Move,
    Schedule,
    ScheduleStep,
    on,
    pieces,
)
from echelon.comm.schedule.collectives.auto import AutoCollective
from echelon.comm.schedule.collectives.direct import to_owners
from echelon.comm.schedule.spread import broadcast, gather_all, gather_blocks
from echelon.comm.wire.all_to_all import AllToAll
from echelon.comm.wire.exchange import Exchange
from echelon.comm.wire.loop import CHANNEL_BITS
from echelon.comm.wire.mailbox import M, Mailbox, PlacePayload
from echelon.comm.wire.summing import SumServers
from echelon.comm.wire.watch import TCP_PAIR_CHANNELS, OnWaiting
from echelon.errors import ConfigError, LaunchError, RoundTimeout

_LARGE_BYTES = 64 * 1024  # above this, few bytes matter more than few steps
_ALL_TO_ALL = -1  # the channel of messages from each to each: their tags have the group's
_MOST_LANES = 4
_LANE_BYTES = 1 << 20
_log = logging.getLogger(__name__)


class EngineGroup(Group):
    """All workers of a view, or the subgroup with the given `ranks`, on one channel."""

    own_transport = True

    def __init__(
        self,
        engine: Engine,
        collective: str,
        *,
        owns: bool = True,
        ranks: tuple[int, ...] = (),
        channel: int = 0,
    ) -> None:
        me = engine.rendezvous.me.rank
        self.rank = ranks.index(me) if ranks else me
        self.size = len(ranks) or len(engine.workers)
        self._subgroup = ranks
        self._ranks = ranks or tuple(range(self.size))
        self._engine = engine
        self.names = engine.loop.names
        self.deadline_s = engine.deadline_s
        self.servers = tuple(range(len(engine.workers), len(engine.rendezvous.members)))
        self.near_servers = engine.near_servers
        on_machines = machines([engine.workers[rank] for rank in self.ranks])
        self.machines = len(on_machines)
        self._order = tuple(self._ranks.index(rank) for ranks in on_machines for rank in ranks)
        self._owns = owns
        self._text: str
        self._collective: Collective
        self._choose(collective)
        self._channel = channel or engine.next_channel()
        self._count = 0
        self._team: SharedMemoryTeam | None = None
        self._rails: Rails | None = None
        self._memory: MemoryOperations | None = None
        if engine.shared_memory and not ranks:
            self._share_memory(machines(engine.workers))
        self._memory = self._open_memory() if engine.shared_memory else None
        if engine.shared_memory and not ranks and owns:
            self._open_messages(on_machines)
        self._sent: Counter[tuple[int, int, int]] = Counter()  # messages, by sender, receiver and tag
        if not ranks:
            engine.whole.add(self)
            if engine.arrangement is not None:
                self._adopt(*engine.arrangement)

    @property
    def _summing(self) -> SumServers | None:
        """The servers that sum for all workers; a subgroup sums by itself."""
        return None if self._subgroup else self._engine.servers

    @property
    def ranks(self) -> tuple[int, ...]:
        """The members' ranks in the view."""
        return self._ranks

    def subgroup(self, members: Sequence[int]) -> Group | None:
        """Some members as a group of their own."""
        channel = self._next_channel()
        if self.rank not in members:
            return None
        ranks = tuple(self._ranks[member] for member in members)
        return EngineGroup(self._engine, AutoCollective.name, owns=False, ranks=ranks, channel=channel)

    def _next_channel(self) -> int:
        """All members of this group call it in the same order. The others' counts do not matter."""
        engine = self._engine
        if not self._subgroup:
            return engine.next_channel()
        told = self.all_gather(torch.tensor([engine.nested]))
        engine.nested = 1 + max(int(one) for one in told)
        return NESTED_CHANNELS + engine.nested

    def all_reduce(self, tensor: Tensor, op: Op = "sum", *, priority: int = 0) -> Future[Tensor]:
        """Combine in place: in the background, or on one machine's shared memory while waiting."""
        flat = tensor.detach().view(-1)
        if self._team is None or not self._team.holds(flat):
            if self._memory is not None:
                return self._memory.all_reduce(flat, op, tensor)
            lanes = _lanes(flat)
            if len(lanes) == 1:
                return self._over_tcp(flat, op, priority, tensor)
            return Future.all([self._over_tcp(flat[a:b], op, priority) for a, b in lanes], tensor)
        if self._rails is None:
            return self._in_memory(self._team, tensor, flat, op)
        parts = self._team.buffers_of(flat)
        crossing = [
            self._rails.start(self._next_tag(TAGS), [part[a:b] for part in parts], op, priority)
            for a, b in _lanes(flat)
        ]
        return Future.all(crossing, tensor)

    def _over_tcp(
        self, lane: Tensor, op: Op, priority: int, result: Tensor | None = None
    ) -> Future[Tensor]:
        if self._summing is not None:
            self._summing.announce(self._channel << CHANNEL_BITS | (self._count + 1), lane, op)
        return self._start(lane, self._schedule(lane.numel()), op, priority, result, self._ranks)

    def _schedule(self, length: int) -> Schedule:
        if self._summing is not None:
            return self._summing.schedule(length)
        return _schedule(self._collective, self._order, self.rank, length)

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """The tensors of all members, by rank."""
        own = tensor.detach().contiguous()
        length = own.numel() * own.element_size()
        if length and self._memory is not None:
            return self._memory.all_gather(own)
        return self._gather_over_tcp(own)

    def _gather_over_tcp(self, own: Tensor) -> list[Tensor]:
        parts = own.new_empty((self.size, *own.shape))
        parts[self.rank] = own
        if own.numel():
            length = own.numel() * own.element_size()
            steps = gather_all(self.rank, self.size, length, large=length > _LARGE_BYTES)
            self._start(_as_bytes(parts), steps, "sum", 0, parties=self._ranks).wait()
        return list(parts)

    def all_gather_unequal(
        self, buffer: Tensor, lengths: Sequence[int], *, priority: int = 0
    ) -> Future[Tensor]:
        """In the background, or in shared memory while waiting."""
        item_bytes = buffer.element_size()
        if self._memory is not None:
            return self._memory.gather_blocks(buffer, lengths)
        steps = gather_blocks(self.rank, [length * item_bytes for length in lengths])
        parties = self._ranks if all(lengths) else ()
        return self._start(_as_bytes(buffer), steps, "sum", priority, buffer, parties)

    def reduce_scatter(self, buffer: Tensor, lengths: Sequence[int], op: Op = "sum") -> Future[Tensor]:
        """Every member sends block r to member r, which adds them up."""
        flat = buffer.detach().view(-1)
        own = blocks(flat, lengths)[self.rank]
        if self._memory is not None:
            return self._memory.reduce_scatter(flat, lengths, op, own)
        steps = to_owners(self.rank, list(pairwise(accumulate(lengths, initial=0))))
        return self._start(flat, steps, op, 0, own)

    def all_to_all(self, outgoing: Sequence[Tensor], *, priority: int = 0) -> Messages:
        """Over TCP, directly from each member to each other, in the background."""
        check_messages(outgoing, self.size)
        messages = self._engine.messages
        if messages is not None and self.machines == 1 and self.size > 1:
            return messages.all_to_all(outgoing, self.rank, self.ranks, (_ALL_TO_ALL, self._next_tag()))
        memories = {id(message): message.contiguous().numpy().data for message in outgoing}
        all_to_all = AllToAll(
            self._next_tag(),
            {
                peer: memories[id(message)]
                for rank, (peer, message) in enumerate(zip(self.ranks, outgoing, strict=True))
                if rank != self.rank
            },
            deadline_s=self._engine.deadline_s,
            priority=priority,
        )
        self._engine.start(all_to_all)
        own, ranks = outgoing[self.rank], self.ranks
        received = all_to_all.received.then(lambda found: [found.get(rank, own) for rank in ranks])
        return Messages(received, all_to_all.future, all_to_all.sent_bytes)

    def send(self, tensor: Tensor, to: int, tag: int = 0) -> Future[None]:
        """Through shared memory to a worker of this machine, over TCP to others."""
        peer = self._peer(to, "send", tag)
        messages = self._engine.messages
        if messages is not None and messages.reaches(peer):
            return messages.send(tensor.contiguous(), peer, (self._channel, tag))
        own = tensor.detach().contiguous()
        step = ScheduleStep(sends=(Move(to, 0, own.numel() * own.element_size()),))
        return self._message(own, step, (self.rank, to, tag)).then(lambda _: None)

    def receive(self, tensor: Tensor, source: int, tag: int = 0) -> Future[Tensor]:
        """Through shared memory or TCP, as it was sent."""
        peer = self._peer(source, "receive", tag)
        messages = self._engine.messages
        if messages is not None and not messages.reaches(peer):
            messages = None
        if messages is not None and tensor.is_contiguous():
            return messages.receive(tensor, peer, (self._channel, tag), tensor)
        flat = tensor.detach()
        into = (
            flat if flat.is_contiguous() else torch.empty_like(flat, memory_format=torch.contiguous_format)
        )
        if messages is not None:
            found = messages.receive(into, peer, (self._channel, tag), tensor)
        else:
            step = ScheduleStep(takes=(Move(source, 0, into.numel() * into.element_size()),))
            found = self._message(into, step, (source, self.rank, tag)).then(lambda _: tensor)
        return found if into is flat else found.then(lambda _: flat.copy_(into)).then(lambda _: tensor)

    def _peer(self, rank: int, call: str, tag: int) -> int:
        """The rank of another member in the view."""
        if not 0 <= rank < self.size or rank == self.rank or not 0 <= tag < 1 << 31:
            raise ConfigError(
                f"rank {self.rank} of {self.size} cannot {call} with rank {rank} and tag {tag}",
                where=call,
                fix="give the rank of another member, and a tag from 0 to 2**31 - 1",
            )
        return self._ranks[rank]

    def _message(self, own: Tensor, step: ScheduleStep, route: tuple[int, int, int]) -> Future[Tensor]:
        """One message over TCP, from a member to another, with a tag; both count them alike."""
        self._sent[route] += 1
        number = xxhash.xxh3_64_intdigest(repr((route, self._sent[route])).encode())
        channel = TCP_PAIR_CHANNELS + self._channel
        tag = channel << CHANNEL_BITS | number & ((1 << CHANNEL_BITS) - 1)
        return self._start(_as_bytes(own), [step], "sum", 0, tag=tag)

    def on_waiting(self, told: OnWaiting) -> None:
        """The loop's thread calls it."""
        self._engine.loop.watch.on_waiting = told

    def left_loop(self, error: BaseException | None) -> None:
        """Blocked workers learn of it when they ask what this one does."""
        self._engine.loop.watch.left_loop(error)

    def progress(self) -> None:
        """Its part of sums in shared memory."""
        self._engine.progress()

    def neighbor_all_gather(self, tensor: Tensor, peers: Sequence[int]) -> list[Tensor]:
        """Only with these peers."""
        own = tensor.detach().reshape(-1)
        length = own.numel()
        rooms = own.new_empty(length * (1 + len(peers)))
        rooms[:length] = own
        step = ScheduleStep(
            sends=tuple(Move(peer, 0, length) for peer in peers),
            takes=tuple(Move(peer, length * (1 + at), length * (2 + at)) for at, peer in enumerate(peers)),
        )
        self.exchange(rooms, [step]).wait()
        return list(rooms.view(1 + len(peers), *tensor.shape)[1:])

    def mailbox(self, accepts: Any, place: PlacePayload[M]) -> Mailbox[M]:
        """Over the view's connections."""
        return Mailbox(self._engine.loop, set(self.servers), accepts, place=place)

    def shared_memory(self, size_bytes: int) -> Tensor:
        """The first member makes it."""
        pids = [self._engine.workers[rank].pid for rank in self.ranks]

        return share(size_bytes, self.rank, pids, [0], self._gather_handles)[0]

    def _gather_handles(self, mine: Handle) -> list[Handle]:
        return [Handle(*part.tolist()) for part in self._gather_over_tcp(torch.tensor(mine))]

    def _open_memory(self) -> MemoryOperations | None:
        """Operations in shared memory, if all members are on one machine and can have it."""
        if self.machines > 1 or self.size == 1:
            return None
        try:
            return self._engine.open_memory(self._ranks, self._channel, self._gather_handles)
        except LaunchError as error:
            self._warn(error, "small messages of these workers go over TCP instead")
            return None

    def _open_messages(self, on_machines: list[list[int]]) -> None:
        """Messages in shared memory. All members ask together; all get it, or none."""
        try:
            self._engine.open_messages(on_machines, self._gather_handles)
        except LaunchError as error:
            self._warn(error, "messages between workers of one machine go over TCP instead")

    def agree(self, call: int) -> None:
        """In shared memory, or by a gather."""
        if self._memory is None:
            super().agree(call)
        else:
            self._memory.agree(call)

    def announce(self, call: int) -> None:
        """In shared memory the next operation carries the number."""
        if self._memory is None:
            super().announce(call)
        else:
            self._memory.announce(call)

    def barrier(self) -> None:
        """Without data, in shared memory."""
        if self._memory is None:
            super().barrier()
        else:
            self._memory.barrier()

    def all_gather_any(self, tensor: Tensor) -> list[Tensor]:
        """One exchange in shared memory, if the tensors are small."""
        if self._memory is not None:
            return self._memory.all_gather_any(tensor)
        return super().all_gather_any(tensor)

    def exchange(self, flat: Tensor, schedule: Schedule, *, priority: int = 0) -> Future[Tensor]:
        """Carry out this member's part of a schedule that sums, on a flat buffer, in the background."""
        return self._start(flat, schedule, "sum", priority)

    def measure_links(self) -> Links | None:
        """The measured links; None if all members are on one machine."""
        if len(machines(self._engine.workers)) == 1:
            return None
        links = measure(self)
        for peer, connection in self._engine.loop.connections.items():
            rate = links.bytes_per_s.get((self.rank, peer), 1 / links.slowest.seconds_per_byte)
            connection.fit(rate)
        if self._text == AutoCollective.name:
            self._choose(str(AutoCollective.measured(links.slowest)))
        return links

    def arrange(self, collective: str, groups: Sequence[Sequence[int]] = ()) -> None:
        """Take other schedules, in all groups of all workers; operations in flight keep theirs."""
        self._engine.arrangement = collective, tuple(tuple(ranks) for ranks in groups)
        for group in list(self._engine.whole):
            group._adopt(*self._engine.arrangement)

    def _adopt(self, collective: str, groups: Sequence[Sequence[int]]) -> None:
        on_machines = machines(self._engine.workers)
        if self._rails is not None:
            found = arranged(collective, on_machines, groups)
            self._rails.adopt(_checked(found.collective, len(found.units)), found.units)
            flat = arranged(AutoCollective.name, [[rank] for rank in self._order], groups)
        else:
            flat = arranged(collective, [[rank] for ranks in on_machines for rank in ranks], groups)
            self._collective = _checked(flat.collective, self.size)
        self._order = flat.order
        self._text = collective

    def reason(self, length_bytes: int) -> str:
        """Why buffers of this length are reduced with this collective."""
        if self._engine.servers is not None:
            return f"ps, as asked: {self._engine.servers.count} servers sum"
        if self._engine.arrangement is not None:
            return f"{self._text}, arranged for this cluster"
        if isinstance(self._collective, AutoCollective):
            return self._collective.reason(self.size, length_bytes)
        return f"{self._text}, as asked"

    def _choose(self, collective: str) -> None:
        self._text = collective
        self._collective = _checked(collective, self.size)

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        """Copy the source's values to all members."""
        if tensor.numel():
            flat = _as_bytes(tensor.detach())
            if self._memory is not None:
                self._memory.broadcast(flat, source)
                return
            large = flat.numel() > _LARGE_BYTES
            steps = broadcast(self.rank, self.size, flat.numel(), source, large=large)
            parties = () if source == self.rank else (self._ranks[source],)
            self._start(flat, steps, "sum", 0, parties=parties).wait()

    def _start(
        self,
        flat: Tensor,
        schedule: Schedule,
        op: Op,
        priority: int,
        result: Tensor | None = None,
        parties: Sequence[int] = (),
        tag: int = 0,
    ) -> Future[Tensor]:
        if self._subgroup:
            schedule = on(self._subgroup, schedule)
        exchange = Exchange(
            tag or self._next_tag(),
            flat,
            schedule,
            rank=self._engine.rendezvous.me.rank,
            op=op,
            deadline_s=self._engine.deadline_s,
            priority=priority,
            result=result,
            parties=parties,
        )
        self._engine.loop.submit(exchange)
        return exchange.future

    def _next_tag(self, count: int = 1) -> int:
        """The first of `count` tags. All members count alike, also if they have no part."""
        first = self._count + 1
        self._count += count
        return self._channel << CHANNEL_BITS | first

    def buffer(self, length: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A buffer in shared memory, if there is any."""
        if self._team is not None and device.type == "cpu" and length:
            try:
                return self._team.buffer(length, dtype)
            except LaunchError as error:
                self._warn(error, f"these {length} elements go over TCP instead")
        return super().buffer(length, dtype, device)

    def sent_bytes(self, tensor: Tensor) -> int:
        """The bytes that this member sends, or writes to other members' memory.

        For a shared buffer on several machines, only what it sends to other machines.
        """
        flat = tensor.view(-1)
        lengths = [stop - start for start, stop in _lanes(flat)]
        if self._team is None or not self._team.holds(flat):
            if self._memory is not None:
                return (self.size - 1) * flat.numel() * flat.element_size() // self.size
            schedules = [self._schedule(length) for length in lengths]
            moved = sum(move.length for steps in schedules for step in steps for move in step.sends)
        elif self._rails is not None:
            moved = sum(self._rails.sent_elements(length) for length in lengths)
        else:
            return (self.size - 1) * flat.numel() * flat.element_size() // self.size
        return moved * flat.element_size()

    def release(self, buffer: Tensor) -> None:
        """Forget a buffer; its memory is freed with the last tensor that uses it."""
        if self._team is not None:
            self._team.release(buffer)

    def _share_memory(self, machines: list[list[int]]) -> None:
        """Let the workers of each machine share memory; if one cannot, nobody does."""
        if len(machines) == self.size > 1:
            return
        try:
            if len(machines) > 1:
                self._collective.check(len(machines))
            layout = RailLayout(machines, self.rank)
            self._team = self._gather_team(layout)
        except (LaunchError, ConfigError) as error:
            self._engine.shared_memory = False  # forks do not try again
            self._warn(error, "workers of one machine use TCP instead")
            return
        self._team.piece_bytes = self._piece_bytes(layout)
        if len(machines) > 1:
            loop, deadline_s = self._engine.loop, self._engine.deadline_s
            self._rails = Rails(
                self._team, layout, self._collective, loop, rank=self.rank, deadline_s=deadline_s
            )
            self._engine.rails.append(self._rails)
        else:
            self._team.report_to(self._engine.loop.watch, self._channel)
            self._engine.teams.append(self._team)
            self._team.meanwhile = self._engine.advance

    def _piece_bytes(self, layout: RailLayout) -> int:
        """The piece that this machine sums fastest; its first worker measures it."""
        if not self._engine.piece_bytes:
            mine = torch.tensor([probe.piece_bytes() if layout.position == 0 else 0])
            found = self.all_gather(mine)
            self._engine.piece_bytes = int(found[layout.mates[0]])
        return self._engine.piece_bytes

    def _gather_team(self, layout: RailLayout) -> SharedMemoryTeam:
        """The workers of this machine. All members ask for memory together; all get it, or none."""
        members = self._engine.rendezvous.members
        first = [*layout.mates, *(rank for rank in range(self.size) if rank not in layout.mates)]

        def gather(mine: Handle) -> list[Handle]:
            handles = [Handle(*part.tolist()) for part in self.all_gather(torch.tensor(mine))]
            return [handles[rank] for rank in first]

        return SharedMemoryTeam(
            layout.position,
            [str(members[rank]) for rank in layout.mates],
            [members[rank].pid for rank in layout.mates],
            gather=gather,
            check=self._engine.loop.check,
        )

    def _warn(self, error: LaunchError | ConfigError, instead: str) -> None:
        """On the workers that know the cause, and on the leader; once, whatever else finds no memory."""
        if (self.rank == 0 or error.__cause__ is not None) and not self._engine.warned:
            self._engine.warned = True
            _log.warning("%s; %s", error.message, instead)

    def all_reduce_through(self, buffer: Tensor, flat: Tensor, op: Op = "sum") -> Future[Tensor]:
        """On one machine only what others sum is copied to the buffer, and only their sums from it."""
        team = self._team
        if team is None or self._rails is not None or not team.holds(buffer):
            return super().all_reduce_through(buffer, flat, op)
        parts = team.others_shares(buffer)
        for part in parts:
            buffer[part].copy_(flat[part])

        def spread(_: Tensor) -> Tensor:
            for part in parts:
                flat[part].copy_(buffer[part])
            return flat

        return self._in_memory(team, flat, buffer, op, own=flat).then(spread)

    def _in_memory(
        self, team: SharedMemoryTeam, tensor: Tensor, flat: Tensor, op: Op, own: Tensor | None = None
    ) -> Future[Tensor]:
        number, timing = team.begin(flat, op, own)

        def finish(_: float | None) -> Tensor:
            try:
                team.finish(number, self._engine.deadline_s)
            except RoundTimeout as error:
                self._engine.loop.note(error)
                raise
            return tensor

        return CallerFuture(finish, lambda: team.has_finished(number), lambda: timing)

    def fork(self) -> Group:
        """The same members on another channel."""
        text = self._text if self._engine.arrangement is None else AutoCollective.name
        channel = self._next_channel()
        return EngineGroup(self._engine, text, owns=False, ranks=self._subgroup, channel=channel)

    def close(self) -> None:
        """Disconnect; peers notice at once. A fork leaves the connections open."""
        if self._owns:
            self._engine.close()
            return
        if self._rails is not None:
            self._rails.close()
        if self._memory is not None and self._memory.team in self._engine.slots:
            self._engine.slots.remove(self._memory.team)


def _checked(collective: str, size: int) -> Collective:
    """The collective, if it supports so many members."""
    built = COLLECTIVES.build(collective, where="--collective")
    built.check(size)
    return built


def _as_bytes(tensor: Tensor) -> Tensor:
    """The same memory as bytes, to move tensors of any type."""
    return tensor.view(-1).view(torch.uint8)


def _lanes(flat: Tensor) -> list[tuple[int, int]]:
    """Ranges of a large buffer that are reduced at the same time: while one is between two steps, another
    moves.
    """
    count = min(_MOST_LANES, max(1, flat.numel() * flat.element_size() // _LANE_BYTES))
    return pieces(0, flat.numel(), count)


@lru_cache(maxsize=256)
def _schedule(collective: Collective, order: tuple[int, ...], rank: int, length: int) -> Schedule:
    """A member's steps. Collectives take consecutive members for neighbours: `order` is machine by machine,
    so that they are, also where a launcher has dealt ranks out in turn.
    """
    steps = collective.schedule(order.index(rank), len(order), length)
    return steps if order == tuple(range(len(order))) else on(order, steps)
