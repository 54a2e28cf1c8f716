"""Data that needs no files: digits, generated, activity."""

from __future__ import annotations

import pytest
import torch

from echelon.errors import ConfigError
from echelon.zoo.arrays import ArrayDataset
from echelon.zoo.dataset import DATASETS


def whole(split: object) -> tuple[torch.Tensor, torch.Tensor]:
    assert isinstance(split, ArrayDataset)
    return split.__getitems__(range(len(split)))


@pytest.mark.parametrize(
    ("name", "shape", "classes", "train", "test"),
    [
        ("digits", (1, 8, 8), 10, 1437, 360),
        ("generated", (20,), 10, 8000, 2000),
        ("activity", (9, 128), 6, 8000, 2000),
    ],
)
def test_sizes_are_as_documented_and_every_class_is_in_both_splits(
    name: str, shape: tuple[int, ...], classes: int, train: int, test: int
) -> None:
    splits = DATASETS.build(name).load()
    assert splits.spec.shape == shape
    assert splits.spec.classes == classes
    for split, count in ((splits.train, train), (splits.test, test)):
        inputs, targets = whole(split)
        assert inputs.shape == (count, *shape)
        assert inputs.dtype == torch.float32
        assert torch.bincount(targets).min() > 0.5 * count / classes


@pytest.mark.parametrize("name", ["digits", "generated", "activity"])
def test_loading_twice_gives_the_same_samples(name: str) -> None:
    torch.manual_seed(1)
    first = DATASETS.build(name).load()
    torch.manual_seed(2)
    second = DATASETS.build(name).load()
    for one, two in ((first.train, second.train), (first.test, second.test)):
        assert all(torch.equal(a, b) for a, b in zip(whole(one), whole(two), strict=True))


def test_digits_are_complete_and_normalised() -> None:
    splits = DATASETS.build("digits").load()
    inputs = torch.cat([whole(splits.train)[0], whole(splits.test)[0]])
    assert len(inputs) == 1797
    assert abs(inputs.mean().item()) < 0.01
    assert abs(inputs.std().item() - 1) < 0.01


@pytest.mark.parametrize("name", ["generated", "activity"])
def test_another_seed_gives_other_samples(name: str) -> None:
    first = whole(DATASETS.build(f"{name}(seed=1, samples=200)").load().train)[0]
    second = whole(DATASETS.build(f"{name}(seed=2, samples=200)").load().train)[0]
    assert first.shape == second.shape == (160, *first.shape[1:])
    assert not torch.equal(first, second)


@pytest.mark.parametrize("option", ["seed=-1", "seed=4294967296", "samples=0"])
@pytest.mark.parametrize("name", ["generated", "activity"])
def test_options_out_of_range_are_refused(name: str, option: str) -> None:
    with pytest.raises(ConfigError, match=option.replace("=", " cannot be ")):
        DATASETS.build(f"{name}({option})")


def test_total_acceleration_is_body_acceleration_plus_one_g() -> None:
    windows, _ = whole(DATASETS.build("activity(samples=300)").load().train)
    gravity = windows[:, 6:] - windows[:, :3]
    assert torch.allclose(gravity.norm(dim=1), torch.ones(240, 128), atol=1e-5)


def test_walking_moves_more_than_resting() -> None:
    windows, labels = whole(DATASETS.build("activity(samples=1000)").load().train)
    motion = windows[:, :3].std(dim=-1).mean(dim=1)
    assert motion[labels < 3].mean() > 3 * motion[labels >= 3].mean()
