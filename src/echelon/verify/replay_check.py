"""The check by replay in a run: all workers compute a backward pass again, and compare.

All workers replay the same passes, because layers such as global batch normalisation exchange statistics in
them. First once; only if a worker finds a difference, all compute the remaining times.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec
import torch
from torch import Tensor, nn

from echelon.errors import ModelError
from echelon.verify.recorded_pass import PassRecorder
from echelon.verify.verification import (
    ActiveVerification,
    CheckFinding,
    Verdict,
    VerifiedRound,
    VerifiedRun,
)
from echelon.verify.vote import vote

if TYPE_CHECKING:
    from echelon.verify.checks.replay import Replay


class _Outcome(msgspec.Struct, frozen=True):
    """What one worker found in one parameter; `right` is the computation that the majority agrees with."""

    parameter: str
    right: int
    majority: bool


class ReplayCheck(ActiveVerification):
    """Computes passes again, every few steps and where another check doubts."""

    def __init__(self, run: VerifiedRun, options: Replay, *, doubted: bool = True) -> None:
        super().__init__(run)
        self._options = options
        self._recorders: list[PassRecorder] = []
        self.doubted = doubted  # whether another check may doubt any step

    def attach(self, model: nn.Module) -> None:
        """Record the model's passes."""
        self._recorders.append(PassRecorder(model, self._is_wanted))

    def _is_due(self, step: int) -> bool:
        return bool(self._options.every) and (step + 1) % self._options.every == 0

    def _is_wanted(self) -> bool:
        return self.doubted or self._is_due(self.run.step())

    def numbers(self, round_: VerifiedRound) -> list[int]:
        """Whether this worker can compute the pass again."""
        return [int(self._recorders[round_.model].ready)]

    def judge(self, round_: VerifiedRound) -> Verdict:
        """Compute again if it is time, or if the round is doubted."""
        if round_.attempt or not (round_.suspect or self._is_due(round_.step)):
            return Verdict.FINE
        if not all(row[0] for row in round_.numbers["replay"]):
            self.run.note(
                "verify replay cannot compute a step again whose gradients do not come from calls of the "
                "prepared model, or whose inputs were changed in place"
            )
            return Verdict.FINE
        return self._replay(round_)

    def stepped(self, step: int) -> None:
        """What was recorded is of no use any more."""
        for recorder in self._recorders:
            recorder.forget()

    def remove(self) -> None:
        """Remove the recorders."""
        for recorder in self._recorders:
            recorder.remove()

    def _replay(self, round_: VerifiedRound) -> Verdict:
        recorder = self._recorders[round_.model]
        results: list[Mapping[int, Tensor | None]] = [
            {id(p): p.grad for _, p in round_.named},
            recorder.again(),
        ]
        differing = [(name, p) for name, p in round_.named if not _same(p.grad, results[1].get(id(p)))]
        group = self.run.group
        told = [int(one) for one in group.all_gather(torch.tensor([len(differing)]))]
        self.done += 1
        if not any(told):
            return Verdict.FINE
        if all(told) and self.done == 1:
            raise self._not_repeatable(round_, differing[0][0])
        results += [recorder.again() for _ in range(self._options.n - 1)]
        return self._decide(round_, results)

    def _decide(self, round_: VerifiedRound, results: Sequence[Mapping[int, Tensor | None]]) -> Verdict:
        """Use the majority's result for each parameter; tell all workers."""
        mine = []
        for name, p in round_.named:
            values = [one.get(id(p)) for one in results]
            labels = [next(i for i, other in enumerate(values) if _same(value, other)) for value in values]
            if not any(labels):
                continue
            outcome = vote(labels)
            mine.append(_Outcome(name, outcome.source, outcome.majority))
            if outcome.majority:
                p.grad = values[outcome.source]
        group = self.run.group
        told = [
            msgspec.json.decode(data, type=tuple[int, list[_Outcome]])
            for data in group.all_gather_bytes(msgspec.json.encode((group.slot, mine)))
        ]
        verdict = Verdict.FINE
        for slot, outcomes in told:
            if outcomes:
                verdict = max(verdict, self._report(slot, outcomes, len(results)))
        return verdict

    def _report(self, slot: int, outcomes: list[_Outcome], times: int) -> Verdict:
        """One finding for each worker, on the worst of its parameters."""
        undecided = [one for one in outcomes if not one.majority]
        wrong = [one for one in outcomes if one.majority and one.right]
        named = (undecided or wrong or outcomes)[0]
        tensor = named.parameter + (f" and {len(outcomes) - 1} more" if len(outcomes) > 1 else "")
        if undecided:
            what, action = f"differs between {times} computations, without a majority", "refused"
        elif wrong:
            what, action = f"was computed wrong: {times - 1} other computations agree", "repaired"
        else:
            what, action = "was computed wrong when it was computed again", "kept"
        self.run.report(CheckFinding(check="replay", worker=slot, tensor=tensor, what=what, action=action))
        if undecided:
            return Verdict.REFUSE
        return Verdict.AGAIN if wrong else Verdict.FINE

    def _not_repeatable(self, round_: VerifiedRound, name: str) -> ModelError:
        return ModelError(
            f"the first step that was computed again gave another gradient of {name} on every worker, so "
            "this training cannot be replayed",
            where=f"verify replay, step {round_.step}",
            fix="let gradients come from calls of the prepared model only, use deterministic operations "
            "(torch.use_deterministic_algorithms); or leave replay out",
        )


def _same(one: Tensor | None, other: Tensor | None) -> bool:
    """Whether two gradients are equal; so are two values that are no numbers, and zeros of either sign."""
    if one is None or other is None:
        return one is other or not (one if one is not None else other).any()  # type: ignore[union-attr]
    return torch.equal(one, other) or bool(((one == other) | (one.isnan() & other.isnan())).all())
