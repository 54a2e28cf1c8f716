"""Workers agree through a parameter server: each step is a push and a pull, when the policy says so.

Every optimizer's parameters are a table on the servers. During a pass over the data a worker takes part;
between passes it does not, and all have the same weights: the server's.

With a codec, gradients and changes of weights travel in fewer bytes during a pass: workers then compute on
weights that are nearly the server's. Between passes they have them exactly.
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
from echelon.reduce.reducer import RoundObserver
from echelon.server.channel import ServerChannel
from echelon.server.client import Table
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


def open_line(group: Group) -> ServerChannel:
    """A worker's post to the servers."""
    line = ServerChannel(group.deadline_s, group.servers, dict(group.names), group.ranks[group.rank])
    line.mailbox = group.mailbox(line.place)
    return line


class ServeSynchronizer(IndependentSynchronizer):
    """One worker's tables."""

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
        """`members`: the ranks that this worker speaks for, if they are more than its own."""
        super().__init__(group, policy.name, explain)
        self._observer = observer
        self._policy = policy
        self._text = text
        self._cluster = cluster
        self._replicas = replicas
        served_codec(codec)  # refused before anything is opened
        self._codec = codec
        self._names: dict[int, str] = {}  # of parameters, by id
        self._after_step = after_step
        self._members = members
        self._line = open_line(group)
        self._undo: list[Callable[[], None]] = []
        self._back: list[Callable[[], None]] = []
        self._resting: list[Table] = []
        self._tables: list[Table] = []
        self._passes: dict[int, list[tuple[bool, int]]] = {}  # open ones: present before, steps before
        self._new: list[tuple[Optimizer, Overlap, Callable[[], None], Callable[[], None]]] = []

    def add(self, model: nn.Module, rules: ModelOptions) -> None:
        """As all who are apart; late parameters cannot be those of a compiled module."""
        if rules.overlap == "step":
            refuse_compiled(model)
        super().add(model, rules)
        self.know(model)

    def know(self, model: nn.Module) -> None:
        """Take down what its parameters are called."""
        self._names.update((id(p), name) for name, p in model.named_parameters())

    def adopt(
        self, optimizer: Optimizer, overlap: Overlap, before: Callable[[], None], after: Callable[[], None]
    ) -> None:
        """Its steps are the server's from now on; opened by `begin`, when models have their weights."""
        check_momentum(CODECS.build(self._codec), optimizer)
        self._new.append((optimizer, overlap, before, after))

    def begin(self) -> None:
        """Let the leader tell the servers what they keep."""
        for optimizer, overlap, before, after in self._new:
            self._checked(optimizer)
            table = Table(
                self._line,
                optimizer,
                self._policy,
                self._observer,
                late=overlap == "step",
                codec=self._codec,
                worker=self._group.rank,
                name_of=self._name_of,
                members=self._members,
            )
            self._tables.append(table)
            self._explain_codec(table)
            self._open(table, optimizer)
            self._undo.append(replace_step(optimizer, self._stepping(table, before, after)))
        self._new = []

    def _name_of(self, parameter: Tensor) -> str:
        return self._names.get(id(parameter), "")

    def _explain_codec(self, table: Table) -> None:
        """If a codec was asked for that has nothing to do here, say so."""
        if served_codec(self._codec) is None:
            return
        kinds = {p.dtype for p in table.parameters}
        why = ""
        if kinds != {torch.float32}:
            names = ", ".join(str(kind).removeprefix("torch.") for kind in kinds)
            why = f"parameters of type {names} are sent as they are: codecs write float32"
        elif self._policy.pushes == "weights":
            why = f"sync {self._name} pushes weights, which are sent as they are: codecs write gradients"
        if why:
            self._explain("codec", why, f"codec {self._codec} is not used: {why}")

    def _open(self, table: Table, optimizer: Optimizer) -> None:
        cluster = self._checked(optimizer)
        if self._group.rank == 0:
            table.open(self._text, cluster, self._group.ranks, replicas=self._replicas)
        self._group.barrier()
        table.begin()

    def _checked(self, optimizer: Optimizer) -> ClusterInfo:
        """What the policy may know with this optimizer, if it can work with that."""
        lr = optimizer.param_groups[0].get("lr")
        cluster = replace(self._cluster, lr=None if lr is None else float(lr))
        self._policy.check(cluster)
        return cluster

    def _stepping(
        self, table: Table, before: Callable[[], None], after: Callable[[], None]
    ) -> Callable[[Callable[[], None]], None]:
        def step(own_step: Callable[[], None]) -> None:
            table.step(own_step)
            self._after_step(table.optimizer)
            before()
            after()

        return step

    def push_late(self) -> None:
        """Gradients are final when backward is over, not before: push them in `step()`."""
        for table in self._tables:
            table.outbox.early = False

    def claim(self, ticket: Callable[[], int]) -> int:
        """Draw when the policy has let this worker go on, so that a round is of one batch."""
        for table in self._tables:
            table.await_answer()
        return ticket()

    def keep(self, active: bool) -> None:
        """Whether gradients stay on this worker for now."""
        for table in self._tables:
            table.active = not active

    def weigh(self, weight: float, batch: int = 0) -> None:
        """What this worker's gradients count beside others'."""
        for table in self._tables:
            table.samples = weight

    def refresh(self, *, ended: bool, trains: bool) -> None:
        """Take part in a pass; before and after it, have the server's weights."""
        if ended:
            self._end_pass()
        self._group.barrier()
        for table in self._tables:
            table.follow()
            if not ended:
                self._passes.setdefault(id(table), []).append((table.present, table.steps))
                table.join()
        self._share_buffers()
        self._group.barrier()  # nobody takes a step before all take part

    def left(self) -> None:
        """A loop over a loader was left in the middle."""
        self._end_pass()

    def _end_pass(self) -> None:
        """Whoever has trained in this pass takes no part from now on; others are where they were before."""
        for table in self._tables:
            begun = self._passes.get(id(table))  # none, if it was prepared in the middle of a pass
            present, steps = begun.pop() if begun else (False, 0)
            if table.steps != steps or not present:
                table.merge()
                table.leave()

    def depart(self) -> None:
        """Merge what was done alone; nobody waits for this worker from now on."""
        for table in self._tables:
            table.merge()
            table.leave()

    def settle(self) -> None:
        """Let late weights land."""
        for table in self._tables:
            table.settle()

    def before_save(self) -> None:
        """The leader takes the server's weights and states, for the moment.

        Others may be in a round that waits for this worker, on their way here: it leaves meanwhile if so.
        """
        self.settle()
        self._resting = [table for table in self._tables if table.present]
        for table in self._resting:
            table.leave(rests=True)
        self._group.barrier()  # nobody pushes while the leader looks
        if self._group.rank == 0:
            self._back = [table.borrow() for table in self._tables]

    def after_save(self) -> None:
        """The leader goes on with what it had, and all take part again who did."""
        while self._back:
            self._back.pop()()
        for table in self._resting:
            table.join()
        self._resting = []
        self._group.barrier()

    def loaded(self) -> None:
        """Tell the servers what was loaded. What codecs remember is of other weights: forget it."""
        for table in self._tables:
            table.outbox.load_codec_state({})
            self._open(table, table.optimizer)

    def residuals(self) -> dict[str, Any]:
        """What the codec has not sent yet, and all else that it remembers."""
        tables: Saved = {}
        for table in self._tables:
            tables |= table.outbox.codec_state()
        return {"codec": self._codec, "tables": tables} if tables else {}

    def restore_residuals(self, residuals: Sequence[dict[str, Any]]) -> None:
        """Take over what the workers of a checkpoint owed; another number of them, the same sum."""
        saved: list[Saved] = [
            one["tables"] for one in residuals if "tables" in one and same_codec(one["codec"], self._codec)
        ]
        if saved:
            mine = handed_over(saved, self._group.size)[self._group.rank]
            lost = sum(table.outbox.load_codec_state(mine) for table in self._tables)
            if lost:
                why = f"the checkpoint has {lost} parameters in other places, or of other shapes"
                self._explain("codec residuals", why, f"{why}: what was not sent of them yet is lost")
        texts = [text for one in residuals for text in one.get("codecs", [one.get("codec", "none")])]
        had = next((text for text in texts if text != "none"), "none")
        if had != "none" and not saved:
            self._explain(
                "codec residuals",
                f"the checkpoint's codec was {had}, this run's is {self._codec}, with a server",
                f"the checkpoint was written with codec {had}: what that had not sent yet is lost",
            )

    def finish(self) -> None:
        """Say what did not fit into the codec's range, and what it has not sent: now it may never be."""
        beyond = sum(table.outbox.saturated() for table in self._tables)
        if beyond:
            text = f"{beyond} values were beyond the range of codec {self._codec}"
            self._explain("codec range", text, text)
        left = self._left_over()
        if left:
            self._explain("codec residuals", left, left)

    def _left_over(self) -> str:
        """What is left of gradients that the codec would have sent later, in words."""
        most = max((table.outbox.left_over() for table in self._tables), default=0.0)
        if not most:
            return ""
        times = f"{most:.2g} times the norm of its last gradient"
        return f"codec {self._codec}: what {self._line.me} has not sent is {times}"

    def close(self) -> None:
        """Say goodbye to the servers; give optimizers their own step back."""
        left = self._left_over()
        if left:
            _log.warning("%s, and never will be", left)
        for table in self._tables:
            table.detach()
        while self._undo:
            self._undo.pop()()
        self._line.close()
