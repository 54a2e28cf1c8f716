"""What `echelon train` trains, as the model of a trial on one machine."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.data import default_collate

from echelon.config.schema import TrainSettings
from echelon.train.job import make_model, make_optimizer
from echelon.train.local_messages import LocalJob
from echelon.train.local_worker import TrialModel
from echelon.zoo.dataset import DATASETS
from echelon.zoo.task import loss_of

_OPTIONS = ("model", "data", "optimizer", "lr", "momentum", "weight_decay")


def job_of(settings: TrainSettings) -> LocalJob:
    """The job that these settings describe."""
    return LocalJob(
        name=settings.model,
        maker="echelon.train.local_job:trial_model",
        options={name: getattr(settings, name) for name in _OPTIONS},
        batch=settings.batch,
    )


def trial_model(job: LocalJob) -> TrialModel:
    """The model with the first samples of its data."""
    settings = TrainSettings(**job.options)
    splits = DATASETS.build(settings.data, where="--data").load()
    torch.manual_seed(settings.seed)
    model = make_model(settings.model, splits.spec)
    data: Any = splits.train
    collate = splits.collate or default_collate

    def samples(count: int) -> tuple[Tensor, Tensor]:
        x, y = collate([data[at % len(data)] for at in range(count)])
        return x, y

    return TrialModel(
        model=model,
        loss_fn=loss_of(splits.spec),
        optimizer=make_optimizer(model, settings),
        samples=samples,
    )
