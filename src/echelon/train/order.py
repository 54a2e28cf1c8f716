"""In which order are samples drawn? In the same order on all workers, and never more of it than is needed.

    Permutation    an order that is drawn as a whole, alike on all workers
    SeededDraws    an order that every worker draws by itself, part by part, from a common seed
    told_batches   batches that the leader's sampler draws, a few at a time, sent to all workers

A sampler may promise 10^10 samples, or have no end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

import msgspec
import torch
from torch import Tensor
from torch.utils.data import RandomSampler

from echelon.comm.group import Group
from echelon.errors import DataError

LONGEST_LIST = 1 << 22  # samples or batches; a longer order is not kept as a list
_DRAWS = 1 << 16  # with replacement, so many indices are drawn together
_TOLD_INDICES = 1 << 16  # about so many indices are sent together


class Permutation:
    """A drawn order as a tensor: 8 bytes a sample, where a list has 40."""

    def __init__(self, drawn: Tensor) -> None:
        self._drawn = drawn

    def __len__(self) -> int:
        return len(self._drawn)

    def __getitem__(self, wanted: slice) -> list[int]:
        found: list[int] = self._drawn[wanted].tolist()
        return found


class SeededDraws:
    """A long order as numbered parts of equal length; any part can be drawn without those before it.

    `draw(n)` gives part n, the same one whenever it is called.
    """

    def __init__(self, length: int, part_length: int, draw: Callable[[int], list[int]]) -> None:
        self._length = length
        self._part_length = part_length
        self._draw = draw
        self._drawn: dict[int, list[int]] = {}

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, wanted: slice) -> list[int]:
        start, stop, _ = wanted.indices(self._length)
        found: list[int] = []
        while start < stop:
            number, offset = divmod(start, self._part_length)
            part = self._part(number)[offset : offset + stop - start]
            found += part
            start += len(part)
        return found

    def _part(self, number: int) -> list[int]:
        if number not in self._drawn:
            if len(self._drawn) > 1:  # batches are asked for in ascending order
                del self._drawn[min(self._drawn)]
            self._drawn[number] = self._draw(number)
        return self._drawn[number]


def random_draws(sampler: RandomSampler, seed: Callable[[str], int]) -> SeededDraws:
    """What a RandomSampler without a generator of its own promises: `num_samples` draws, from a seed.

    With replacement, each draw is independent. Without, they are permutations, one after another.
    `seed` gives the seed of a part.
    """
    samples = len(sampler.data_source)

    def draw(number: int) -> list[int]:
        generator = torch.Generator().manual_seed(seed(f"/part-{number}"))
        if sampler.replacement:
            drawn: list[int] = torch.randint(samples, (_DRAWS,), generator=generator).tolist()
        else:
            drawn = torch.randperm(samples, generator=generator).tolist()
        return drawn

    return SeededDraws(len(sampler), _DRAWS if sampler.replacement else samples, draw)


def told_list(group: Group, draw: Callable[[], list[Any]]) -> list[Any]:
    """The list that the leader draws, on all workers."""
    return _told(group, draw)


def told_batches(
    group: Group, batches: Callable[[], Iterator[Sequence[int]]], batch_size: int
) -> Iterator[list[int]]:
    """The batches that the leader draws, on all workers; all of them must draw alike far.

    `batches` begins the leader's drawing. `batch_size` is about how long a batch is.
    """
    at_once = max(1, _TOLD_INDICES // max(1, batch_size))
    drawing = batches() if group.rank == 0 else iter(())
    while True:
        told = _told(group, lambda: [[int(i) for i in batch] for batch in islice(drawing, at_once)])
        yield from told
        if len(told) < at_once:
            return


def _told(group: Group, draw: Callable[[], list[Any]]) -> list[Any]:
    """What the leader draws. If its sampler fails, all workers raise."""
    error: Exception | None = None
    said: dict[str, Any] = {}
    if group.rank == 0:
        try:
            said = {"drawn": draw()}
        except Exception as failed:  # noqa: BLE001 - whatever a sampler raises, the others must not wait
            error, said = failed, {"error": f"{type(failed).__name__}: {failed}"}
    said = msgspec.json.decode(group.broadcast_bytes(msgspec.json.encode(said)))
    if "error" in said:
        raise DataError(
            f"the leader's sampler failed: {said['error']}",
            where="loader",
            fix="see the log of rank 0; the sampler runs there",
        ) from error
    drawn: list[Any] = said["drawn"]
    return drawn


def merge_small(batches: Iterator[list[Any]], workers: int) -> Iterator[list[Any]]:
    """Join a batch with fewer samples than workers to the batch before it; see plan/shares.py."""
    held: list[Any] = []
    for batch in batches:
        if held and len(batch) >= workers:
            yield held
            held = batch
        else:
            held = held + batch
    if held:
        yield held
