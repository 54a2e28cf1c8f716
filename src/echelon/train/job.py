"""The built-in training job of `echelon train`: trains a model of the zoo on one of its data sets.

It uses only the public session, as a user's script would. It runs in every worker; its settings are in the
run's folder.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from echelon.comm.meet.place import RUN_VARIABLE
from echelon.config.resolve import resolve
from echelon.config.schema import TrainSettings
from echelon.errors import ModelError
from echelon.observe.run_folder import RunFolder
from echelon.train.join import join
from echelon.train.session import Session
from echelon.zoo.dataset import DATASETS, SampleSpec
from echelon.zoo.model import MODELS
from echelon.zoo.task import count_correct, loss_of


def main() -> None:
    """Train with the settings in the run's folder."""
    folder = RunFolder(Path(os.environ[RUN_VARIABLE]))
    settings = resolve(TrainSettings, {}, folder.config).settings
    session = join()
    torch.manual_seed(settings.seed)
    splits = DATASETS.build(settings.data, where="--data").load()
    model = make_model(settings.model, splits.spec)
    train_loader = _loader(splits.train, splits.collate, settings, shuffle=True)
    test_loader = _loader(splits.test, splits.collate, settings, shuffle=False)
    optimizer = make_optimizer(model, settings)
    model, optimizer, train_loader, test_loader = session.prepare(
        model, optimizer, train_loader, test_loader
    )
    if settings.checkpoint:
        session.load(settings.checkpoint, required=False)
    steps = len(train_loader) * settings.epochs
    if session.step >= steps:
        session.note(
            "nothing to train: the checkpoint has these epochs already; ask for more with --epochs"
        )
    session.expect_steps(steps)
    loss_fn = loss_of(splits.spec)
    for _ in session.epochs(settings.epochs):
        model.train()
        for x, y in train_loader:
            optimizer.zero_grad()
            loss = loss_fn(model(x), y)
            loss.backward()
            optimizer.step()
            session.log(loss=loss)
        accuracy = _evaluate(session, model, test_loader, loss_fn)
        if settings.until_accuracy is not None and accuracy >= settings.until_accuracy:
            if settings.checkpoint:
                session.save(
                    settings.checkpoint, keep=settings.checkpoint_keep, best=settings.checkpoint_best
                )
            session.note(f"stopped at a test accuracy of {accuracy:.4f}")
            break


def make_model(text: str, sample: SampleSpec) -> nn.Module:
    """The model; torch's own errors about sizes and memory become one that names the option."""
    kind = MODELS.build(text, where="--model")
    try:
        return kind.build(sample)
    except (MemoryError, OverflowError, RuntimeError, TypeError) as error:
        reason = str(error).partition("\n")[0].partition(" Exception raised")[0]
        raise ModelError(
            f"{text} cannot be made: {reason}", where="--model", fix="give smaller options"
        ) from error


def _loader(data: Any, collate: Any, settings: TrainSettings, *, shuffle: bool) -> DataLoader[Any]:
    return DataLoader(
        data,
        batch_size=min(settings.batch, len(data)),
        shuffle=shuffle,
        collate_fn=collate,
        num_workers=settings.loader_workers,
        persistent_workers=settings.loader_workers > 0,
    )


def make_optimizer(model: nn.Module, settings: TrainSettings) -> torch.optim.Optimizer:
    """The optimizer that the settings name."""
    if settings.optimizer == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=settings.lr, weight_decay=settings.weight_decay)
    return torch.optim.SGD(
        model.parameters(),
        lr=settings.lr,
        momentum=settings.momentum,
        weight_decay=settings.weight_decay,
    )


@torch.no_grad()
def _evaluate(session: Session, model: nn.Module, loader: Any, loss_fn: Any) -> float:
    """The accuracy on the test data, each worker on its share; records it with the loss."""
    model.eval()
    sums = torch.zeros(3, dtype=torch.float64)
    for x, y in loader:
        logits = model(x)
        correct, count = count_correct(logits, y)
        sums += torch.tensor([float(loss_fn(logits, y)) * count, correct, count], dtype=torch.float64)
    session.all_reduce(sums)
    loss, correct_share = float(sums[0] / sums[2]), float(sums[1] / sums[2])
    session.log_evaluation(loss=loss, accuracy=correct_share, samples=int(sums[2]))
    return correct_share


if __name__ == "__main__":
    main()
