"""One server process: it keeps shards of the parameters and applies what the policy decides.

Messages come in one by one and are handled by one thread, so there is nothing to lock; several servers work
side by side. The first server is also the coordinator: it alone asks the policy, and tells the others in
orders, which every server carries out in the same sequence. Nothing of a push is applied before all servers
have all of it.

A replica of shard i is kept by the server after i. It is sent every push by the server that got it, counts
as a holder of it, and carries out the same orders, so it has every applied update.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from echelon.checkpoint import state_tree
from echelon.comm.wire.exchange import as_bytes
from echelon.comm.wire.mailbox import Mailbox, Message, MessageHead
from echelon.errors import EchelonError, PeerLost
from echelon.observe.events import ServerEnded
from echelon.observe.recorder import Recorder
from echelon.server import encoding as coding
from echelon.server import optimizer_spec as spec
from echelon.server import shards
from echelon.server.coordinator import Coordinator, Freed, HandOut, Order
from echelon.server.protocol import (
    ASKING,
    CODED,
    FRESH,
    LOOK,
    RESTING,
    Done,
    Kind,
    Opening,
    Released,
    decode,
    encode,
    head,
)
from echelon.sync.families.serve import Apply, Drop, Invite, ServePolicy, WeightedPush
from echelon.sync.families.shard import Push, ShardState
from echelon.sync.policy import POLICIES, ClusterInfo

_SPARE_PUSHES = 4
_LOOK_EVERY_S = 1.0
_FAREWELL_S = 5.0


@dataclass(slots=True)
class _Shard:
    """A shard that this server keeps, its own or another's replica."""

    index: int
    state: ShardState
    optimizer: torch.optim.Optimizer
    pieces: tuple[shards.ShardPiece, ...]
    shadows: coding.Shadows | None = None

    def piece_at(self, start: int) -> shards.ShardPiece:
        """The piece that begins there."""
        return next(piece for piece in self.pieces if piece.start == start)


class _Table:
    """One optimizer's parameters, as far as this server keeps them."""

    def __init__(self, opening: Opening, number: int, server: int, servers: int) -> None:
        policy = POLICIES.build(opening.policy).resolved()
        assert isinstance(policy, ServePolicy)
        self.opening = opening
        self.policy = policy
        self.dtype: torch.dtype = getattr(torch, opening.dtype)
        lengths = [torch.Size(shape).numel() for shape in opening.shapes]
        self.layout = shards.shard(lengths, servers, item_bytes=self.dtype.itemsize, whole=opening.whole)
        self.pieces = shards.pieces(self.layout, item_bytes=self.dtype.itemsize)
        self.coding = coding.open_coding(opening.codec, self.dtype, number, opening.shapes)
        # Workers that take steps of their own in between are handed weights as they are.
        steady = policy.push_every == policy.pull_every == 1 and policy.pushes == "gradient"
        self.changes = self.coding is not None and steady
        self.worker_of = {rank: worker for worker, rank in enumerate(opening.workers)}
        self.alone: set[int] = set()  # ranks of those that have weights of their own for now
        held = [(server - copy) % servers for copy in range(opening.replicas + 1)]
        self.own = server
        self.kept = {index: self._keep(index) for index in held if self.layout[index].length}
        self.coordinator: Coordinator | None = None

    def _keep(self, index: int) -> _Shard:
        parts = self.layout[index].parts
        flat = torch.zeros(self.layout[index].length, dtype=self.dtype)
        views = [self._view(flat, part) for part in parts]
        groups = [self.opening.groups[part.parameter] for part in parts]
        optimizer = spec.build(self.opening.spec, views, groups)
        state = ShardState(
            self.policy,
            flat,
            views,
            optimizer.step,
            spare=_SPARE_PUSHES,
            configure=partial(spec.update, optimizer),
        )
        mine = tuple(piece for piece in self.pieces if piece.shard == index)
        return _Shard(index, state, optimizer, mine, self._shadows(index, flat))

    def _shadows(self, index: int, flat: Tensor) -> coding.Shadows | None:
        """Those who hand out a shard's changes need them, and who amends gradients by what workers had."""
        if self.coding is None or not self.changes or not (index == self.own or self.policy.amends):
            return None
        return coding.Shadows(self.coding, flat, len(self.opening.workers))

    def _view(self, flat: Tensor, part: shards.ParameterSlice) -> Tensor:
        view = flat[part.at : part.at + part.length]
        shape = self.opening.shapes[part.parameter]
        whole = part.length == torch.Size(shape).numel()
        return (view.view(shape) if whole else view).requires_grad_(True)

    def state(self) -> dict[str, Any]:
        """The optimizer's state of this server's own shard, part by part."""
        kept = self.kept[self.own]
        return {"parts": [dict(kept.optimizer.state[p]) for p in kept.state.parameters]}

    def set_state(self, index: int, state: dict[str, Any]) -> None:
        """Take over what `state` of another run said."""
        kept = self.kept[index]
        for p, saved in zip(kept.state.parameters, state["parts"], strict=True):
            if saved:
                kept.optimizer.state[p] = saved


