"""Samples in memory: batches equal samples, values have the specified types, loader workers work."""

from __future__ import annotations

import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Subset

from echelon.zoo.arrays import ArrayDataset, collate, normaliser


def bytes_of_images(count: int) -> ArrayDataset:
    generator = torch.Generator().manual_seed(count)
    pixels = torch.randint(256, (count, 3, 4, 4), generator=generator, dtype=torch.uint8)
    scale, shift = normaliser((0.5, 0.4, 0.3), (0.2, 0.3, 0.4))
    return ArrayDataset(pixels, torch.arange(count, dtype=torch.uint8), scale=scale, shift=shift)


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_a_batch_equals_its_samples_stacked(data: st.DataObject) -> None:
    dataset = bytes_of_images(data.draw(st.integers(1, 20)))
    indices = data.draw(st.lists(st.integers(-len(dataset), len(dataset) - 1), min_size=1, max_size=30))
    inputs, targets = dataset.__getitems__(indices)
    assert torch.equal(inputs, torch.stack([dataset[i][0] for i in indices]))
    assert torch.equal(targets, torch.stack([dataset[i][1] for i in indices]))


def test_bytes_become_normalised_floats() -> None:
    scale, shift = normaliser((0.5, 0.0, 0.0), (0.25, 1.0, 2.0))
    pixels = torch.full((1, 3, 1, 1), 255, dtype=torch.uint8)
    dataset = ArrayDataset(pixels, torch.zeros(1), scale=scale, shift=shift)
    inputs, targets = dataset[0]
    assert inputs.dtype == torch.float32
    assert targets.dtype == torch.int64
    assert torch.allclose(inputs.flatten(), torch.tensor([2.0, 1.0, 0.5]))


def test_fetching_does_not_change_the_stored_values() -> None:
    held = torch.ones(2, 1, 1, 1)
    dataset = ArrayDataset(held, torch.zeros(2), scale=torch.tensor(3.0), shift=torch.tensor(1.0))
    assert dataset[0][0].item() == 4.0
    assert dataset.__getitems__([0, 1])[0].tolist() == [[[[4.0]]], [[[4.0]]]]
    assert torch.equal(held, torch.ones(2, 1, 1, 1))


def test_inputs_and_targets_of_unequal_length_are_refused() -> None:
    with pytest.raises(ValueError, match="3 inputs, but 2 targets"):
        ArrayDataset(torch.zeros(3, 1), torch.zeros(2))


def test_a_loader_yields_every_sample_once_in_whole_batches() -> None:
    loader = DataLoader(bytes_of_images(10), batch_size=4, shuffle=True, collate_fn=collate)
    batches = [(len(inputs), targets) for inputs, targets in loader]
    assert [count for count, _ in batches] == [4, 4, 2]
    assert sorted(torch.cat([targets for _, targets in batches]).tolist()) == list(range(10))


def test_a_loader_over_a_part_fetches_the_same_samples() -> None:
    dataset = bytes_of_images(10)
    part = Subset(dataset, [7, 3])
    ((inputs, targets),) = DataLoader(part, batch_size=2, collate_fn=collate)
    assert targets.tolist() == [7, 3]
    assert torch.equal(inputs, dataset.__getitems__([7, 3])[0])


def test_collate_stacks_a_list_of_samples() -> None:
    dataset = bytes_of_images(3)
    inputs, targets = collate([dataset[0], dataset[2]])
    assert torch.equal(inputs, dataset.__getitems__([0, 2])[0])
    assert targets.tolist() == [0, 2]


def test_a_pickled_data_set_gives_the_same_batch() -> None:
    dataset = bytes_of_images(5)
    copy = pickle.loads(pickle.dumps(dataset))
    assert torch.equal(copy.__getitems__([4, 0])[0], dataset.__getitems__([4, 0])[0])


def test_a_loader_worker_gives_the_same_batches() -> None:
    dataset = bytes_of_images(9)
    alone = list(DataLoader(dataset, batch_size=4, collate_fn=collate))
    helped = list(DataLoader(dataset, batch_size=4, collate_fn=collate, num_workers=1))
    assert len(alone) == len(helped) == 3
    for (x, y), (x2, y2) in zip(alone, helped, strict=True):
        assert torch.equal(x, x2)
        assert torch.equal(y, y2)
