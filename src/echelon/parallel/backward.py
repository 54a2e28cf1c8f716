"""One stage's backward passes of one call: what is sent back, and the gradients that add up.

Gradients of parameters are added in the order of the micro-batches. If passes are split, those of weights
may come later, in the same order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from echelon.parallel.micro import KeptMicro
from echelon.parallel.split import Gradients, SplitBackward


class BackwardPasses:
    """Adds up in `total` the gradients of `parameters`; `back` sends one to the stage before."""

    def __init__(
        self,
        parameters: Sequence[Tensor],
        back: Callable[[Tensor], None],
        *,
        splits: bool,
        total: Gradients,
    ) -> None:
        self._parameters = parameters
        self._back = back
        self._splits = splits
        self._later: deque[SplitBackward] = deque()
        self.weighed = 0  # of how many micro-batches all weights are done
        self.total = total

    def of(self, kept: KeptMicro, given: Sequence[Tensor | None]) -> None:
        """The pass of the next micro-batch; `given` are the gradients of what it handed over."""
        handed = kept.handed if kept.again is None else kept.again()
        pairs = [
            (one, gradient)
            for one, gradient in zip(handed, given, strict=True)
            if gradient is not None and one.requires_grad
        ]
        split = SplitBackward(
            [one for one, _ in pairs],
            [gradient for _, gradient in pairs],
            kept.received,
            self._parameters,
            splits=self._splits and not kept.hooked,
        )
        found, weights = split.first()
        for tensor, gradient in zip(kept.received, found, strict=True):
            self._back(torch.zeros_like(tensor) if gradient is None else gradient)
        self._add(weights)
        if self._splits:
            self._later.append(split)

    @property
    def owes(self) -> bool:
        """Whether weights are put off."""
        return bool(self._later)

    def weights(self) -> None:
        """The gradients of the weights that were put off first."""
        self.weighed += 1
        self._add(self._later.popleft().second())

    def _add(self, found: Gradients) -> None:
        for at, gradient in enumerate(found):
            if gradient is None:
                continue
            known = self.total[at]
            self.total[at] = gradient.clone() if known is None else known.add_(gradient)
