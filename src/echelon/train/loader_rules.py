"""What may a loader be that `prepare` shares out, and what do its samplers say?"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, SequentialSampler

from echelon.data.dataset import NearSampler
from echelon.errors import ConfigError, DataError


def refuse(loader: DataLoader[Any], sampler: Any, streams: bool) -> None:
    """Raise if this loader cannot be shared out."""
    if type(loader).__iter__ is not DataLoader.__iter__:
        raise ConfigError(
            f"the loader's class {type(loader).__name__} has an __iter__ of its own, which prepare would "
            "pass by",
            where="prepare",
            fix="give prepare a torch DataLoader; repeat passes over it in the script",
        )
    if isinstance(sampler, DistributedSampler):
        raise ConfigError(
            "the loader has a DistributedSampler, but Echelon shares the data out itself",
            where="prepare",
            fix="build the loader with shuffle=True instead; batch='per-worker' keeps DDP's batch size",
        )
    if loader.batch_sampler is None and loader.batch_size is None:
        what = "an iterable data set" if streams else "a data set"
        raise ConfigError(
            f"the loader takes ready batches from {what} (batch_size=None), which cannot be shared out",
            where="prepare",
            fix="let the data set yield single samples and give the loader a batch_size",
        )


def draws_itself(sampler: Any) -> bool:
    """Whether every worker can draw the sampler's order by itself, from the run's seed."""
    if type(sampler) in (SequentialSampler, NearSampler):
        return True
    if type(sampler) is not RandomSampler:
        return False
    plain = not sampler.replacement and sampler._num_samples is None
    return plain or sampler.generator is None


def check_enough(samples: int, workers: int) -> None:
    """Refuse a first batch, of a new or resumed pass, with fewer samples than workers."""
    if samples < workers:
        raise DataError(
            f"{samples} samples are left of this pass, which cannot be shared by {workers} workers",
            where="loader",
            fix=f"use at most {samples} workers until the pass is over, or more data",
        )


def generator_of(*samplers: Any) -> torch.Generator | None:
    """The generator of the samplers' randomness, if they have one of their own."""
    for sampler in samplers:
        generator = getattr(sampler, "generator", None)
        if isinstance(generator, torch.Generator):
            return generator
    return None


def stable_seed(text: str) -> int:
    """The same number for the same text in every process and version of Python."""
    value = 0xCBF29CE484222325  # FNV-1a
    for byte in text.encode():
        value = ((value ^ byte) * 0x100000001B3) & 0xFFFFFFFFFFFFFFFF
    return value >> 1
