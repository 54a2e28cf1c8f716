"""A script that computes in 32 bits computes in 64 instead."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from echelon.check.doubles import doubles

ARRAY = np.arange(12, dtype=np.float32).reshape(4, 3)


@pytest.mark.parametrize(
    "compute",
    [
        lambda: torch.ones(4, 3),
        lambda: torch.ones(4, 3, dtype=torch.float32),
        lambda: torch.zeros(4).float() + 1,
        lambda: torch.from_numpy(ARRAY) * 2,
        lambda: torch.from_numpy(ARRAY).mean(),
        lambda: nn.Linear(3, 2)(torch.from_numpy(ARRAY)),
        lambda: nn.LSTM(3, 2)(torch.ones(4, 1, 3))[0],
        lambda: torch.cat([torch.from_numpy(ARRAY), torch.ones(4, 3)]),
        lambda: functional.binary_cross_entropy(torch.full((4,), 0.5), torch.ones(4, dtype=torch.float32)),
    ],
)
def test_what_a_script_computes_has_64_bits(compute):
    with doubles(True):
        assert compute().dtype == torch.float64
    with doubles(False):
        assert compute().dtype == torch.float32


def test_gradients_have_64_bits_and_reach_weights_that_were_made_before():
    model = nn.Linear(3, 1)
    with doubles(True):
        model.double()
        model(torch.from_numpy(ARRAY)).square().mean().backward()
    assert model.weight.grad is not None
    assert model.weight.grad.dtype == torch.float64
    assert torch.get_default_dtype() == torch.float32
