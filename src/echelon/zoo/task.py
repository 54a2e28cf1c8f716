"""The loss to train with, and the count of correct answers.

Both tasks have logits of shape (..., classes) and targets of shape (...), so one rule covers both: the mean
is over all targets, whether one per sample or one per position.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from echelon.errors import ConfigError
from echelon.zoo.dataset import SampleSpec

if TYPE_CHECKING:
    from torch import Tensor


def loss_of(spec: SampleSpec) -> Callable[[Tensor, Tensor], Tensor]:
    """The loss for that task: (logits, targets) -> mean cross-entropy over all targets."""
    if spec.task not in ("classify", "next-token"):
        raise ConfigError(f"no loss for task {spec.task!r}", fix="known: classify, next-token")
    return cross_entropy


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy over all targets, in nats."""
    import torch

    return torch.nn.functional.cross_entropy(logits.flatten(0, -2), targets.flatten())


def count_correct(logits: Tensor, targets: Tensor) -> tuple[int, int]:
    """How many targets have the highest logit, and how many targets there are."""
    return int((logits.argmax(dim=-1) == targets).sum()), targets.numel()
