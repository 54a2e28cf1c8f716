"""Workers synchronize through a parameter server: the policy decides when a step pushes and pulls.

The servers keep every optimizer's parameters as a table. A worker takes part during a pass over the data,
and not between passes, when all workers have the server's weights.

With a codec, gradients and changes of weights are sent in fewer bytes during a pass. Workers then compute
on approximately the server's weights. Between passes they have exactly the server's weights.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from echelon.codec.codec import CODECS
from echelon.codec.fitting import same_codec, served_codec
from echelon.comm.group import Group
from echelon.reduce.encoded.states import Saved, handed_over
from echelon.reduce.round_seen import RoundObserver
from echelon.server.channel import ServerChannel
from echelon.server.client import ServerClient
from echelon.sync.families.serve import ServePolicy
from echelon.sync.policy import ClusterInfo
from echelon.train.encoding import check_momentum
from echelon.train.families.reduce import refuse_compiled
from echelon.train.families.synchronizer import (
    Explain,
    IndependentSynchronizer,
    ModelOptions,
    Overlap,
    replace_step,
)

_log = logging.getLogger(__name__)


class ServeSynchronizer(IndependentSynchronizer):
    """One worker's optimizers and their clients of the parameter server."""

    claims = True

    def __init__(
        self,
        group: Group,
        observer: RoundObserver,
        policy: ServePolicy,
        text: str,
        cluster: ClusterInfo,
        *,
        replicas: int,
        explain: Explain,
        codec: str = "none",
        after_step: Callable[[Optimizer], None] = lambda optimizer: None,
        members: Sequence[int] = (),
    ) -> None:
        """`members` are the ranks whose gradients this worker pushes, if it pushes for a group."""
        super().__init__(group, policy.name, explain)
        self._observer = observer
        self._policy = policy
        self._text = text
        self._cluster = cluster
        self._replicas = replicas
        served_codec(codec)  # refuses a wrong codec before anything is opened
        self._codec = codec
        self._names: dict[int, str] = {}  # of parameters by id
        self._after_step = after_step
        self._members = members
        self._channel = ServerChannel.open(group)
        self._undo: list[Callable[[], None]] = []
        self._undo_borrow: list[Callable[[], None]] = []
        self._resting: list[ServerClient] = []
        self._clients: list[ServerClient] = []
        # By client: for each pass that is open, whether it was present before, and its steps before.
        self._passes: dict[int, list[tuple[bool, int]]] = {}
        self._new: list[tuple[Optimizer, Overlap, Callable[[], None], Callable[[], None]]] = []

    def add(self, model: nn.Module, rules: ModelOptions) -> None:
        """Register a model; a compiled module cannot have deferred parameters."""
        if rules.overlap == "step":
            refuse_compiled(model)
        super().add(model, rules)
        self.know(model)

    def know(self, model: nn.Module) -> None:
        """Note the names of a model's parameters, for errors."""
        self._names.update((id(p), name) for name, p in model.named_parameters())

    def adopt(
        self, optimizer: Optimizer, overlap: Overlap, before: Callable[[], None], after: Callable[[], None]
    ) -> None:
        """Let the servers take this optimizer's steps; `begin` opens its table."""
        check_momentum(CODECS.build(self._codec), optimizer)
        self._new.append((optimizer, overlap, before, after))

    def begin(self) -> None:
        """Open the tables of the new optimizers."""
        for optimizer, overlap, before, after in self._new:
            advice = self._policy.advice(self._checked(optimizer))
            if advice:
                self._explain("learning rate", advice, f"sync {self._name}: {advice}")
            client = ServerClient(
                self._channel,
                optimizer,
                self._policy,
                self._observer,
                defers=overlap == "step",
                codec=self._codec,
                worker=self._group.rank,
                name_of=self._name_of,
                members=self._members,
            )
            self._clients.append(client)
            self._explain_codec(client)
            self._open(client, optimizer)
            self._undo.append(replace_step(optimizer, self._step_of(client, before, after)))
        self._new = []

    def _name_of(self, parameter: Tensor) -> str:
        return self._names.get(id(parameter), "")

    def _explain_codec(self, client: ServerClient) -> None:
        """Say why a codec that was asked for is not used."""
        if served_codec(self._codec) is None:
            return
        kinds = {p.dtype for p in client.parameters}
        why = ""
        if kinds != {torch.float32}:
            names = ", ".join(str(kind).removeprefix("torch.") for kind in kinds)
            why = f"parameters of type {names} are sent as they are: codecs write float32"
        elif self._policy.pushes == "weights":
            why = f"sync {self._name} pushes weights, which are sent as they are: codecs write gradients"
        if why:
            self._explain("codec", why, f"codec {self._codec} is not used: {why}")

    def _open(self, client: ServerClient, optimizer: Optimizer) -> None:
        cluster = self._checked(optimizer)
        if self._group.rank == 0:
            client.open(self._text, cluster, self._group.ranks, replicas=self._replicas)
        self._group.barrier()
        client.begin()

    def _checked(self, optimizer: Optimizer) -> ClusterInfo:
        """The policy's view of the cluster with this optimizer; refuses one that the policy cannot use."""
        lr = optimizer.param_groups[0].get("lr")
        cluster = replace(self._cluster, lr=None if lr is None else float(lr))
        self._policy.check(cluster)
        return cluster

    def _step_of(
        self, client: ServerClient, before: Callable[[], None], after: Callable[[], None]
    ) -> Callable[[Callable[[], None]], None]:
        def step(own_step: Callable[[], None]) -> None:
            client.step(own_step)
            self._after_step(client.optimizer)
            before()
            after()

        return step

    def push_late(self) -> None:
        """Push gradients in `step()`, not during backward: they are final only then."""
        for client in self._clients:
            client.pushes.early = False

    def claim(self, ticket: Callable[[], int]) -> int:
        """Draw after the policy has released this worker, so that a round uses one batch."""
        for client in self._clients:
            client.await_answer()
        return ticket()

    def keep(self, active: bool) -> None:
        """With `active`, backward pushes nothing: gradients stay on this worker for now."""
        for client in self._clients:
            client.active = not active

    def weigh(self, weight: float, batch: int = 0) -> None:
        """Set the weight of this worker's gradients."""
        for client in self._clients:
            client.samples = weight

    def refresh(self, *, ended: bool, trains: bool) -> None:
        """A pass begins or has ended: install the server's weights, and take part in a pass that begins."""
        if ended:
            self._end_pass()
        self._group.barrier()
        for client in self._clients:
            client.follow()
            if not ended:
                self._passes.setdefault(id(client), []).append((client.present, client.steps))
                client.join()
        self._share_buffers()
        self._group.barrier()  # no worker takes a step before all take part

    def left(self) -> None:
        """The script has left a loop over a loader early."""
        self._end_pass()

    def _end_pass(self) -> None:
        """Leave the tables that were trained in this pass; keep the others as they were before it."""
        for client in self._clients:
            begun = self._passes.get(id(client))  # None if prepared in the middle of a pass
            present, steps = begun.pop() if begun else (False, 0)
            if client.steps != steps or not present:
                client.merge()
                client.leave()

    def depart(self) -> None:
        """Push what this worker has done alone; the policy waits for it no longer."""
        for client in self._clients:
            client.merge()
            client.leave()

    def settle(self) -> None:
        """Install deferred weights."""
        for client in self._clients:
            client.settle()

    def before_save(self) -> None:
        """Let the leader borrow the server's weights and states.

        Other workers may still be in a round that waits for this worker, so it rests meanwhile.
        """
        self.settle()
        self._resting = [client for client in self._clients if client.present]
        for client in self._resting:
            client.leave(rests=True)
        self._group.barrier()  # no worker pushes while the leader reads the weights
        if self._group.rank == 0:
            self._undo_borrow = [client.borrow() for client in self._clients]

    def after_save(self) -> None:
        """Give the leader its own weights back; resting workers take part again."""
        while self._undo_borrow:
            self._undo_borrow.pop()()
        for client in self._resting:
            client.join()
        self._resting = []
        self._group.barrier()

    def loaded(self) -> None:
        """Send loaded weights to the servers; reset the codecs, whose states are for other weights."""
        for client in self._clients:
            client.pushes.load_codec_state({})
            self._open(client, client.optimizer)

    def residuals(self) -> dict[str, Any]:
        """The codec's residuals and other state."""
        tables: Saved = {}
        for client in self._clients:
            tables |= client.pushes.codec_state()
        return {"codec": self._codec, "tables": tables} if tables else {}

    def restore_residuals(self, residuals: Sequence[dict[str, Any]]) -> None:
        """Load the residuals of a checkpoint's workers; with another number of workers, the sum stays."""
        saved: list[Saved] = [
            one["tables"] for one in residuals if "tables" in one and same_codec(one["codec"], self._codec)
        ]
        if saved:
            mine = handed_over(saved, self._group.size)[self._group.rank]
            lost = sum(client.pushes.load_codec_state(mine) for client in self._clients)
            if lost:
                why = f"the checkpoint has {lost} parameters in other places, or of other shapes"
                self._explain("codec residuals", why, f"{why}: their residuals are lost")
        texts = [text for one in residuals for text in one.get("codecs", [one.get("codec", "none")])]
        had = next((text for text in texts if text != "none"), "none")
        if had != "none" and not saved:
            self._explain(
                "codec residuals",
                f"the checkpoint's codec was {had}, this run's is {self._codec}, with a server",
                f"the checkpoint was written with codec {had}: its residuals are lost",
            )

    def finish(self) -> None:
        """Report values beyond the codec's range and residuals that were never sent."""
        beyond = sum(client.pushes.saturated() for client in self._clients)
        if beyond:
            text = f"{beyond} values were beyond the range of codec {self._codec}"
            self._explain("codec range", text, text)
        left = self._left_over()
        if left:
            self._explain("codec residuals", left, left)

    def _left_over(self) -> str:
        """A sentence about the residuals that the codec has not sent; empty if there are none."""
        most = max((client.pushes.left_over() for client in self._clients), default=0.0)
        if not most:
            return ""
        times = f"{most:.2g} times the norm of its last gradient"
        return f"codec {self._codec}: the residual that {self._channel.me} has not sent is {times}"

    def close(self) -> None:
        """Say goodbye to the servers; give optimizers their own `step` back."""
        left = self._left_over()
        if left:
            _log.warning("%s; it is lost", left)
        for client in self._clients:
            client.detach()
        while self._undo:
            self._undo.pop()()
        self._channel.close()
