"""What can be prepared, with which options, and which models cannot?"""

from __future__ import annotations

from typing import Any, Literal, TypedDict

from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from echelon.config.choices import FactorRule, Overlap
from echelon.errors import ModelError
from echelon.train.loader import BatchMeaning

Preparable = nn.Module | Optimizer | LRScheduler | DataLoader[Any]


class PrepareOptions(TypedDict, total=False):
    """The keyword arguments of `Session.prepare`."""

    batch: BatchMeaning
    batchnorm: Literal["global", "local"]
    loss: Literal["mean", "sum"]
    parallel: str | None
    overlap: Overlap | None
    factors: FactorRule | None
    codec: str | None
    random: Literal["own", "same"]


def refuse_model(model: nn.Module) -> None:
    """Raise ModelError for a model whose gradients cannot be reduced."""
    for name, parameter in model.named_parameters():
        if is_lazy(parameter):
            raise ModelError(
                f"parameter {name} has no shape yet",
                where="prepare",
                fix="run one batch through the model first",
            )
    for name, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
            raise ModelError(
                f"layer {name} makes sparse gradients, which cannot be reduced yet",
                where="prepare",
                fix="build it with sparse=False",
            )
