"""A worker's side of a parameter server: pushes while backward goes on, and takes weights in return.

Gradients leave piece by piece while backward goes on (outbox.py). `optimizer.step()` says that this is all,
and waits for the policy to let the worker go on; the weights it is given then are the result of the step.
With overlap="step" it does not wait: parameters are late (`train/late.py`), and whoever uses one waits for
that one, so the pull hides behind the next forward pass. With a codec weights come as coded changes (see
coding.py), but whoever asks for weights (`pull`) gets them as they are.

A worker that is told to go on alone takes a step with its own optimizer. What it then pushes, when its turn
comes, is how its weights have changed since it last got some.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from echelon.checkpoint import state_tree
from echelon.comm.wire.exchange import as_bytes
from echelon.comm.wire.mailbox import Delivery
from echelon.errors import ConfigError, GradientError
from echelon.reduce.deferred import DeferredParameter, restore
from echelon.reduce.reducer import RoundObserver
from echelon.server import encoding as coding
from echelon.server import optimizer_spec as spec
from echelon.server.channel import ServerChannel
from echelon.server.layout import TableLayout
from echelon.server.outbox import Outbox
from echelon.server.protocol import (
    AskToPush,
    FetchedState,
    FetchState,
    Invited,
    JoinTable,
    LeaveTable,
    MembershipNoted,
    OpenTable,
    PullWeights,
    PushDone,
    PushInfo,
    PushPiece,
    Released,
    Seeded,
    SeedState,
    SeedWeights,
    TableOpened,
    ToWorker,
    WeightsPiece,
    refused,
)
from echelon.server.shards import ShardPiece
from echelon.sync.families.serve import Kind, ServePolicy
from echelon.sync.policy import ClusterInfo


class Table:
    """One optimizer's parameters, which servers keep."""

    def __init__(
        self,
        line: ServerChannel,
        optimizer: Optimizer,
        policy: ServePolicy,
        observer: RoundObserver,
        *,
        late: bool = False,
        codec: str = "none",
        worker: int = 0,
        name_of: Callable[[Tensor], str] = lambda p: "",
        members: Sequence[int] = (),
    ) -> None:
        """`worker` is which one this is, of those whom the servers are told of.

        `members` are the ranks of the group whose gradients these are, if it is not this worker alone.
        """
        self._line = line
        self._number = len(line.tables)
        self.optimizer = optimizer
        self._policy = policy
        self._observer = observer
        self._steady = policy.push_every == policy.pull_every == 1 and policy.pushes == "gradient"
        self._late = late and self._steady and not policy.alone
        self._on_its_way: set[int] = set()
        self._spec = spec.describe(optimizer)
        self._parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self._group_of = [
            index for index, group in enumerate(optimizer.param_groups) for _ in group["params"]
        ]
        self._whole = not spec.cuts_anywhere(self._spec)
        self._layout = TableLayout(self._parameters, len(line.servers), whole=self._whole)
        self._rooms = self._layout.room()  # the weights that this worker was given
        self._codec = codec
        self._worker = worker
        self._name_of = name_of
        self._members = tuple(members) or (line.rank,)
        shapes = [p.shape for p in self._parameters]
        self._coding = coding.open_codec(codec, self._layout.dtype, self._number, shapes)
        coded = None
        if self._coding is not None:
            coded = coding.PushEncoder(self._coding, self._layout.pieces, worker)
        self.outbox = Outbox(self._layout, coded, self._send, early=self._steady)
        self.present = True
        self._place_of = {id(p): index for index, p in enumerate(self._parameters)}
        self._handles = [
            p.register_post_accumulate_grad_hook(self._ready) for p in self._parameters if p.requires_grad
        ]
        self.active = True
        self.samples = 1.0
        self.steps = 0
        self._step = 0  # as the server counts
        self._read = 0
        self._transfer_s = self._compute_s = self._arrived_at = 0.0
        self._ask = self._alone = False
        self._sum: list[Tensor] | None = None
        self._answer: Released | Invited | None = None
        self._landed: set[tuple[int, int]] = set()
        self._noted = False
        self._seeded = 0
        self._opened: dict[int, str] = {}
        self._states: dict[int, bytes] = {}
        self._released_at = time.perf_counter()
        line.tables.append(self)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Those that servers keep."""
        return list(self._parameters)

    # Opening -------------------------------------------------------------------------------------

    def open(self, policy: str, cluster: ClusterInfo, workers: Sequence[int], *, replicas: int = 0) -> None:
        """By the leader: tell the servers what they keep, and the weights to begin with."""
        opening = OpenTable(
            table=self._number,
            policy=policy,
            cluster=cluster,
            workers=list(workers),
            shapes=[list(p.shape) for p in self._parameters],
            dtype=str(self._layout.dtype).removeprefix("torch."),
            optimizer=self._spec,
            groups=self._group_of,
            replicas=replicas,
            whole=self._whole,
            codec=self._codec,
        )
        self._opened.clear()
        for server in self._line.servers:
            self._line.send(server, opening)
        self._line.until(
            lambda: len(self._opened) == len(self._line.servers),
            self._number,
            lambda: [server for server in self._line.servers if server not in self._opened],
        )
        problem = next((text for text in self._opened.values() if text), "")
        if problem:
            raise ConfigError(problem, where="--sync")
        self._seed(replicas)

    @torch.no_grad()
    def _seed(self, replicas: int) -> None:
        states = self._layout.cut_states(self.optimizer.state)
        self._seeded, sent = 0, 0
        flats = self._layout.room()
        self._layout.gather(flats, [p.detach() for p in self._parameters])
        for index, flat in enumerate(flats):
            if not flat.numel():
                continue
            for copy in range(replicas + 1):
                server = self._line.servers[(index + copy) % len(self._line.servers)]
                self._line.send(server, SeedWeights(table=self._number, shard=index), as_bytes(flat))
                sent += 1 + bool(states)
                if states:
                    packed = memoryview(state_tree.pack({"parts": states[index]}))
                    self._line.send(server, SeedState(table=self._number, shard=index), packed)
        # Or others would be handed zeros.
        self._line.until(lambda: self._seeded == sent, self._number, lambda: self._line.servers)

    @torch.no_grad()
    def begin(self) -> None:
        """By everybody, when the servers have the weights that all workers have."""
        self._layout.gather(self._rooms, [p.detach() for p in self._parameters])
        self._released_at = time.perf_counter()

    # Backward ------------------------------------------------------------------------------------

    def _ready(self, parameter: Tensor) -> None:
        self._observer.computing()
        if self.active and self.outbox.early and not self._ask:
            self.settle()
            self.outbox.ready(self._place_of[id(parameter)])

    def _send(self, piece: ShardPiece, memory: memoryview, coded: bool) -> None:
        message = PushPiece(
            table=self._number, shard=piece.shard, step=self._step, start=piece.start, coded=coded
        )
        self._line.send(self._line.servers[piece.shard], message, memory)

    def _refusal(self, place: int, step: int, what: str = "gradient") -> GradientError:
        name = self._name_of(self._parameters[place]) or f"number {place}"
        who = self._line.me
        if len(self._members) > 1:  # the gradient is their mean: whose it was is not known here
            who = f"the group of ranks {', '.join(map(str, self._members))}"
        return GradientError(
            f"the {what} of parameter {name} holds NaN or infinity in step {step} of {who}",
            ranks=self._members,
            where=self._line.me,
            fix="lower the learning rate, clip gradients, or skip such steps; this one was not applied",
        )

    def _refuse_odd(self, tensors: Sequence[Tensor], what: str) -> None:
        """With a codec, nothing that is not finite gets to a server, coded or not."""
        odd = self.outbox.first_odd(tensors)
        if odd is not None:
            self._sum = None  # or it would be refused for ever
            raise self._refusal(odd, self.steps - 1, what)

    # The step ------------------------------------------------------------------------------------

    def step(self, own_step: Callable[[], None]) -> None:
        """Take a step by the servers, or alone by the worker's own optimizer."""
        self.settle()
        self._refuse_added()
        policy = self._policy
        if not self._steady or self._ask:
            # The worker's own optimizer may use them, and what it does cannot be taken back.
            odd = self.outbox.odd_gradient()
            if odd is not None:
                raise self._refusal(odd, self.steps)
        if not self.present:
            self.join()
        self.steps += 1
        self._arrived_at = time.perf_counter()
        self._compute_s = compute_s = self._arrived_at - self._released_at
        self._observer.arrived()
        self.outbox.sent_bytes = 0
        pushes = self.steps % policy.push_every == 0
        pulls = self.steps % policy.pull_every == 0
        if self._steady:
            self._step_by_server(own_step, compute_s)
        else:
            self._step_locally(own_step, compute_s, pushes, pulls)

    def _refuse_added(self) -> None:
        now = sum(len(group["params"]) for group in self.optimizer.param_groups)
        if now != len(self._parameters):
            raise ConfigError(
                f"the optimizer has {now} parameters, but the servers keep {len(self._parameters)}",
                where="optimizer.add_param_group",
                fix="give the optimizer all its parameters before prepare",
            )

    def _step_by_server(self, own_step: Callable[[], None], compute_s: float) -> None:
        if self._ask:
            self._send_done("delta", compute_s, asks=True)
            self._await_release()
            if isinstance(self._answer, Invited):
                self._answer = None
                if self._alone:
                    own_step()
                    self._push_tensors(self._delta(), "change")
                    self._finish_push("delta", compute_s, [True] * len(self._parameters))
                else:
                    self._push_gradients()
                    self._finish_push("gradient", compute_s, self._used())
                self._await_release()
            else:
                self._step += 1  # an ask is an arrival as well
        else:
            self._push_gradients()
            self._finish_push("gradient", compute_s, self._used())
            if self._late:
                self._postpone()
                return
            self._await_release()
        self._take_answer(own_step)

    def _step_locally(
        self, own_step: Callable[[], None], compute_s: float, pushes: bool, pulls: bool
    ) -> None:
        """Steps of its own; in between, pushes of summed gradients or of weights, and pulls."""
        by_weights = self._policy.pushes == "weights"
        if not by_weights:
            self._add_up()
        own_step()
        if pushes:
            if by_weights:
                self._push_tensors([p.detach() for p in self._parameters], "weight")
                self._finish_push("weights", compute_s, [True] * len(self._parameters), pull=pulls)
            else:
                assert self._sum is not None
                self._refuse_odd(self._sum, "sum of gradients")
                self.outbox.push_sum(self._sum)
                self._finish_push("gradient", compute_s, [True] * len(self._parameters), pull=pulls)
                self._sum = None
            self._await_release()
            self._take_answer(lambda: None)
        elif pulls:
            self.pull()
        self._observer.reduced(self.outbox.sent_bytes if pushes else 0)

    @torch.no_grad()
    def _add_up(self) -> None:
        if self._sum is None:
            self._sum = [torch.zeros_like(p) for p in self._parameters]
        for total, p in zip(self._sum, self._parameters, strict=True):
            if p.grad is not None:
                total.add_(p.grad)

    def _push_gradients(self) -> None:
        odd = self.outbox.push_gradients()
        if odd is not None:
            self.steps -= 1
            raise self._refusal(odd, self.steps)

    def _push_tensors(self, tensors: Sequence[Tensor], what: str) -> None:
        """Send what is no gradient; `what` says what it is."""
        self._refuse_odd(tensors, what)
        self.outbox.push(tensors)

    @torch.no_grad()
    def _delta(self) -> list[Tensor]:
        """How the weights have changed since this worker was given some."""
        given = self._layout.spread(self._rooms)
        return [p - old for p, old in zip(self._parameters, given, strict=True)]

    def _used(self) -> list[bool]:
        return [p.grad is not None for p in self._parameters]

    def _finish_push(self, kind: Kind, compute_s: float, used: list[bool], *, pull: bool = True) -> None:
        self._send_done(kind, compute_s, used, pull=pull)
        self.outbox.finish()

    def _send_done(
        self,
        kind: Kind,
        compute_s: float,
        used: Sequence[bool] = (),
        *,
        pull: bool = True,
        asks: bool = False,
    ) -> None:
        settings = spec.settings(self.optimizer)
        for index, shard in enumerate(self._layout.shards[:1] if asks else self._layout.shards):
            if not shard.length:
                continue
            info = PushInfo(
                kind=kind,
                read=self._read,
                samples=self.samples,
                compute_s=compute_s,
                transfer_s=self._transfer_s,
                wants_weights=pull,
                used=[used[part.parameter] for part in shard.parts] if used else [],
                settings=None if asks else settings,
            )
            message = (
                AskToPush(table=self._number, step=self._step, info=info)
                if asks
                else PushDone(table=self._number, shard=index, step=self._step, info=info)
            )
            self._line.send(self._line.servers[index], message)
        self._landed.clear()
        if not asks:
            self._step += 1

    # Answers -------------------------------------------------------------------------------------

    def place(self, peer: int, message: WeightsPiece, length: int) -> memoryview | None:
        """Where handed weights go. With a codec they are taken in one by one, as they were sent."""
        if (message.shard, message.start) not in self._layout.piece_at:
            raise refused(self._line.names[peer], message, "there is no such piece")
        if self._coding is not None:
            return None
        room = self._rooms[message.shard]
        at = message.start * room.element_size()
        return as_bytes(room)[at : at + length]

    def hear(self, delivery: Delivery[ToWorker]) -> None:
        """A message for this table."""
        match message := delivery.message:
            case Released() | Invited():
                self._answer = message
            case WeightsPiece():
                if self._coding is not None:
                    self._take_in(delivery.peer, message, delivery.payload, self._coding)
                self._landed.add((message.shard, message.start))
                self._read = message.version
            case MembershipNoted():
                self._noted = True
            case Seeded():
                self._seeded += 1
            case TableOpened():
                self._opened[delivery.peer] = message.problem
            case FetchedState():
                self._states[message.shard] = bytes(delivery.payload)
            case _:
                pass  # an answer that came too late

    def _take_in(
        self, peer: int, message: WeightsPiece, payload: memoryview, how: coding.TableCodec
    ) -> None:
        """Weights as they are, or how they differ from what this worker has."""
        room = self._rooms[message.shard]
        piece = self._layout.piece_at[message.shard, message.start]
        if message.coded:
            sender = self._line.names[peer]
            coding.add_change(how, payload, piece, room, self._worker, sender)
        else:
            room[piece.start : piece.stop].copy_(torch.frombuffer(payload, dtype=self._layout.dtype))

    def _await_release(self) -> None:
        self._line.until(lambda: self._answer is not None, self._number)

    def _take_answer(self, own_step: Callable[[], None]) -> None:
        """Do as the coordinator says: take the weights that come, or a step alone."""
        assert isinstance(self._answer, Released)
        answer, self._answer = self._answer, None
        self._ask = answer.ask
        if answer.fresh:
            self._line.until(self._all_landed, self._number, self._silent)
            self._put_in_place()
            self._alone = False
            self._transfer_s = max(0.0, time.perf_counter() - self._arrived_at - answer.held_s)
        elif self._policy.pull_every == 1 and self._policy.push_every == 1:
            own_step()
            self._alone = True
        if self._steady:
            self._observer.reduced(self.outbox.sent_bytes)
        self._released_at = time.perf_counter()

    def _all_landed(self) -> bool:
        return len(self._landed) == len(self._layout.pieces)

    def _silent(self) -> list[int]:
        """The servers whose weights have not come."""
        missing = {shard for shard, _ in self._layout.piece_at.keys() - self._landed}
        return [self._line.servers[shard] for shard in sorted(missing)]

    @torch.no_grad()
    def _put_in_place(self) -> None:
        for place in range(len(self._parameters)):
            self._layout.fill(self._rooms, place)

    # Late weights --------------------------------------------------------------------------------

    def _postpone(self) -> None:
        """Let the weights land when they are used."""
        self._observer.reduced(self.outbox.sent_bytes)
        self._on_its_way = set(range(len(self._parameters)))
        for place, p in enumerate(self._parameters):
            if type(p) is nn.Parameter:
                p.__class__ = DeferredParameter
                p._echelon_settle = lambda place=place: self._land(place)  # type: ignore[attr-defined]
            else:  # somebody else's class: it stays what it is
                self._land(place)
        self._released_at = time.perf_counter()

    @torch.inference_mode(False)
    @torch.no_grad()
    def _land(self, place: int) -> None:
        """Wait for one parameter's weights, and put them in place."""
        if place not in self._on_its_way:
            return
        self._on_its_way.discard(place)
        wanted = self._layout.pieces_of(place)
        waited_s = self._line.until(lambda: wanted <= self._landed, self._number)
        self._observer.waited(waited_s)
        self._released_at += waited_s
        restore(self._parameters[place])
        self._layout.fill(self._rooms, place)
        if not self._on_its_way:
            self._line.until(lambda: self._answer is not None, self._number)
            assert isinstance(self._answer, Released)
            held_s = self._answer.held_s
            self._transfer_s = max(0.0, time.perf_counter() - self._arrived_at - held_s)
            self._answer = None

    def await_answer(self) -> None:
        """If weights are on their way, wait until the policy has let them go."""
        if self._on_its_way:
            waited_s = self._line.until(lambda: self._answer is not None, self._number)
            self._observer.waited(waited_s)
            self._released_at += waited_s

    def settle(self) -> None:
        """Let everything land."""
        for place in sorted(self._on_its_way):
            self._land(place)

    # Between passes ------------------------------------------------------------------------------

    def pull(self, *, look: bool = False) -> None:
        """Take the weights as they are now; `look`: only for a moment, and the server takes no note."""
        self.settle()
        self._landed.clear()
        self._line.send(self._line.coordinator, PullWeights(table=self._number, look=look))
        self._line.until(self._all_landed, self._number, self._silent)
        self._put_in_place()
        self._alone = False

    def merge(self) -> None:
        """Push what this worker has done by itself and not pushed yet, so that nothing of it is lost."""
        if not self._alone and self._sum is None:
            return
        self._arrived_at = time.perf_counter()
        if self._sum is None:
            kind: Kind = "delta"
            self._push_tensors(self._delta(), "change")
        else:
            kind = "gradient"
            self._push_tensors(self._sum, "sum of gradients")
        self._finish_push(kind, self._compute_s, [True] * len(self._parameters))
        self._sum = None
        self._await_release()
        self._take_answer(lambda: None)

    def follow(self) -> None:
        """Have the server's weights, unless this worker is in the middle of training with its own."""
        in_training = self.present and self.steps > 0
        if not (in_training and (self._alone or not self._steady)):
            self.pull()

    @torch.no_grad()
    def borrow(self) -> Callable[[], None]:
        """Have the server's weights and states for a moment; returns how to go back."""
        own = [p.detach().clone() for p in self._parameters]
        rooms, read, alone = [room.clone() for room in self._rooms], self._read, self._alone
        states = {p: self.optimizer.state[p] for p in self._parameters if p in self.optimizer.state}
        self.pull(look=True)
        self.fetch_state()

        def back() -> None:
            self._read, self._alone = read, alone
            for p in self._parameters:
                self.optimizer.state.pop(p, None)
            self.optimizer.state.update(states)
            for room, kept in zip(self._rooms, rooms, strict=True):
                room.copy_(kept)
            for p, kept in zip(self._parameters, own, strict=True):
                p.data.copy_(kept)

        return back

    def join(self) -> None:
        """Take part, from now on."""
        if self.present:
            return
        self.present = True
        self._note(JoinTable(table=self._number))
        self._released_at = time.perf_counter()

    def leave(self, *, rests: bool = False) -> None:
        """Take no part, for now; `rests`: all others come to where this worker is, and then all go on."""
        if self.present:
            self.present = False
            self._note(LeaveTable(table=self._number, resting=rests))

    def _note(self, message: JoinTable | LeaveTable) -> None:
        self.settle()
        self._noted = False
        self._line.send(self._line.coordinator, message)
        self._line.until(lambda: self._noted, self._number, lambda: [self._line.coordinator])

    def detach(self) -> None:
        """Leave the parameters alone."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        for place in self._on_its_way:  # what is still on its way never lands
            restore(self._parameters[place])
        self._on_its_way.clear()

    # The optimizer's state -----------------------------------------------------------------------

    @torch.no_grad()
    def fetch_state(self) -> None:
        """Give the worker's own optimizer the state that the servers' have."""
        self._states.clear()
        kept = [index for index, shard in enumerate(self._layout.shards) if shard.length]
        for index in kept:
            self._line.send(self._line.servers[index], FetchState(table=self._number))
        self._line.until(
            lambda: len(self._states) == len(kept),
            self._number,
            lambda: [self._line.servers[index] for index in kept if index not in self._states],
        )
        parts = ((index, state_tree.unpack(self._states[index])["parts"]) for index in kept)
        self.optimizer.state.update(self._layout.join_states(parts))
