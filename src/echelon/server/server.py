"""One server process: it keeps shards of the parameters and carries out the policy's decisions.

One thread handles the messages one by one, so there is nothing to lock; several servers work side by side.
The first server is also the coordinator: it alone asks the policy. It sends the decisions to the other
servers as orders, which every server carries out in the same sequence. No part of a push is applied before
all servers hold all of it.

The server after server i keeps a replica of shard i. It gets every push from the server that received it,
counts as a holder of it, and carries out the same orders, so it has every applied update.

Messages are checked before they are used: a message that names an unknown table, shard or worker, or that
its sender may not send, raises Corrupt and names the sender.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from echelon.checkpoint import state_tree
from echelon.comm.wire.exchange import as_bytes
from echelon.comm.wire.mailbox import Delivery, Mailbox
from echelon.errors import EchelonError, LaunchError
from echelon.observe.events import ServerEnded
from echelon.observe.recorder import Recorder
from echelon.server import encoding
from echelon.server.coordinator import Coordinator
from echelon.server.kept_table import KeptShard, KeptTable
from echelon.server.mail import MemoryMailbox, map_shared
from echelon.server.protocol import (
    AskAwaited,
    AskToPush,
    AwaitedWorkers,
    Bye,
    CarryOut,
    FetchedState,
    FetchState,
    ForwardDone,
    ForwardPiece,
    Freed,
    HandOut,
    Invited,
    JoinTable,
    LeaveTable,
    MembershipNoted,
    MemoryOpened,
    OpenMemory,
    OpenTable,
    Order,
    PullWeights,
    PushDone,
    PushHeld,
    PushPiece,
    Released,
    Seeded,
    SeedState,
    SeedWeights,
    ServerMessage,
    ShardShared,
    ShareShard,
    TableOpened,
    ToServer,
    WeightsPiece,
    WeightsWritten,
    refused,
)
from echelon.server.shared_table import SharedShard
from echelon.sync.families.serve import Apply, Drop, Invite
from echelon.sync.families.shard import Push, ShardState

_LOOK_EVERY_S = 1.0
_BYE_S = 5.0
_FULL_S = 60.0  # how long a worker may leave its messages unread
_log = logging.getLogger(__name__)


class ParameterServer:
    """A running server. `servers` and `workers` are ranks of the view, in their order."""

    def __init__(
        self,
        *,
        rank: int,
        servers: Sequence[int],
        workers: Sequence[int],
        recorder: Recorder,
    ) -> None:
        self._mailbox: MemoryMailbox[ToServer]
        self._rank = rank
        self._servers = list(servers)
        self._index = self._servers.index(rank)
        self._workers = set(workers)
        self._recorder = recorder
        self._tables: dict[int, KeptTable] = {}
        # Memory of pushes in flight, by table, shard, worker and step.
        self._arriving: dict[tuple[int, int, int, int], Tensor] = {}
        # Memory that is shared with workers of this machine, by table and worker.
        self._shared: dict[tuple[int, int], SharedShard] = {}
        offset = time.time() - time.perf_counter()
        self._now = lambda: offset + time.perf_counter()
        self._lent: dict[int, int] = {}  # by id of a snapshot: its pieces that are not sent yet
        self._lending = threading.Lock()
        self._spent_s = {"queue_s": 0.0, "apply_s": 0.0, "hand_s": 0.0}
        self._count = dict.fromkeys(self._spent_s, 0)
        self._codecs: dict[str, None] = {}  # codecs of the pushes so far, in order
        self._pushes = self._pushed_bytes = self._dense_pushed_bytes = 0
        self._pulled_bytes = self._dense_pulled_bytes = 0

    @torch.no_grad()
    def run(self, mailbox: Mailbox[ToServer]) -> None:
        """Serve until every worker has said goodbye."""
        self._mailbox = MemoryMailbox(
            mailbox, ToServer, place=self.place, peers=sorted(self._workers), deadline_s=_FULL_S
        )
        try:
            self._serve()
        finally:
            self._mailbox.close()

    def _serve(self) -> None:
        workers = set(self._workers)
        while workers:
            delivery = self._mailbox.receive(self._patience_s())
            if delivery is not None and isinstance(delivery.message, Bye):
                workers.discard(delivery.peer)
                self._leave_all(delivery.peer)
            elif delivery is not None:
                self._handle(delivery)
            self._tick()
        self._report()
        others = [server for server in self._servers if server != self._rank]
        self._mailbox.leave(others, Bye(), _BYE_S)  # other servers may still wait for a worker's goodbye

    def _report(self) -> None:
        """Record the mean times to keep a push, apply an update and send weights, and the bytes."""
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

    # Checks --------------------------------------------------------------------------------------

    def _table(self, peer: int, message: ServerMessage, number: int) -> KeptTable:
        table = self._tables.get(number)
        if table is None:
            raise refused(peer, message, f"table {number} is not open")
        return table

    def _shard(self, peer: int, message: ServerMessage, number: int, index: int) -> KeptShard:
        shard = self._table(peer, message, number).kept.get(index)
        if shard is None:
            raise refused(peer, message, f"shard {index} of table {number} is not kept here")
        return shard

    def _coordinator(self, peer: int, message: ServerMessage, number: int) -> Coordinator:
        found = self._table(peer, message, number).coordinator
        if found is None:
            raise refused(peer, message, "it is for the coordinator, which is the first server")
        return found

    def _check_worker(self, peer: int, message: ServerMessage, number: int, worker: int) -> None:
        if worker not in self._table(peer, message, number).worker_of:
            raise refused(peer, message, f"rank {worker} is not a worker of table {number}")

    def _check_server(self, peer: int, message: ServerMessage) -> None:
        if peer not in self._servers:
            raise refused(peer, message, "only servers may send it")

    # Payloads ------------------------------------------------------------------------------------

    def place(self, peer: int, message: ToServer, length: int) -> memoryview | None:
        """The memory that a payload is received into. Runs in the loop's thread."""
        match message:
            case PushPiece():
                self._check_worker(peer, message, message.table, peer)
                self._pushed_bytes += length
                if self._tables[message.table].codec is not None:
                    self._shard(peer, message, message.table, message.shard)
                    return None  # `_decode_piece` reads it
                flat, start = self._push_memory(peer, message, peer), message.start
            case ForwardPiece():
                self._check_server(peer, message)
                self._check_worker(peer, message, message.table, message.worker)
                flat, start = self._push_memory(peer, message, message.worker), 0
            case SeedWeights():
                flat, start = self._shard(peer, message, message.table, message.shard).state.flat, 0
            case _:
                return None
        at = start * flat.element_size()
        memory = as_bytes(flat)[at : at + length]
        if len(memory) != length:
            raise refused(peer, message, f"{length} bytes at element {start} do not fit into the shard")
        return memory

    def _push_memory(self, peer: int, message: PushPiece | ForwardPiece, worker: int) -> Tensor:
        """The memory of the push that a piece belongs to."""
        key = (message.table, message.shard, worker, message.step)
        if key not in self._arriving:
            shard = self._shard(peer, message, message.table, message.shard)
            self._arriving[key] = shard.state.push_memory()
        return self._arriving[key]

    # Messages ------------------------------------------------------------------------------------

    def _handle(self, delivery: Delivery[ToServer]) -> None:
        peer, message, payload = delivery
        match message:
            case PushPiece():
                if len(payload):
                    self._decode_piece(peer, message, payload)
            case ForwardPiece() | Bye():
                pass  # ForwardDone follows; a server that leaves is not awaited
            case PushDone() | ForwardDone():
                self._take_push(peer, message)
            case OpenTable():
                self._open(peer, message)
            case OpenMemory():
                self._open_memory(peer, message)
            case ShareShard():
                self._share(peer, message)
            case SeedWeights():
                self._seed_weights(peer, message)
            case SeedState():
                self._shard(peer, message, message.table, message.shard)
                self._tables[message.table].set_optimizer_state(
                    message.shard, state_tree.unpack(bytes(payload))
                )
                self._mailbox.send(peer, Seeded(table=message.table))
            case FetchState():
                self._send_state(peer, message)
            case CarryOut():
                self._check_server(peer, message)
                self._table(peer, message, message.table)
                self._carry_out(message.table, message.orders)
            case _:
                self._coordinate(peer, message)

    def _coordinate(
        self,
        peer: int,
        message: PushHeld | AskToPush | JoinTable | LeaveTable | PullWeights | AskAwaited,
    ) -> None:
        """Handle a message for the coordinator."""
        table = message.table
        coordinator = self._coordinator(peer, message, table)
        if isinstance(message, PushHeld):
            self._check_server(peer, message)
            self._check_worker(peer, message, table, message.worker)
        else:
            self._check_worker(peer, message, table, peer)
        match message:
            case PushHeld(worker=worker, step=step, square=square, dot=dot):
                self._order(table, coordinator.held(worker, step, square, dot))
            case AskToPush():
                self._order(table, coordinator.ask(peer, message.step, message.info))
            case JoinTable():
                self._order(table, coordinator.join(peer))
                self._mailbox.send(peer, MembershipNoted(table=table))
            case LeaveTable(resting=resting):
                self._order(table, coordinator.rest(peer) if resting else coordinator.leave(peer))
                self._mailbox.send(peer, MembershipNoted(table=table))
            case PullWeights(look=look):
                self._order(table, [HandOut(peer, look)])
            case AskAwaited():
                # If it waits for no worker, a server lacks a part of what the asking worker has pushed.
                ranks = coordinator.awaited(peer) or self._servers
                self._mailbox.send(peer, AwaitedWorkers(table=table, ranks=ranks))

    # Opening -------------------------------------------------------------------------------------

    def _open(self, peer: int, message: OpenTable) -> None:
        problem = ""
        try:
            table = KeptTable(message, self._index, len(self._servers))
            if self._index == 0:
                table.coordinator = self._new_coordinator(table)
            self._tables[message.table] = table
        except EchelonError as error:
            problem = error.message
        self._mailbox.send(peer, TableOpened(table=message.table, problem=problem))

    def _new_coordinator(self, table: KeptTable) -> Coordinator:
        opening = table.opening
        shard_count = sum(bool(shard.length) for shard in table.shards)
        return Coordinator(
            table.policy.rule(opening.cluster),
            workers=opening.workers,
            holders=shard_count * (opening.replicas + 1),
            now=self._now,
            recorder=self._recorder,
            rank=self._rank,
            table=opening.table,
        )

    def _open_memory(self, peer: int, message: OpenMemory) -> None:
        if peer not in self._workers:
            raise refused(peer, message, f"rank {peer} is not a worker")
        opened = MemoryOpened()
        try:
            own = self._mailbox.open_memory()
            self._mailbox.use_memory(peer, message.memory, message.place)
            opened = MemoryOpened(memory=own, place=sorted(self._workers).index(peer))
        except LaunchError as error:
            _log.warning("%s; messages to rank %d go over TCP instead", error.message, peer)
        self._mailbox.send(peer, opened)

    def _share(self, peer: int, message: ShareShard) -> None:
        number = message.table
        self._check_worker(peer, message, number, peer)
        shard, dtype = self._shard(peer, message, number, message.shard), self._tables[number].dtype
        length = shard.state.flat.numel()
        if message.shard != self._index or message.memory.size_bytes != SharedShard.size_bytes(
            length, dtype
        ):
            raise refused(peer, message, f"shard {message.shard} is not one of {length} elements here")
        mapped = True
        try:
            self._shared[number, peer] = SharedShard(map_shared(message.memory), length, dtype)
        except LaunchError as error:
            _log.warning("%s; pushes of rank %d come over TCP instead", error.message, peer)
            mapped = False
        self._mailbox.send(peer, ShardShared(table=number, mapped=mapped))

    def _seed_weights(self, peer: int, message: SeedWeights) -> None:
        shard = self._shard(peer, message, message.table, message.shard)
        shard.state.seeded()
        if shard.shadows is not None:
            shard.shadows.begin(shard.state.flat)
        self._mailbox.send(peer, Seeded(table=message.table))

    def _send_state(self, peer: int, message: FetchState) -> None:
        self._shard(peer, message, message.table, self._index)
        packed = memoryview(state_tree.pack(self._tables[message.table].optimizer_state()))
        self._mailbox.send(peer, FetchedState(table=message.table), packed)

    # Pushes --------------------------------------------------------------------------------------

    def _decode_piece(self, peer: int, message: PushPiece, payload: memoryview) -> None:
        """Read a piece into the memory of its push, in a table with a codec."""
        begun = time.perf_counter()
        table = self._tables[message.table]
        assert table.codec is not None
        piece = table.kept[message.shard].piece_at(message.start)
        if piece is None:
            raise refused(peer, message, f"no piece begins at element {message.start}")
        flat = self._push_memory(peer, message, peer)
        if message.coded:
            self._codecs[table.opening.codec] = None
            worker, sender = table.worker_of[peer], f"rank {peer}"
            encoding.read_push(table.codec, payload, piece, flat, worker, sender)
        elif len(payload) != (piece.stop - piece.start) * table.dtype.itemsize:
            raise refused(peer, message, f"{len(payload)} bytes are not the piece at {message.start}")
        else:
            flat[piece.start : piece.stop].copy_(torch.frombuffer(payload, dtype=table.dtype))
        self._spent_s["queue_s"] += time.perf_counter() - begun

    def _take_push(self, peer: int, message: PushDone | ForwardDone) -> None:
        """Keep a push to a shard that has arrived, tell the coordinator, and forward it to the replicas."""
        first_hand = isinstance(message, PushDone)
        if isinstance(message, ForwardDone):
            self._check_server(peer, message)
            worker = message.worker
        else:
            worker = peer
        number, index, step, info = message.table, message.shard, message.step, message.info
        self._check_worker(peer, message, number, worker)
        shard = self._shard(peer, message, number, index)
        shared = None
        if isinstance(message, PushDone) and message.shared:
            shared = self._shared.get((number, worker))
            flat = None if shared is None else shared.push
        else:
            flat = self._arriving.pop((number, index, worker, step), None)
        if flat is None:
            raise refused(peer, message, f"no piece of step {step} has arrived")
        settled = None if shared is None else shared.done
        push = Push(info.kind, flat, info.used, info.settings, settled)
        with self._timed("queue_s"):
            square, dot = shard.state.push(worker, step, push)
        if isinstance(message, PushDone):
            self._pushes += 1
            self._dense_pushed_bytes += flat.numel() * flat.element_size()
            if message.shared:
                self._pushed_bytes += flat.numel() * flat.element_size()
            self._forward(message, worker, flat)
        else:
            square = dot = 0.0  # the original's norms count, not the replica's
        if self._index == 0:
            coordinator = self._coordinator(peer, message, number)
            orders = coordinator.held(worker, step, square, dot)
            if first_hand:
                orders += coordinator.done(worker, step, info)
            self._order(number, orders)
        else:
            held = PushHeld(table=number, worker=worker, step=step, square=square, dot=dot)
            self._mailbox.send(self._servers[0], held)

    def _forward(self, message: PushDone, worker: int, flat: Tensor) -> None:
        number, index, step = message.table, message.shard, message.step
        for copy in range(1, self._tables[number].opening.replicas + 1):
            peer = self._servers[(self._index + copy) % len(self._servers)]
            piece = ForwardPiece(table=number, shard=index, worker=worker, step=step)
            done = ForwardDone(table=number, shard=index, worker=worker, step=step, info=message.info)
            self._mailbox.send(peer, piece, as_bytes(flat.clone()))
            self._mailbox.send(peer, done)

    # Orders --------------------------------------------------------------------------------------

    def _order(self, table: int, orders: list[Order]) -> None:
        """Send orders to the other servers, and carry them out here."""
        if not orders:
            return
        for peer in self._servers[1:]:
            self._mailbox.send(peer, CarryOut(table=table, orders=orders))
        self._carry_out(table, orders)

    def _carry_out(self, number: int, orders: Sequence[Order]) -> None:
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
                case Freed():
                    self._release(number, order)
                case HandOut(worker, look):
                    self._send_weights(number, worker, look=look)
                case Invite(worker):
                    if self._index == 0:
                        self._mailbox.send(worker, Invited(table=number))

    def _release(self, number: int, order: Freed) -> None:
        table = self._tables[number]
        shared = self._shared.get((number, order.worker))
        written = False
        if shared is not None:
            table.kept[self._index].state.take_over(order.worker)
            written = order.pull
        if written:
            self._write_weights(number, order.worker, tell=self._index != 0)
        if self._index == 0:
            released = Released(
                table=number,
                fresh=order.pull,
                ask=order.ask,
                version=order.version,
                held_s=order.held_s,
                written=written,
            )
            self._mailbox.send(order.worker, released)
        if written:
            return
        if not order.pull:
            table.alone.add(order.worker)
        elif table.sends_changes and order.worker not in table.alone:
            self._send_changes(number, order.worker)
        else:
            self._send_weights(number, order.worker)

    def _send_changes(self, number: int, worker: int) -> None:
        """Send, coded, how the weights differ from those that a worker has."""
        table = self._tables[number]
        begun = time.perf_counter()
        for index, shard in table.kept.items():
            if shard.shadows is None:
                continue
            state = shard.state
            # A policy that amends gradients keeps what is read here as the worker's weights.
            weights = state.read(worker) if table.policy.amends else state.flat
            place = table.worker_of[worker]
            for piece in reversed(shard.pieces):
                change = shard.shadows.change(place, piece, weights, state.version)
                if index != self._index:
                    continue
                coded = change is not None
                if change is None:
                    change = weights[piece.start : piece.stop].clone()
                message = WeightsPiece(
                    table=number, shard=index, start=piece.start, version=state.version, coded=coded
                )
                memory = as_bytes(change)
                self._mailbox.send(worker, message, memory)
                self._pulled_bytes += len(memory)
                self._dense_pulled_bytes += (piece.stop - piece.start) * table.dtype.itemsize
            if table.policy.amends:
                weights.copy_(shard.shadows.of(place))
        self._spent_s["hand_s"] += time.perf_counter() - begun
        self._count["hand_s"] += 1

    def _send_weights(self, number: int, worker: int, *, look: bool = False) -> None:
        """Send the weights of this server's own shard, first layers first; replicas only note it."""
        table = self._tables[number]
        if (number, worker) in self._shared:
            self._write_weights(number, worker)
            return
        look = look and table.sends_changes
        with self._timed("hand_s"):
            snapshots = {
                index: shard.state.flat.clone() if look else shard.state.snapshot(worker)
                for index, shard in table.kept.items()
            }
            for index, shard in table.kept.items():
                if shard.shadows is not None and not look:
                    shard.shadows.of(table.worker_of[worker]).copy_(snapshots[index])
        if not look:
            table.alone.discard(worker)
        if self._index not in snapshots:
            return
        shard, snapshot = table.kept[self._index], snapshots[self._index]
        memory, version = as_bytes(snapshot), shard.state.version
        self._lend(shard.state, snapshot, len(shard.pieces))
        sent = partial(self._sent, shard.state, snapshot)
        item_bytes = table.dtype.itemsize
        for piece in reversed(shard.pieces):
            part = memory[piece.start * item_bytes : piece.stop * item_bytes]
            message = WeightsPiece(table=number, shard=self._index, start=piece.start, version=version)
            self._mailbox.send(worker, message, part, sent)
            self._pulled_bytes += len(part)
            self._dense_pulled_bytes += len(part)

    def _write_weights(self, number: int, worker: int, *, tell: bool = True) -> None:
        """Write this server's shard to the memory that it shares with a worker; replicas only note it."""
        table, shared = self._tables[number], self._shared[number, worker]
        state = table.kept[self._index].state
        with self._timed("hand_s"):
            for shard in table.kept.values():
                shard.state.read_into(worker, shared.weights if shard.index == self._index else None)
        table.alone.discard(worker)
        size_bytes = shared.weights.numel() * shared.weights.element_size()
        self._pulled_bytes += size_bytes
        self._dense_pulled_bytes += size_bytes
        if tell:
            self._mailbox.send(
                worker, WeightsWritten(table=number, shard=self._index, version=state.version)
            )

    def _lend(self, state: ShardState, snapshot: Tensor, pieces: int) -> None:
        with self._lending:
            self._lent[id(snapshot)] = self._lent.get(id(snapshot), 0) + pieces
            state.lent(snapshot, back=False)

    def _sent(self, state: ShardState, snapshot: Tensor) -> None:
        """The kernel has a piece of a snapshot. Runs in the loop's thread."""
        with self._lending:
            self._lent[id(snapshot)] -= 1
            if not self._lent[id(snapshot)]:
                del self._lent[id(snapshot)]
                state.lent(snapshot, back=True)

    # The coordinator -----------------------------------------------------------------------------

    def _leave_all(self, worker: int) -> None:
        for number, table in self._tables.items():
            if table.coordinator is not None:
                self._order(number, table.coordinator.leave(worker))

    def _tick(self) -> None:
        for number, table in self._tables.items():
            if table.coordinator is not None:
                self._order(number, table.coordinator.tick())
