"""What layers cost, from passes that other programs disturb."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from echelon.parallel.chain import chain_of
from echelon.parallel.measure import measure, steady_times


def test_a_pause_in_one_layer_changes_no_time():
    calm = [2.0, 4.0, 2.0]
    paused = [[9.0, 9.0, 9.0], calm, [2.0, 90.0, 2.0], calm]
    assert steady_times(paused) == pytest.approx(calm)


def test_a_worker_that_is_paused_in_every_pass_is_slow_in_all_its_layers():
    quota = [[10.0, 1.0, 1.0, 1.0], [10.0, 1.0, 1.0, 1.0], [1.0, 1.0, 10.0, 1.0], [1.0, 10.0, 1.0, 1.0]]
    assert steady_times(quota) == pytest.approx([13 / 4] * 4)


def test_a_layer_that_takes_no_time_is_no_error():
    assert steady_times([[0.0, 0.0], [0.0, 0.0]]) == [0.0, 0.0]


class Counting(nn.Module):
    """A layer with a buffer, and random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x * torch.rand(())


def test_measuring_leaves_buffers_gradients_and_random_numbers_as_they_were():
    model = nn.Sequential(nn.Linear(3, 5), Counting(), nn.Linear(5, 2))
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    costs = measure(model, chain_of(model), ((torch.ones(4, 3),), {}))
    assert torch.equal(torch.rand(3), expected)
    assert float(model[1].calls) == 0
    assert all(p.grad is None for p in model.parameters())
    assert [len(one) for one in (costs.times_s, costs.held_bytes, costs.passed_bytes)] == [3, 3, 3]
    assert costs.passed_bytes == [4 * 5 * 4, 4 * 5 * 4, 4 * 2 * 4]
    assert costs.held_bytes == [4 * 4 * 20, 4 * 4, 4 * 4 * 12]
