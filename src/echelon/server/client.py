"""A worker's side of a parameter server, for one optimizer: it connects the rule, the pushes and the pulls.

Gradients leave piece by piece while backward goes on (pushes.py). `optimizer.step()` ends the push and
waits until the policy lets the worker go on; the weights that arrive then (pulls.py) are the result of the
step. What the worker does when is decided in worker_rule.py.

With overlap="step" the worker does not wait. Parameters are deferred (reduce/deferred.py): the first use of
a parameter waits for its weights, so the pull hides behind the next forward pass.

With a codec weights arrive as coded changes (encoding.py), but `pull` always gets whole weights.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from echelon.comm.wire.mailbox import Delivery
from echelon.errors import ConfigError, GradientError
from echelon.reduce.deferred import DeferredParameter, restore
from echelon.reduce.round_seen import RoundObserver
from echelon.server import encoding, optimizer_spec
from echelon.server.channel import ServerChannel
from echelon.server.layout import ShardPiece, TableLayout
from echelon.server.opening import fetch_states, open_table, share_shards
from echelon.server.protocol import (
    AskToPush,
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
    ToWorker,
    WeightsPiece,
    WeightsWritten,
)
from echelon.server.pulls import WeightsReceiver
from echelon.server.pushes import PushSender
from echelon.server.shared_table import SharedShard
from echelon.server.worker_rule import Action, Actions, Pushed, SendPush, WorkerRule
from echelon.sync.families.serve import Kind, ServePolicy
from echelon.sync.policy import ClusterInfo

_NOTHING = memoryview(b"")
_KINDS: dict[Pushed, Kind] = {
    "gradient": "gradient",
    "sum": "gradient",
    "delta": "delta",
    "weights": "weights",
}
_IN_ERRORS: dict[Pushed, str] = {
    "gradient": "gradient",
    "sum": "sum of gradients",
    "delta": "change",
    "weights": "weight",
}


class ServerClient:
    """One optimizer's parameters, which the servers keep as table number `len(channel.clients)`."""

    def __init__(
        self,
        channel: ServerChannel,
        optimizer: Optimizer,
        policy: ServePolicy,
        observer: RoundObserver,
        *,
        defers: bool = False,
        codec: str = "none",
        worker: int = 0,
        name_of: Callable[[Tensor], str] = lambda p: "",
        members: Sequence[int] = (),
    ) -> None:
        """`worker` is this worker's number in the policy.

        `members` are the ranks of the group whose gradients these are, if it is not this worker alone.
        """
        self._channel = channel
        self._table = len(channel.clients)
        self.optimizer = optimizer
        self._observer = observer
        self._spec = optimizer_spec.describe(optimizer)
        self.parameters: list[nn.Parameter] = [p for g in optimizer.param_groups for p in g["params"]]
        self._place_of = {id(p): place for place, p in enumerate(self.parameters)}
        whole = not optimizer_spec.updates_elements(self._spec)
        self._layout = TableLayout(self.parameters, len(channel.servers), whole=whole)
        self._whole = whole
        self._codec = codec
        self._name_of = name_of
        self._members = tuple(members) or (channel.rank,)
        self._rule = WorkerRule(
            push_every=policy.push_every,
            pull_every=policy.pull_every,
            pushes=policy.pushes,
            defers=defers and not policy.alone,
        )
        shapes = [p.shape for p in self.parameters]
        table_codec = encoding.open_codec(codec, self._layout.dtype, self._table, shapes)
        self._table_codec = table_codec
        self._shared: dict[int, SharedShard] = {}  # memory that is shared with servers, by shard
        encoder = None
        if table_codec is not None:
            encoder = encoding.PushEncoder(table_codec, self._layout.pieces, worker)
        self.pushes = PushSender(self._layout, encoder, self._send_piece, early=self._rule.steady)
        self.weights = WeightsReceiver(self._layout, table_codec, worker)
        self._answer: Released | Invited | None = None
        self._deferred: set[int] = set()  # parameters whose weights are in flight
        self.present = True
        self.active = True  # whether backward pushes
        self.samples = 1.0
        self._transfer_s = self._compute_s = self._arrived_at = self._held_s = 0.0
        self._released_at = time.perf_counter()
        self._hooks = [
            p.register_post_accumulate_grad_hook(self._gradient_ready)
            for p in self.parameters
            if p.requires_grad
        ]
        channel.clients.append(self)

    @property
    def steps(self) -> int:
        """The number of steps that were taken."""
        return self._rule.steps

    # Opening -------------------------------------------------------------------------------------

    def open(self, policy: str, cluster: ClusterInfo, workers: Sequence[int], *, replicas: int = 0) -> None:
        """Called by the leader: tell the servers what they keep, and send the first weights."""
        groups = self.optimizer.param_groups
        opening = OpenTable(
            table=self._table,
            policy=policy,
            cluster=cluster,
            workers=list(workers),
            shapes=[list(p.shape) for p in self.parameters],
            dtype=str(self._layout.dtype).removeprefix("torch."),
            optimizer=self._spec,
            groups=[index for index, group in enumerate(groups) for _ in group["params"]],
            replicas=replicas,
            whole=self._whole,
            codec=self._codec,
        )
        open_table(self._channel, opening, self._layout, self.optimizer.state)

    def begin(self) -> None:
        """Called by every worker, once the servers have the weights that all workers have."""
        self._channel.open_memory()
        if self._table_codec is None:
            self._shared = share_shards(self._channel, self._table, self._layout)
            self.pushes.share(self._shared, self._await_free)
            self.weights.share(self._shared)
        self.weights.begin()
        self._released_at = time.perf_counter()

    def _await_free(self) -> None:
        """Wait until the servers need the last push in shared memory no more."""

        def unread() -> list[int]:
            return [index for index, shard in self._shared.items() if not shard.is_free]

        self._channel.wait_for_memory(lambda: not unread(), unread)

    # The step ------------------------------------------------------------------------------------

    def _gradient_ready(self, parameter: Tensor) -> None:
        """Runs in backward, as soon as autograd has accumulated a parameter's gradient."""
        self._observer.computing()
        if self.active and self.pushes.early and self._rule.sends_early:
            self.settle()
            self.pushes.ready(self._place_of[id(parameter)])

    def step(self, own_step: Callable[[], None]) -> None:
        """Take a step through the servers, or with the worker's own optimizer by `own_step`."""
        self.settle()
        self._check_parameters()
        if not self._rule.sends_early:
            # The worker's own optimizer may use the gradients, and its step cannot be undone.
            place = self.pushes.not_finite_gradient()
            if place is not None:
                raise self._not_finite(place, self.steps, "gradient")
        self.join()
        self._arrived_at = time.perf_counter()
        self._compute_s = self._arrived_at - self._released_at
        self._observer.arrived()
        self.pushes.sent_bytes = 0
        self._perform(self._rule.step(), own_step)
        if not self._rule.defers:
            self._observer.reduced(self.pushes.sent_bytes)

    def merge(self) -> None:
        """Push what this worker has done by itself and has not pushed, so that none of it is lost."""
        actions = self._rule.merge()
        if not actions:
            return
        self._arrived_at = time.perf_counter()
        self._perform(actions)
        if self._rule.steady:
            self._observer.reduced(self.pushes.sent_bytes)

    def _perform(self, actions: Actions, own_step: Callable[[], None] = lambda: None) -> None:
        """Perform the rule's actions, and those that follow from the coordinator's answers."""
        todo, answered = deque(actions), False
        while todo:
            match todo.popleft():
                case SendPush() as push:
                    self._push(push)
                case Action.ADD_TO_SUM:
                    self.pushes.add_to_sum()
                    self._rule.summed()
                case Action.STEP_ALONE:
                    own_step()
                case Action.ASK:
                    info = self._info("delta")
                    self._channel.send(
                        self._channel.coordinator,
                        AskToPush(table=self._table, step=self._rule.arrivals, info=info),
                    )
                    self.weights.expect()
                    self._rule.ask_sent()
                case Action.AWAIT_ANSWER:
                    self._channel.wait_for_answer(lambda: self._answer is not None, self._table)
                    todo.extend(self._take_answer())
                    answered = True
                case Action.INSTALL_WEIGHTS:
                    self._channel.wait_for_servers(self.weights.is_complete, self.weights.missing_shards)
                    self.weights.install()
                    self._transfer_s = self._transfer_time_s()
                case Action.DEFER_WEIGHTS:
                    self._defer()
                case Action.PULL:
                    self.pull()
        if answered:
            self._released_at = time.perf_counter()

    def _take_answer(self) -> Actions:
        answer, self._answer = self._answer, None
        if isinstance(answer, Invited):
            return self._rule.invited()
        assert answer is not None
        self._held_s = answer.held_s
        return self._rule.released(fresh=answer.fresh, ask=answer.ask)

    def _transfer_time_s(self) -> float:
        """How long the last push and pull took, without the time that the policy held the worker."""
        return max(0.0, time.perf_counter() - self._arrived_at - self._held_s)

    # Pushing -------------------------------------------------------------------------------------

    def _push(self, push: SendPush) -> None:
        match push.what:
            case "gradient":
                refused = self.pushes.push_gradients()
            case "sum":
                refused = self.pushes.push_sum(exact=push.exact)
            case "delta":
                refused = self.pushes.push(self.weights.delta())
            case "weights":
                refused = self.pushes.push([p.detach() for p in self.parameters])
        if refused is not None:
            error = self._not_finite(refused, self.steps - 1, push.what)
            self._rule.push_refused(push.what)
            raise error
        self._send_done(push)
        self.pushes.finish()
        self.weights.expect()
        self._rule.push_sent(push.what)

    def _send_piece(self, piece: ShardPiece, memory: memoryview, coded: bool) -> None:
        message = PushPiece(
            table=self._table,
            shard=piece.shard,
            step=self._rule.arrivals,
            start=piece.start,
            coded=coded,
        )
        self._channel.send(self._channel.servers[piece.shard], message, memory)

    def _send_done(self, push: SendPush) -> None:
        settings = optimizer_spec.settings(self.optimizer)
        is_used = [push.what != "gradient" or p.grad is not None for p in self.parameters]
        for index, shard in enumerate(self._layout.shards):
            if shard.length:
                info = self._info(
                    _KINDS[push.what],
                    wants_weights=push.wants_weights,
                    used=[is_used[part.parameter] for part in shard.parts],
                    settings=settings,
                )
                done = PushDone(
                    table=self._table,
                    shard=index,
                    step=self._rule.arrivals,
                    info=info,
                    shared=index in self._shared,
                )
                self._channel.send(self._channel.servers[index], done)

    def _info(self, kind: Kind, **facts: object) -> PushInfo:
        return PushInfo(
            kind=kind,
            read=self.weights.version,
            samples=self.samples,
            compute_s=self._compute_s,
            transfer_s=self._transfer_s,
            **facts,  # type: ignore[arg-type]
        )

    def _check_parameters(self) -> None:
        now = sum(len(group["params"]) for group in self.optimizer.param_groups)
        if now != len(self.parameters):
            raise ConfigError(
                f"the optimizer has {now} parameters, but the servers keep {len(self.parameters)}",
                where="optimizer.add_param_group",
                fix="give the optimizer all its parameters before prepare",
            )

    def _not_finite(self, place: int, step: int, what: Pushed) -> GradientError:
        name = self._name_of(self.parameters[place]) or f"number {place}"
        who = self._channel.me
        if len(self._members) > 1:  # the gradient is their mean: any of them may have caused it
            who = f"the group of ranks {', '.join(map(str, self._members))}"
        return GradientError(
            f"the {_IN_ERRORS[what]} of parameter {name} holds NaN or infinity in step {step} of {who}",
            ranks=self._members,
            where=self._channel.me,
            fix="lower the learning rate, clip gradients, or skip such steps; this one was not applied",
        )

    # Receiving -----------------------------------------------------------------------------------

    def receive(self, delivery: Delivery[ToWorker]) -> None:
        """Take a message for this table. `ServerChannel.request` handles the answers to requests."""
        message = delivery.message
        if isinstance(message, Released | Invited):
            self._answer = message
            if isinstance(message, Released) and message.written:
                self.weights.written(self._channel.names[delivery.peer], message, 0)
        elif isinstance(message, WeightsWritten):
            self.weights.written(self._channel.names[delivery.peer], message, message.shard)
        elif isinstance(message, WeightsPiece):
            self.weights.receive(self._channel.names[delivery.peer], message, delivery.payload)

    # Deferred weights ----------------------------------------------------------------------------

    def _defer(self) -> None:
        """Install each parameter's weights when the parameter is used."""
        self._observer.reduced(self.pushes.sent_bytes)
        self._deferred = set(range(len(self.parameters)))
        for place, p in enumerate(self.parameters):
            if type(p) is nn.Parameter:
                p.__class__ = DeferredParameter
                p._echelon_settle = lambda place=place: self._install_deferred(place)  # type: ignore[attr-defined]
            else:  # a class of the user's, which must not be replaced
                self._install_deferred(place)
        self._released_at = time.perf_counter()

    @torch.inference_mode(False)
    @torch.no_grad()
    def _install_deferred(self, place: int) -> None:
        """Wait for one parameter's weights and install them; with the last, take the answer."""
        if place not in self._deferred:
            return
        self._waited(self._channel.wait_for_answer(lambda: self.weights.has(place), self._table))
        self._deferred.discard(place)
        restore(self.parameters[place])
        self.weights.install_parameter(place)
        if not self._deferred:
            self._channel.wait_for_answer(lambda: self._answer is not None, self._table)
            self._take_answer()
            self._transfer_s = self._transfer_time_s()

    def await_answer(self) -> None:
        """If weights are in flight, wait until the policy has released this worker."""
        if self._deferred:
            self._waited(self._channel.wait_for_answer(lambda: self._answer is not None, self._table))

    def _waited(self, waited_s: float) -> None:
        self._observer.waited(waited_s)
        self._released_at += waited_s

    def settle(self) -> None:
        """Install all deferred weights."""
        for place in sorted(self._deferred):
            self._install_deferred(place)

    # Between passes ------------------------------------------------------------------------------

    def pull(self, *, look: bool = False) -> None:
        """Install the current weights; `look`: the worker returns to its own weights afterwards."""
        self.settle()
        self.weights.expect()
        self._channel.send(self._channel.coordinator, PullWeights(table=self._table, look=look))
        self._channel.wait_for_servers(self.weights.is_complete, self.weights.missing_shards)
        self.weights.install()
        self._rule.pulled()

    def follow(self) -> None:
        """Install the server's weights, unless this worker is training with weights of its own."""
        if not (self.present and self._rule.trains_on_own_weights):
            self.pull()

    @torch.no_grad()
    def borrow(self) -> Callable[[], None]:
        """Install the server's weights and states for a moment; returns a function that undoes it."""
        own = [p.detach().clone() for p in self.parameters]
        bring_back, alone = self.weights.remember(), self._rule.alone
        states: dict[Tensor, Any] = {
            p: self.optimizer.state[p] for p in self.parameters if p in self.optimizer.state
        }
        self.pull(look=True)
        self.fetch_state()

        def undo() -> None:
            bring_back()
            self._rule.alone = alone
            for p in self.parameters:
                self.optimizer.state.pop(p, None)
            self.optimizer.state.update(states)
            for p, kept in zip(self.parameters, own, strict=True):
                p.data.copy_(kept)

        return undo

    @torch.no_grad()
    def fetch_state(self) -> None:
        """Give the worker's own optimizer the state of the servers' optimizers."""
        self.optimizer.state.update(fetch_states(self._channel, self._table, self._layout))

    def join(self) -> None:
        """Take part from now on."""
        if self.present:
            return
        self.present = True
        self._tell_coordinator(JoinTable(table=self._table))
        self._released_at = time.perf_counter()

    def leave(self, *, rests: bool = False) -> None:
        """Take no part for now; `rests`: all other workers come to the same point, and then all go on."""
        if self.present:
            self.present = False
            self._tell_coordinator(LeaveTable(table=self._table, resting=rests))

    def _tell_coordinator(self, message: JoinTable | LeaveTable) -> None:
        self.settle()
        self._channel.request([(self._channel.coordinator, message, _NOTHING)], MembershipNoted)

    def detach(self) -> None:
        """Remove the hooks; deferred weights are not installed."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        for place in self._deferred:
            restore(self.parameters[place])
        self._deferred.clear()
