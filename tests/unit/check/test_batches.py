"""Which batches are trained, and how many samples a step has."""

from __future__ import annotations

import torch

from echelon.check.batches import TrainedBatches
from echelon.check.cuts import BatchPart
from echelon.plan.shares import Slice


def _handed(batches: TrainedBatches, start: int, stop: int, batch: int) -> None:
    batches.handed(Slice(start, stop, batch), [1.0, 1.0, 1.0], rank=1)


def test_a_batch_counts_once_and_only_if_it_is_trained():
    batches = TrainedBatches()
    _handed(batches, 4, 8, 12)
    _handed(batches, 16, 20, 12)  # the one before was for an evaluation
    batches.trained()
    batches.trained()  # two losses of one batch
    assert batches.stepped() == 4
    assert batches.stepped() is None
    for _ in range(2):  # gradients of two batches
        _handed(batches, 4, 8, 12)
        batches.trained()
    assert batches.stepped() == 8


def test_a_part_begins_where_the_ranks_before_it_end_in_its_own_batch():
    batches = TrainedBatches()
    _handed(batches, 28, 32, 12)
    _handed(batches, 38, 40, 7)
    newest, before = batches.parts()
    assert (newest, before) == (
        BatchPart(offset=3, share=2, batch=7),
        BatchPart(offset=4, share=4, batch=12),
    )
    assert batches.last == (2, 7)


def test_a_loader_that_was_not_prepared_is_named_if_its_batch_is_trained():
    batches = TrainedBatches()
    batches.handed_unshared({"x": [torch.ones(6, 2)], "y": 3}, "train.py:7")
    assert not batches.unshared
    batches.trained()
    assert list(batches.unshared) == ["train.py:7"]
    assert batches.stepped() == 6
    batches.handed_unshared("no tensors", "train.py:9")
    batches.trained()
    assert batches.stepped() is None
