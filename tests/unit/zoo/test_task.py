"""The loss and the count of correct answers, for one target per sample and for one per position."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.zoo.dataset import SampleSpec
from echelon.zoo.task import count_correct, loss_of

CLASSIFY = SampleSpec(shape=(4,), dtype="float32", classes=3, task="classify")
NEXT = SampleSpec(shape=(5,), dtype="int64", classes=3, task="next-token")


def test_classification_loss_is_the_mean_over_samples() -> None:
    logits = torch.tensor([[2.0, 0.0, 0.0], [0.0, 1.0, 0.0]])
    targets = torch.tensor([0, 2])
    by_hand = -(torch.log_softmax(logits, -1)[[0, 1], targets]).mean()
    assert torch.allclose(loss_of(CLASSIFY)(logits, targets), by_hand)


def test_next_token_loss_is_the_mean_over_all_positions() -> None:
    logits = torch.randn(2, 5, 3, generator=torch.Generator().manual_seed(0))
    targets = torch.tensor([[0, 1, 2, 0, 1], [2, 2, 2, 0, 0]])
    by_hand = -torch.log_softmax(logits, -1).gather(-1, targets[..., None]).mean()
    assert torch.allclose(loss_of(NEXT)(logits, targets), by_hand)


@settings(max_examples=30, deadline=None)
@given(spec=st.sampled_from([CLASSIFY, NEXT]), shares=st.lists(st.integers(1, 6), min_size=1, max_size=4))
def test_losses_of_unequal_shares_combine_to_that_of_the_batch(spec: SampleSpec, shares: list[int]) -> None:
    batch = sum(shares)
    positions = () if spec.task == "classify" else spec.shape
    generator = torch.Generator().manual_seed(batch)
    logits = torch.randn(batch, *positions, 3, generator=generator)
    targets = torch.randint(3, (batch, *positions), generator=generator)
    loss = loss_of(spec)
    parts = zip(logits.split(shares), targets.split(shares), shares, strict=True)
    combined = sum(share / batch * loss(x, y) for x, y, share in parts)
    assert torch.allclose(torch.as_tensor(combined), loss(logits, targets), atol=1e-5)


@pytest.mark.parametrize("task", ["classify", "next-token"])
def test_training_lowers_the_loss(task: Literal["classify", "next-token"]) -> None:
    spec = CLASSIFY if task == "classify" else NEXT
    shape = (2, 3) if task == "classify" else (2, 5, 3)
    logits = torch.zeros(shape, requires_grad=True)
    loss_of(spec)(logits, torch.ones(shape[:-1], dtype=torch.int64)).backward()
    assert logits.grad is not None
    assert logits.grad[..., 1].max() < 0 < logits.grad[..., 0].min()


def test_correct_answers_are_counted_per_sample() -> None:
    logits = torch.tensor([[2.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 3.0]])
    assert count_correct(logits, torch.tensor([0, 2, 2])) == (2, 3)


def test_correct_answers_are_counted_per_position() -> None:
    logits = torch.eye(3)[torch.tensor([[0, 1, 2], [2, 2, 2]])]
    assert count_correct(logits, torch.tensor([[0, 1, 1], [2, 2, 0]])) == (4, 6)
