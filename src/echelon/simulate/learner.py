"""A model as one flat tensor: its gradient and its evaluation at any weights.

The module's parameters are views of one tensor, into which weights are copied before use, so the module
itself is never copied. Optimizers work on flat tensors too; the result is the same, because SGD and AdamW
are element-wise. Buffers of a module (running means of batch normalisation) are shared by all virtual
workers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.data import Dataset, default_collate

from echelon.simulate.setting import Setting
from echelon.zoo.dataset import DATASETS
from echelon.zoo.model import MODELS
from echelon.zoo.task import count_correct, loss_of

_AT_ONCE = 500  # samples per forward pass of an evaluation or of a joint gradient of several batches
_KEPT_BYTES = 512 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
    """The evaluation of weights; all None if nothing is learned."""

    train_loss: float | None = None
    test_loss: float | None = None
    test_accuracy: float | None = None
    samples: int = 0


class Problem:
    """A model and a data set, loaded once for all runs."""

    def __init__(self, setting: Setting) -> None:
        splits = DATASETS.build(setting.data, where="--data").load()
        self.model = MODELS.build(setting.model, where="--model")
        self.spec = splits.spec
        self.loss = loss_of(splits.spec)
        self.samples = _count(splits.train)
        self._train, self._test, self._collate = (
            splits.train,
            splits.test,
            splits.collate or default_collate,
        )
        tested = _count(splits.test) if not setting.test_samples else setting.test_samples
        self._parts = {
            "train": _fixed(self.samples, setting.train_samples),
            "test": _fixed(_count(splits.test), tested),
        }
        self._kept: dict[tuple[str, int], tuple[Tensor, Tensor]] = {}
        self._kept_bytes = 0

    def build(self, seed: int) -> torch.nn.Module:
        """A new module, which depends only on the seed."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.model.build(self.spec)

    def batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """A batch of training samples."""
        return self._fetch(self._train, indices.tolist())

    def evaluation(self, part: str) -> Iterator[tuple[Tensor, Tensor]]:
        """The fixed batches of a part, cached in memory up to a limit."""
        data = self._train if part == "train" else self._test
        for number, indices in enumerate(self._parts[part]):
            batch = self._kept.get((part, number))
            if batch is None:
                with torch.random.fork_rng(devices=[]):  # random crops must not affect the run
                    torch.manual_seed(number)
                    batch = self._fetch(data, indices)
                size = sum(tensor.numel() * tensor.element_size() for tensor in batch)
                if self._kept_bytes + size <= _KEPT_BYTES:
                    self._kept[part, number] = batch
                    self._kept_bytes += size
            yield batch

    def _fetch(self, data: Dataset[Any], indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        # Like torch's loaders, fetch many samples at once if the data set can.
        many = getattr(data, "__getitems__", None)
        x, y = self._collate(many(indices) if many else [data[index] for index in indices])
        return x, y


class Learner:
    """One run's model."""

    def __init__(self, problem: Problem, seed: int) -> None:
        self._problem = problem
        self._module = problem.build(seed)
        self._parameters = [p for p in self._module.parameters() if p.requires_grad]
        self._flat = torch.cat([p.detach().reshape(-1) for p in self._parameters])
        at = 0
        for parameter in self._parameters:
            parameter.data = self._flat[at : at + parameter.numel()].view(parameter.shape)
            at += parameter.numel()
        self._initial = self._flat.clone()
        self._normalises = any(isinstance(part, _BatchNorm) for part in self._module.modules())
        self.size_bytes = self._flat.numel() * self._flat.element_size()

    def initial(self) -> Tensor:
        """A copy of the initial weights."""
        return self._initial.clone()

    def gradient_at(self, flat: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
        """The gradient of the mean loss of these training samples at these weights, and that loss."""
        self._flat.copy_(flat)
        x, y = self._problem.batch(indices)
        loss = self._problem.loss(self._module(x), y)
        gradients = torch.autograd.grad(loss, self._parameters, allow_unused=True, materialize_grads=True)
        return torch.cat([gradient.reshape(-1) for gradient in gradients]), loss.detach()

    def mean_gradient_at(self, flat: Tensor, batches: Sequence[Tensor]) -> Tensor:
        """The mean of the gradients of several batches of one size.

        It is computed as the gradient of one joint batch, which is faster, unless batch normalisation makes
        the samples of a batch depend on each other.
        """
        joined = 1 if self._normalises else max(1, _AT_ONCE // len(batches[0]))
        parts = [batches[at : at + joined] for at in range(0, len(batches), joined)]
        total = torch.zeros_like(flat)
        for part in parts:
            gradient, _ = self.gradient_at(flat, torch.cat(list(part)))
            total.add_(gradient, alpha=len(part) / len(batches))
        return total

    def evaluate(self, flat: Tensor) -> Quality:
        """Train loss on fixed training samples; loss and accuracy on test samples."""
        self._flat.copy_(flat)
        self._module.eval()
        train_loss, _, _ = self._measure("train")
        test_loss, accuracy, samples = self._measure("test")
        self._module.train()
        return Quality(train_loss=train_loss, test_loss=test_loss, test_accuracy=accuracy, samples=samples)

    @torch.no_grad()
    def _measure(self, part: str) -> tuple[float, float, int]:
        total, right, targets, samples = 0.0, 0, 0, 0
        for x, y in self._problem.evaluation(part):
            logits = self._module(x)
            correct, count = count_correct(logits, y)
            total += float(self._problem.loss(logits, y)) * count
            right, targets, samples = right + correct, targets + count, samples + len(y)
        return total / targets, right / targets, samples


class TimingOnly(Learner):
    """Computes no gradients, for runs in which only times matter; transfers have the model's size."""

    def __init__(self, problem: Problem, seed: int) -> None:
        Learner.__init__(self, problem, seed)
        self._nothing = torch.empty(0)

    def initial(self) -> Tensor:
        """An empty tensor."""
        return torch.empty(0)

    def gradient_at(self, flat: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Empty tensors."""
        return torch.empty(0), self._nothing

    def evaluate(self, flat: Tensor) -> Quality:
        """No figures."""
        return Quality()


def optimizer_for(setting: Setting, flat: Tensor) -> torch.optim.Optimizer:
    """The setting's optimizer for flat weights."""
    if setting.optimizer == "adamw":
        return torch.optim.AdamW([flat], lr=setting.lr, weight_decay=setting.weight_decay)
    return torch.optim.SGD(
        [flat], lr=setting.lr, momentum=setting.momentum, weight_decay=setting.weight_decay
    )


def _count(data: Dataset[Any]) -> int:
    return len(data)  # type: ignore[arg-type]  # torch's type of a data set promises no length


def _fixed(available: int, wanted: int) -> list[list[int]]:
    """Indices of evenly spread samples, in batches."""
    step = max(1, available // max(1, min(wanted, available)))
    chosen = list(range(0, available, step))[:wanted]
    return [chosen[at : at + _AT_ONCE] for at in range(0, len(chosen), _AT_ONCE)]
