"""Which batch is being trained, and how many samples does a step have?

A prepared loader tells which part of a batch this worker has. A loader that was not prepared is noticed
too: each worker then trains as many samples as one alone. A batch counts when a backward pass follows it,
so evaluations do not count.

A data set that draws random numbers (crops, flips) would draw others on each worker. Here every sample has
a seed of its own, so that it does not matter who loads it, nor in which process.
"""

from __future__ import annotations

import random
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import _utils, dataloader

from echelon.check.cuts import BatchPart
from echelon.check.patches import replace
from echelon.plan.shares import Slice, split

if TYPE_CHECKING:
    from echelon.check.draws import AlignedDraws

_KEPT = 16  # parts; a script may draw a few batches ahead, or from several loaders


class TrainedBatches:
    """The batches that the script draws, and those that it trains."""

    def __init__(self) -> None:
        self._parts: deque[BatchPart] = deque(maxlen=_KEPT)
        self._fresh: int | None = None
        self._unshared_place = ""
        self._samples: int | None = None
        self.unshared: dict[str, None] = {}
        self.last: tuple[int, int] | None = None

    def parts(self) -> Sequence[BatchPart]:
        """This worker's parts of the last batches of prepared loaders, the newest first."""
        return tuple(self._parts)

    def handed(self, part: Slice, weights: Sequence[float], rank: int) -> None:
        """A prepared loader hands out this worker's part of a batch."""
        offset = sum(split(part.batch, weights)[:rank])
        self._parts.appendleft(BatchPart(offset=offset, share=part.share, batch=part.batch))
        self.last = part.share, part.batch
        self._fresh, self._unshared_place = part.share, ""

    def handed_unshared(self, data: Any, place: str) -> None:
        """A loader that was not prepared hands out a batch."""
        rows = _rows(data)
        if rows is not None:
            self._fresh, self._unshared_place = rows, place

    def trained(self) -> None:
        """A backward pass begins: the batch that was handed out last is trained, once."""
        if self._fresh is None:
            return
        self._samples = (self._samples or 0) + self._fresh
        self._fresh = None
        if self._unshared_place:
            self.unshared[self._unshared_place] = None

    def stepped(self) -> int | None:
        """The optimizer steps: how many samples were trained since the last step, if that is known."""
        samples, self._samples = self._samples, None
        return samples


def watch_loaders(
    stack: ExitStack, batches: TrainedBatches, draws: AlignedDraws, convert: Callable[[Any], Any] | None
) -> None:
    """Notice batches of loaders that were not prepared, and give each sample a seed of its own.

    convert  what is done to every batch
    """
    from echelon.check.draws import called_by_echelon, place_in_script

    def noticing(original: Any) -> Any:
        def next_batch(self: Any) -> Any:
            data = original(self)
            if not called_by_echelon():
                batches.handed_unshared(data, place_in_script())
            return data if convert is None else convert(data)

        return next_batch

    def seeding(original: Any) -> Any:
        def fetch(self: Any, index: Any) -> Any:
            if not self.auto_collation:
                return original(self, index)
            with draws.paused():
                return self.collate_fn(_samples(self.dataset, index))

        return fetch

    replace(stack, dataloader._BaseDataLoaderIter, "__next__", noticing)
    replace(stack, _utils.fetch._MapDatasetFetcher, "fetch", seeding)


def _samples(dataset: Any, indices: Any) -> list[Any]:
    """Samples of a data set, each drawn with a seed that depends on its index only."""
    before = torch.get_rng_state(), np.random.get_state(), random.getstate()
    several = getattr(dataset, "__getitems__", None)
    found: list[Any] = []
    try:
        for index in indices:
            seed_all(zlib.crc32(repr(index).encode()))
            found += several([index]) if several else [dataset[index]]
    finally:
        torch.set_rng_state(before[0])
        np.random.set_state(before[1])
        random.setstate(before[2])
    return found


def seed_all(seed: int) -> None:
    """Seed torch, numpy and Python's `random`."""
    torch.default_generator.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


def states_of_others() -> tuple[Any, ...]:
    """The states of Python's and numpy's generators, as far as they tell whether anything was drawn."""
    _, _, position, *gauss = np.random.get_state(legacy=True)
    return random.getstate(), position, gauss


def _rows(data: Any) -> int | None:
    """The first dimension of the first tensor in a batch."""
    if isinstance(data, Tensor):
        return data.shape[0] if data.dim() else None
    if isinstance(data, dict):
        data = list(data.values())
    if isinstance(data, (list, tuple)):
        return next((rows for part in data if (rows := _rows(part)) is not None), None)
    return None