class ParameterServer:
    """A server at work. `servers` and `workers` are ranks of the view, in their order."""

    def __init__(
        self,
        *,
        rank: int,
        servers: Sequence[int],
        workers: Sequence[int],
        recorder: Recorder,
    ) -> None:
        self._mailbox: Mailbox
        self._rank = rank
        self._servers = list(servers)
        self._index = self._servers.index(rank)
        self._workers = set(workers)
        self._recorder = recorder
        self._tables: dict[int, _Table] = {}
        self._arriving: dict[tuple[int, int, int, int], Tensor] = {}
        offset = time.time() - time.perf_counter()
        self._now = lambda: offset + time.perf_counter()
        self._lent: dict[int, int] = {}  # pieces of snapshots, by id, that are not sent yet
        self._lending = threading.Lock()
        self._spent_s = {"queue_s": 0.0, "apply_s": 0.0, "hand_s": 0.0}
        self._count = dict.fromkeys(self._spent_s, 0)
        self._codecs: dict[str, None] = {}  # that pushes came in
        self._pushes = self._pushed_bytes = self._dense_pushed_bytes = 0
        self._pulled_bytes = self._dense_pulled_bytes = 0

    @torch.no_grad()
    def run(self, mailbox: Mailbox) -> None:
        """Serve until every worker has said goodbye."""
        self._mailbox = mailbox
        leaving = set(self._workers)
        while leaving:
            message = self._mailbox.receive(self._patience_s())
            if message is not None and message.head.kind == Kind.BYE:
                leaving.discard(message.peer)
                self._leave_all(message.peer)
            elif message is not None:
                self._handle(message)
            self._tick()
        self._report()
        others = [server for server in self._servers if server != self._rank]
        self._mailbox.leave(others, head(Kind.BYE), _FAREWELL_S)  # some workers' may be on its way to them

    def _report(self) -> None:
        """Record what keeping a push, applying an update and handing out weights took, and the bytes."""
        mean_s = {name: spent_s / max(1, self._count[name]) for name, spent_s in self._spent_s.items()}
        self._recorder.emit(
            ServerEnded(
                t=time.time(),
                rank=self._rank,
                pushes=self._pushes,
                codec=", ".join(self._codecs) or "none",
                pushed_bytes=self._pushed_bytes,
                dense_pushed_bytes=self._dense_pushed_bytes,
                pulled_bytes=self._pulled_bytes,
                dense_pulled_bytes=self._dense_pulled_bytes,
                **mean_s,
            )
        )

    @contextmanager
    def _timed(self, what: str) -> Iterator[None]:
        begun = time.perf_counter()
        yield
        self._spent_s[what] += time.perf_counter() - begun
        self._count[what] += 1

    def _patience_s(self) -> float:
        wakes = [
            table.coordinator.next_wake_s
            for table in self._tables.values()
            if table.coordinator is not None
        ]
        return min([_LOOK_EVERY_S, *(wake for wake in wakes if wake is not None)])

    def place(self, peer: int, message: MessageHead, length: int) -> memoryview | None:
        """Where a piece goes: straight into the memory of its push. Runs in the loop's thread."""
        if message.kind == Kind.PUSH:
            self._pushed_bytes += length
            if self._tables[message.table].coding is not None:
                return None  # coded or not, one after the other
            flat, at = self._arriving_in(peer, message), message.start
        elif message.kind == Kind.FORWARD:
            flat, at = self._arriving_in(message.start, message), 0
        else:
            return None
        item_bytes = flat.element_size()
        return as_bytes(flat)[at * item_bytes : at * item_bytes + length]

    def _arriving_in(self, worker: int, message: MessageHead) -> Tensor:
        key = (message.table, message.shard, worker, message.step)
        if key not in self._arriving:
            self._arriving[key] = self._tables[message.table].kept[message.shard].state.room()
        return self._arriving[key]

    def _handle(self, message: Message) -> None:
        kind, table = Kind(message.head.kind), message.head.table
        match kind:
            case Kind.PUSH | Kind.FORWARD:  # DONE or FORWARDED follows
                if len(message.payload):
                    self._decode(message)
            case Kind.OPEN:
                self._open(message)
            case Kind.SEED:
                self._seed(message)
            case Kind.DONE:
                self._take(message, message.peer, decode(message.payload, Done))
            case Kind.FORWARDED:
                self._take(message, message.head.start, decode(message.payload, Done))
            case Kind.HAVE:
                square, dot = decode(message.payload, tuple[float, float])
                step, worker = message.head.step, message.head.start
                self._give(table, self._coordinator(table).have(worker, step, square, dot))
            case Kind.ORDERS:
                self._obey(table, [_read_order(told) for told in decode(message.payload, list[list[Any]])])
            case Kind.ASK:
                done = decode(message.payload, Done)
                self._give(table, self._coordinator(table).ask(message.peer, message.head.step, done))
            case Kind.JOIN:
                self._give(table, self._coordinator(table).join(message.peer))
                self._mailbox.send(message.peer, head(Kind.NOTED, table))
            case Kind.LEAVE:
                coordinator = self._coordinator(table)
                pauses = coordinator.rest if message.head.flags & RESTING else coordinator.leave
                self._give(table, pauses(message.peer))
                self._mailbox.send(message.peer, head(Kind.NOTED, table))
            case Kind.PULL:
                self._give(table, [HandOut(message.peer, bool(message.head.flags & LOOK))])
            case Kind.STATE:
                packed = memoryview(state_tree.pack(self._tables[table].state()))
                self._mailbox.send(message.peer, head(Kind.STATES, table, shard=self._index), packed)
            case Kind.WHO:
                # If it is nobody, then a part of what the asker has pushed is not with all servers.
                awaited = self._coordinator(table).awaited(message.peer) or self._servers
                told = memoryview(encode(awaited))
                self._mailbox.send(message.peer, head(Kind.AWAITED, table), told)
            case _:
                raise PeerLost(f"rank {message.peer} sent a {kind.name} to a server", ranks=(message.peer,))

    # Opening -------------------------------------------------------------------------------------

    def _open(self, message: Message) -> None:
        opening = decode(message.payload, Opening)
        problem = ""
        try:
            table = _Table(opening, message.head.table, self._index, len(self._servers))
            if self._index == 0:
                table.coordinator = self._coordinate(table, message.head.table)
            self._tables[message.head.table] = table
        except EchelonError as error:
            problem = error.message
        answer = memoryview(problem.encode() or b"\0")
        self._mailbox.send(message.peer, head(Kind.OPENED, message.head.table, shard=self._index), answer)

    def _coordinate(self, table: _Table, number: int) -> Coordinator:
        opening = table.opening
        facts = {name: _tuples(value) for name, value in opening.cluster.items()}
        kept = sum(bool(part.length) for part in table.layout)
        return Coordinator(
            table.policy.rule(ClusterInfo(**facts)),
            workers=opening.workers,
            holders=kept * (opening.replicas + 1),
            now=self._now,
            recorder=self._recorder,
            rank=self._rank,
            table=number,
        )

    def _seed(self, message: Message) -> None:
        """The weights of a shard, or the state of its optimizer."""
        table = self._tables[message.head.table]
        if message.head.flags:
            table.set_state(message.head.shard, state_tree.unpack(bytes(message.payload)))
        else:
            given = torch.frombuffer(bytearray(message.payload), dtype=table.dtype)
            shard = table.kept[message.head.shard]
            shard.state.seed(given)
            if shard.shadows is not None:
                shard.shadows.begin(given)
        self._mailbox.send(message.peer, head(Kind.SEEDED, message.head.table))

    def _coordinator(self, table: int) -> Coordinator:
        found = self._tables[table].coordinator
        assert found is not None
        return found

    # Pushes --------------------------------------------------------------------------------------

    def _decode(self, message: Message) -> None:
        """A piece of a table that has a codec: to the memory of its push."""
        begun = time.perf_counter()
        table = self._tables[message.head.table]
        assert table.coding is not None
        piece = table.kept[message.head.shard].piece_at(message.head.start)
        flat = self._arriving_in(message.peer, message.head)
        if message.head.flags & CODED:
            self._codecs[table.opening.codec] = None
            worker, sender = table.worker_of[message.peer], f"rank {message.peer}"
            coding.read_push(table.coding, message.payload, piece, flat, worker, sender)
        else:
            flat[piece.start : piece.stop].copy_(torch.frombuffer(message.payload, dtype=table.dtype))
        self._spent_s["queue_s"] += time.perf_counter() - begun

    def _take(self, message: Message, worker: int, done: Done) -> None:
        """All of a push to a shard is here: keep it, tell the coordinator, send it to the replica."""
        number, index, step = message.head.table, message.head.shard, message.head.step
        table = self._tables[number]
        shard = table.kept[index]
        key = (number, index, worker, step)
        flat = self._arriving.pop(key)
        used = list(map(bool, done.used))
        push = Push(done.kind, flat, used, done.settings)  # type: ignore[arg-type]
        with self._timed("queue_s"):
            square, dot = shard.state.push(worker, step, push)
        if message.head.kind == Kind.FORWARDED:
            square = dot = 0.0  # those of a replica are its original's
        if message.head.kind == Kind.DONE:
            self._pushes += 1
            self._dense_pushed_bytes += flat.numel() * flat.element_size()
            if table.opening.replicas:
                self._forward(message, flat)
        if self._index == 0:
            coordinator = self._coordinator(number)
            orders = coordinator.have(worker, step, square, dot)
            if message.head.kind == Kind.DONE:
                orders += coordinator.done(worker, step, done)
            self._give(number, orders)
            return
        told = memoryview(encode((square, dot)))
        self._mailbox.send(
            self._servers[0], head(Kind.HAVE, number, shard=index, step=step, start=worker), told
        )

    def _forward(self, message: Message, flat: Tensor) -> None:
        number, index, step = message.head.table, message.head.shard, message.head.step
        replicas = self._tables[number].opening.replicas
        for copy in range(1, replicas + 1):
            peer = self._servers[(self._index + copy) % len(self._servers)]
            fields = {"shard": index, "step": step, "start": message.peer}
            self._mailbox.send(peer, head(Kind.FORWARD, number, **fields), as_bytes(flat.clone()))
            self._mailbox.send(peer, head(Kind.FORWARDED, number, **fields), message.payload)

    # Orders --------------------------------------------------------------------------------------

    def _give(self, table: int, orders: list[Order]) -> None:
        """Tell the other servers, and do it here."""
        if not orders:
            return
        told = memoryview(encode([_write_order(order) for order in orders]))
        for peer in self._servers[1:]:
            self._mailbox.send(peer, head(Kind.ORDERS, table), told)
        self._obey(table, orders)

    def _obey(self, number: int, orders: Sequence[Order]) -> None:
        table = self._tables[number]
        for order in orders:
            match order:
                case Apply(parts):
                    with self._timed("apply_s"):
                        for shard in table.kept.values():
                            shard.state.apply(parts)
                case Drop(worker, step):
                    for shard in table.kept.values():
                        shard.state.drop(worker, step)
                case Freed(worker, pull, ask, version, held_s):
                    if self._index == 0:
                        flags = FRESH * pull | ASKING * ask
                        told = memoryview(encode(Released(version=version, held_s=held_s)))
                        self._mailbox.send(worker, head(Kind.RELEASE, number, flags=flags), told)
                    if not pull:
                        table.alone.add(worker)
                    elif table.changes and worker not in table.alone:
                        self._hand_changes(number, worker)
                    else:
                        self._hand_out(number, worker)
                case HandOut(worker, look):
                    self._hand_out(number, worker, look=look)
                case Invite(worker):
                    if self._index == 0:
                        self._mailbox.send(worker, head(Kind.INVITE, number))

    def _hand_changes(self, number: int, worker: int) -> None:
        """Send how the weights differ from what a worker has, coded."""
        table = self._tables[number]
        begun = time.perf_counter()
        for index, shard in table.kept.items():
            if shard.shadows is None:
                continue
            state = shard.state
            # Who amends remembers what it reads here, as what the worker has.
            weights = state.read(worker) if table.policy.amends else state.flat
            place = table.worker_of[worker]
            for piece in reversed(shard.pieces):
                change = shard.shadows.change(place, piece, weights, state.version)
                if index != self._index:
                    continue
                fields = {"shard": index, "step": state.version, "start": piece.start}
                if change is None:
                    change = weights[piece.start : piece.stop].clone()
                    what = head(Kind.WEIGHTS, number, **fields)
                else:
                    what = head(Kind.WEIGHTS, number, flags=CODED, **fields)
                memory = as_bytes(change)
                self._mailbox.send(worker, what, memory)
                self._pulled_bytes += len(memory)
                self._dense_pulled_bytes += (piece.stop - piece.start) * table.dtype.itemsize
            if table.policy.amends:
                weights.copy_(shard.shadows.of(place))
        self._spent_s["hand_s"] += time.perf_counter() - begun
        self._count["hand_s"] += 1

    def _hand_out(self, number: int, worker: int, *, look: bool = False) -> None:
        """Send the weights of this server's own shard, the first layers first; replicas take note of it."""
        table = self._tables[number]
        look = look and table.changes
        with self._timed("hand_s"):
            handed = {
                index: shard.state.flat.clone() if look else shard.state.snapshot(worker)
                for index, shard in table.kept.items()
            }
            for index, shard in table.kept.items():
                if shard.shadows is not None and not look:
                    shard.shadows.of(table.worker_of[worker]).copy_(handed[index])
        if not look:
            table.alone.discard(worker)
        if self._index not in handed:
            return
        shard, memory = table.kept[self._index], as_bytes(handed[self._index])
        version = shard.state.version
        snapshot = handed[self._index]
        self._lend(shard.state, snapshot, len(shard.pieces))
        sent = partial(self._sent, shard.state, snapshot)
        item_bytes = table.dtype.itemsize
        for piece in reversed(shard.pieces):
            part = memory[piece.start * item_bytes : piece.stop * item_bytes]
            what = head(Kind.WEIGHTS, number, shard=self._index, step=version, start=piece.start)
            self._mailbox.send(worker, what, part, sent)
            self._pulled_bytes += len(part)
            self._dense_pulled_bytes += len(part)

    def _lend(self, state: ShardState, snapshot: Tensor, pieces: int) -> None:
        with self._lending:
            self._lent[id(snapshot)] = self._lent.get(id(snapshot), 0) + pieces
            state.lent(snapshot, back=False)

    def _sent(self, state: ShardState, snapshot: Tensor) -> None:
        """A piece of a snapshot is with the kernel. Runs in the loop's thread."""
        with self._lending:
            self._lent[id(snapshot)] -= 1
            if not self._lent[id(snapshot)]:
                del self._lent[id(snapshot)]
                state.lent(snapshot, back=True)

    def _leave_all(self, worker: int) -> None:
        for number, table in self._tables.items():
            if table.coordinator is not None:
                self._give(number, table.coordinator.leave(worker))

    def _tick(self) -> None:
        for number, table in self._tables.items():
            if table.coordinator is not None:
                self._give(number, table.coordinator.tick())


def _write_order(order: Order) -> list[Any]:
    match order:
        case Apply(parts):
            return ["apply", [[p.worker, p.step, p.weight] for p in parts]]
        case Drop(worker, step, reason):
            return ["drop", worker, step, reason]
        case Freed(worker, pull, ask, version, held_s):
            return ["release", worker, pull, ask, version, held_s]
        case HandOut(worker, look):
            return ["hand", worker, look]
        case Invite(worker):
            return ["invite", worker]


def _read_order(told: list[Any]) -> Order:
    match told:
        case ["apply", parts]:
            return Apply(tuple(WeightedPush(*part) for part in parts))
        case ["drop", worker, step, reason]:
            return Drop(worker, step, reason)
        case ["release", worker, pull, ask, version, held_s]:
            return Freed(worker, pull, ask, version, held_s)
        case ["hand", worker, look]:
            return HandOut(worker, look)
        case _:
            return Invite(told[1])


def _tuples(value: Any) -> Any:
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value
