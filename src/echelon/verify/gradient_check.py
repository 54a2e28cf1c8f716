"""The check of gradients in a run: norms of every worker's gradients in every round."""

from __future__ import annotations

import math
import struct
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from echelon.errors import ModelError
from echelon.verify.outliers import NormHistory, NormOutlier
from echelon.verify.verification import (
    UNKNOWN,
    ActiveVerification,
    CheckFinding,
    Verdict,
    VerifiedRound,
    VerifiedRun,
)

if TYPE_CHECKING:
    from echelon.verify.checks.gradients import Gradients

_SMALL = 1e-30  # squares of smaller float32 values are lost
_DONE = {"refuse": "refused", "warn": "warned", "stop": "stopped"}


class GradientCheck(ActiveVerification):
    """Finite gradients and usual norms."""

    def __init__(self, run: VerifiedRun, options: Gradients) -> None:
        super().__init__(run)
        self._options = options
        self._histories: dict[tuple[int, int], NormHistory] = {}
        self._found: list[NormOutlier] = []

    def numbers(self, round_: VerifiedRound) -> list[int]:
        """This worker's norms, as the bits of doubles."""
        norms = [_norm(p.grad) for _, p in round_.named]
        return list(struct.unpack(f"<{len(norms)}q", struct.pack(f"<{len(norms)}d", *norms)))

    def judge(self, round_: VerifiedRound) -> Verdict:
        """Find norms that stand out; others may look closer before anything is done about them."""
        self._found = self._history(round_).outliers(self._norms(round_))
        round_.suspect = round_.suspect or bool(self._found)
        return Verdict.FINE

    def settle(self, round_: VerifiedRound) -> Verdict:
        """Report what stands out, and do what was asked for."""
        self.done += 1
        if not self._found:
            self._history(round_).add(self._norms(round_))
            return Verdict.FINE
        found = self._in_words(round_)
        self.run.report(found)
        if self._options.action == "stop":
            raise ModelError(
                f"{self.run.name(found.worker)}: the gradient of parameter {found.tensor} {found.what}",
                where=f"verify gradients, step {round_.step}",
                fix="look at that machine's memory and processor; action=refuse goes on without the step",
            )
        return Verdict.REFUSE if self._options.action == "refuse" else Verdict.FINE

    def _in_words(self, round_: VerifiedRound) -> CheckFinding:
        """One sentence for the round: the first finding that is not finite, else the largest norm."""
        worst = max(self._found, key=lambda one: math.inf if not math.isfinite(one.norm) else one.norm)
        what = "is not finite"
        if math.isfinite(worst.norm):
            what = f"has norm {worst.norm:.3g}, usual is {worst.usual:.3g}"
        among = {one.worker for one in self._found}
        everywhere = len(among) == len(round_.slots) > 1
        if everywhere:
            what += " (on all workers: training diverges)"
        return CheckFinding(
            check="gradients",
            worker=UNKNOWN if everywhere else round_.slots[worst.worker],
            tensor=round_.named[worst.parameter][0],
            what=what,
            action=_DONE[self._options.action],
        )

    def state(self) -> dict[str, Any]:
        """Also the usual norms."""
        histories = [
            [*key, *(torch.from_numpy(one) if isinstance(one, np.ndarray) else one for one in kept.state())]
            for key, kept in self._histories.items()
        ]
        return {**super().state(), "histories": histories}

    def adopt(self, state: dict[str, Any]) -> None:
        """Also the usual norms."""
        super().adopt(state)
        for model, count, *kept in state["histories"]:
            self._usual(model, count).adopt(
                [one.numpy() if isinstance(one, Tensor) else one for one in kept]
            )

    def _history(self, round_: VerifiedRound) -> NormHistory:
        return self._usual(round_.model, len(round_.named))

    def _usual(self, model: int, count: int) -> NormHistory:
        key = model, count  # other parameters may be trained from some step on
        if key not in self._histories:
            self._histories[key] = NormHistory(limit=self._options.limit, window=self._options.window)
        return self._histories[key]

    def _norms(self, round_: VerifiedRound) -> list[list[float]]:
        return [
            list(struct.unpack(f"<{len(row)}d", struct.pack(f"<{len(row)}q", *row)))
            for row in round_.numbers["gradients"]
        ]


def _norm(gradient: Tensor | None) -> float:
    """The norm; 0 for none. A product is quicker than torch's norm; where it overflows, doubles do not."""
    if gradient is None:
        return 0.0
    if gradient.dtype in (torch.float32, torch.float64):
        flat = gradient.detach().reshape(-1)
        square = float(torch.dot(flat, flat))
        if math.isfinite(square) and square > _SMALL:
            return math.sqrt(square)
    return float(torch.linalg.vector_norm(gradient.detach(), dtype=torch.float64))
