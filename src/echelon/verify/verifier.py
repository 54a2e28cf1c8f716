"""The checks of one worker: called by the reducer in every round and by the session after every step.

While gradients are in flight, every worker tells all others a few numbers about its own (norms, checksums).
When the sums have arrived, all workers judge the same numbers and come to the same verdict: go on, reduce
again because a worker's gradients were repaired, or refuse the round. The gradients of a refused round are
removed before the optimizer steps, so it changes nothing, on all workers alike.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from echelon.comm.future import Future
from echelon.comm.group import Group
from echelon.errors import ConfigError, ModelError
from echelon.observe.events import CorruptionFound, Verified
from echelon.reduce.bucket import Bucket
from echelon.reduce.reducer import Reducer
from echelon.verify.replay_check import ReplayCheck
from echelon.verify.replica_check import ReplicaCheck
from echelon.verify.replica_choice import Consensus, Validate
from echelon.verify.verification import (
    ActiveVerification,
    CheckFinding,
    Verdict,
    Verification,
    VerifiedRound,
    VerifiedRun,
    node_of,
)

_MOST_REFUSED = 5  # in a row; then nothing is learned any more
_MOST_ATTEMPTS = 3


class Verifier:
    """Carries out the checks of a run on one worker. `report` gets each finding as a sentence, once.

    All workers have the same checks, and make the same calls in the same order.
    """

    def __init__(
        self,
        chosen: Sequence[Verification],
        run: VerifiedRun,
        *,
        text: str,
    ) -> None:
        self.chosen = tuple(chosen)
        self.copies = run.copies  # how many workers have the same samples
        self._run = run
        self._group = run.group
        self._text = text
        self._checks: dict[str, ActiveVerification] = {one.name: one.begin(run) for one in chosen}
        replay = self._checks.get("replay")
        if isinstance(replay, ReplayCheck):
            replay.doubted = "gradients" in self._checks
        self.in_rounds = any(one.in_rounds for one in chosen)
        self._reducers: list[Reducer] = []
        self._round: VerifiedRound | None = None
        self._pending: Future[Tensor] | None = None
        self._widths: list[int] = []
        self._refused: set[int] = set()  # parameters whose gradients must not be applied
        self._in_step = False
        self._refused_in_a_row = 0
        self._refused_now = False

    # Preparing -----------------------------------------------------------------------------------

    def attach(self, model: nn.Module) -> None:
        """A model was prepared."""
        for check in self._checks.values():
            check.attach(model)

    def decide_by(self, consensus: Consensus | None, validate: Validate | None) -> None:
        """Let the script's functions decide where replicas differ."""
        check = self._checks.get("replicate")
        if not isinstance(check, ReplicaCheck):
            if self._group.size == 1:
                return
            raise ConfigError(
                "there are no replicas to compare",
                where="session.compare_replicas",
                fix='ask for them: join(verify="replicate(3)")',
            )
        check.consensus, check.validate = consensus or check.consensus, validate or check.validate

    # Rounds, as the reducer reports them ---------------------------------------------------------

    def sending(self, bucket: Bucket) -> None:
        """A gradient that lies in the bucket's own memory would be overwritten by the sum: copy it."""
        memory = {view.data_ptr() for view in bucket.memory()}
        for p in bucket.parameters:
            if p.grad is not None and p.grad.data_ptr() in memory:
                p.grad = p.grad.clone()

    def sent(self, reducer: Reducer) -> None:
        """All gradients are in flight: tell the other workers about this worker's."""
        mine = self._numbers(self._of(reducer))
        group = self._group.current
        rows = torch.zeros(group.size, 1 + len(mine), dtype=torch.int64)
        rows[group.rank] = torch.tensor([self._group.slot, *mine], dtype=torch.int64)
        # Everybody fills a row of its own, so the sum is everybody's row.
        self._pending = group.all_reduce(rows.view(-1)) if mine else None

    def received(self) -> Tensor:
        """Wait for what all workers tell."""
        pending, self._pending = self._pending, None
        return pending.wait() if pending is not None else torch.zeros(0, dtype=torch.int64)

    def _of(self, reducer: Reducer) -> VerifiedRound:
        """The round that a reducer is in."""
        if not any(reducer is one for one in self._reducers):
            self._reducers.append(reducer)
        model = next(at for at, one in enumerate(self._reducers) if one is reducer)
        before = self._round
        if before is None or before.model != model:
            named = [(name, p) for name, p in reducer.named if p.requires_grad]
            self._round = VerifiedRound(named=named, model=model, step=self._run.step())
        assert self._round is not None
        return self._round

    def _numbers(self, round_: VerifiedRound) -> list[int]:
        parts = [check.numbers(round_) for check in self._checks.values()]
        self._widths = [len(part) for part in parts]
        return [number for part in parts for number in part]

    def landed(self, reducer: Reducer, told: Tensor) -> bool:
        """The sums have arrived; whether all workers reduce their gradients again."""
        round_ = self._of(reducer)
        round_.slots, round_.numbers = self._read(told)
        verdict = Verdict.FINE
        try:
            for check in self._checks.values():
                verdict = max(verdict, check.judge(round_))
                if verdict == Verdict.AGAIN and round_.attempt < _MOST_ATTEMPTS:
                    round_.attempt += 1
                    return True
            for check in self._checks.values():
                verdict = max(verdict, check.settle(round_))
        except BaseException:
            self._round = None
            raise
        self._round = None
        if verdict != Verdict.FINE:
            self._refuse(round_)
        return False

    def _read(self, told: Tensor) -> tuple[list[int], dict[str, list[list[int]]]]:
        """Whose numbers these are, and each check's: of all who were members when they were told."""
        if not told.numel():
            return [], {name: [] for name in self._checks}
        slots, *parts = told.view(-1, 1 + sum(self._widths)).split([1, *self._widths], dim=1)
        return slots.flatten().tolist(), {
            name: part.tolist() for name, part in zip(self._checks, parts, strict=True)
        }

    def _refuse(self, round_: VerifiedRound) -> None:
        if self._in_step:
            raise ModelError(
                "a round inside an optimizer's step must not be applied, and that step cannot be skipped",
                where=f"verify, step {round_.step}",
                fix="continue from a checkpoint; use an optimizer whose step takes no closure",
            )
        self._refused |= {id(p) for _, p in round_.named}

    # Steps ---------------------------------------------------------------------------------------

    def stepping(self, optimizer: Optimizer) -> None:
        """An optimizer is about to step: gradients of a refused round are removed, so it does nothing."""
        self._in_step = True
        if not self._refused:
            return
        for group in optimizer.param_groups:
            for p in group["params"]:
                if id(p) in self._refused:
                    p.grad = None
                    self._refused_now = True
        self._refused -= {id(p) for group in optimizer.param_groups for p in group["params"]}

    def stepped_one(self) -> None:
        """An optimizer has stepped."""
        self._in_step = False

    def stepped(self, step: int) -> None:
        """All optimizers have stepped; `step` counts from 1."""
        self._refused_in_a_row = self._refused_in_a_row + 1 if self._refused_now else 0
        self._refused_now = False
        if self._refused_in_a_row >= _MOST_REFUSED:
            raise ModelError(
                f"{_MOST_REFUSED} steps in a row were refused, so nothing is learned any more",
                where=f"verify, step {step}",
                fix="the findings before this name worker and parameter; raise the check's limit, or leave "
                "the check out",
            )
        for check in self._checks.values():
            check.stepped(step)

    def vote(self) -> None:
        """Weights are about to be compared, saved or used after the last step."""
        for check in self._checks.values():
            check.vote()

    # Workers that come back ----------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """What the next verdicts depend on, between two steps."""
        checks = {name: check.state() for name, check in self._checks.items()}
        return {"refused": self._refused_in_a_row, "checks": checks}

    def adopt(self, state: dict[str, Any]) -> None:
        """Take over another worker's: this one comes to the same verdicts from now on."""
        self._refused_in_a_row = state["refused"]
        for name, check in self._checks.items():
            check.adopt(state["checks"][name])

    # The end -------------------------------------------------------------------------------------

    def remove(self) -> None:
        """Remove all hooks."""
        for check in self._checks.values():
            check.remove()

    def totals(self) -> Verified | None:
        """How many comparisons were made, for the record."""
        if not self._checks:
            return None
        counts = {name: check.done for name, check in self._checks.items()}
        return Verified(t=time.time(), rank=self._group.slot, checks=self._text, compared=counts)


def reporting(
    nodes: Sequence[str],
    group: Group,
    step: Callable[[], int],
    emit: Callable[[CorruptionFound], None],
    tell: Callable[[str], None],
) -> Callable[[CheckFinding], None]:
    """How findings reach the record and the user: every worker knows them, the leader tells them."""

    def report(found: CheckFinding) -> None:
        if group.rank != 0:
            return
        event = CorruptionFound(
            t=time.time(),
            rank=group.slot,
            step=step(),
            check=found.check,
            worker=found.worker,
            node=node_of(nodes, found.worker) if found.worker >= 0 else "",
            tensor=found.tensor,
            what=found.what,
            action=found.action,
        )
        emit(event)
        tell(event.text)

    return report
