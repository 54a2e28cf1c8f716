"""Workers agree through a parameter server: each step is a push and a pull, when the policy says so.

Every optimizer's parameters are a table on the servers. During a pass over the data a worker takes part;
between passes it does not, and all have the same weights: the server's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import nn
from torch.optim import Optimizer

from echelon.comm.engine import EngineGroup
from echelon.comm.post import Post
from echelon.comm.reducer import RoundObserver
from echelon.sync.policy import Crew
from echelon.sync.served import Served
from echelon.train.agreement import Apart, Explain, Overlap, Rules, replace_step
from echelon.train.in_step import refuse_compiled
from echelon.train.served.client import Line, Table


def open_line(group: EngineGroup) -> Line:
    """A worker's post to the servers."""
    names = {member.rank: str(member) for member in group.members}
    line = Line(group.deadline_s, group.servers, names, names[group.ranks[group.rank]])
    line.post = Post(group.loop, set(group.servers), place=line.place)
    return line


class ByServer(Apart):
    """One worker's tables."""

    claims = True

    def __init__(
        self,
        group: EngineGroup,
        observer: RoundObserver,
        policy: Served,
        text: str,
        crew: Crew,
        *,
        replicas: int,
        explain: Explain,
        after_step: Callable[[Optimizer], None] = lambda optimizer: None,
    ) -> None:
        super().__init__(group, policy.name, explain)
        self._observer = observer
        self._policy = policy
        self._text = text
        self._crew = crew
        self._replicas = replicas
        self._after_step = after_step
        self._engine_group = group
        self._line = open_line(group)
        self._undo: list[Callable[[], None]] = []
        self._back: list[Callable[[], None]] = []
        self._resting: list[Table] = []
        self._tables: list[Table] = []
        self._passes: dict[int, list[tuple[bool, int]]] = {}  # open ones: present before, steps before
        self._new: list[tuple[Optimizer, Overlap, Callable[[], None], Callable[[], None]]] = []

    def add(self, model: nn.Module, rules: Rules) -> None:
        """As all who are apart; late parameters cannot be those of a compiled module."""
        if rules.overlap == "step":
            refuse_compiled(model)
        super().add(model, rules)

    def adopt(
        self, optimizer: Optimizer, overlap: Overlap, before: Callable[[], None], after: Callable[[], None]
    ) -> None:
        """Its steps are the server's from now on; opened by `begin`, when models have their weights."""
        self._new.append((optimizer, overlap, before, after))

    def begin(self) -> None:
        """Let the leader tell the servers what they keep."""
        for optimizer, overlap, before, after in self._new:
            self._checked(optimizer)
            table = Table(self._line, optimizer, self._policy, self._observer, late=overlap == "step")
            self._tables.append(table)
            self._open(table, optimizer)
            self._undo.append(replace_step(optimizer, self._stepping(table, before, after)))
        self._new = []

    def _open(self, table: Table, optimizer: Optimizer) -> None:
        crew = self._checked(optimizer)
        if self._group.rank == 0:
            table.open(self._text, crew, self._engine_group.ranks, replicas=self._replicas)
        self._group.barrier()
        table.begin()

    def _checked(self, optimizer: Optimizer) -> Crew:
        """What the policy may know with this optimizer, if it can work with that."""
        lr = optimizer.param_groups[0].get("lr")
        crew = replace(self._crew, lr=None if lr is None else float(lr))
        self._policy.check(crew)
        return crew

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
            table.early = False

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

        Others may be in a round that waits for this worker, on their way here: so it leaves meanwhile.
        """
        self.settle()
        self._resting = [table for table in self._tables if table.present]
        for table in self._resting:
            table.leave()
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
        """Tell the servers what was loaded."""
        for table in self._tables:
            self._open(table, table.optimizer)

    def close(self) -> None:
        """Say goodbye to the servers; give optimizers their own step back."""
        for table in self._tables:
            table.detach()
        while self._undo:
            self._undo.pop()()
        self._line.close()
