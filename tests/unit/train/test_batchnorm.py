"""Global batch normalisation tells where workers wait for each other."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from echelon.comm.alone import SoloGroup
from echelon.train import batchnorm


def test_every_exchange_of_statistics_is_surrounded_once_in_forward_and_once_in_backward():
    met: list[str] = []
    now = "forward"

    @contextmanager
    def exchange() -> Iterator[None]:
        yield
        met.append(now)

    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.BatchNorm1d(4))
    assert batchnorm.make_global(model, SoloGroup(), lambda: 1.0, exchange) == 2
    loss = model(torch.randn(5, 3)).square().sum()
    now = "backward"
    loss.backward()
    assert met == ["forward"] * 2 + ["backward"] * 2
    model.eval()
    model(torch.randn(5, 3))
    assert len(met) == 4, "evaluation needs no other worker"


def test_without_an_observer_statistics_are_those_of_torch():
    torch.manual_seed(0)
    own, wide = nn.BatchNorm1d(4), nn.BatchNorm1d(4)
    batchnorm.make_global(wide, SoloGroup(), lambda: 1.0)
    x = torch.randn(6, 4)
    torch.testing.assert_close(wide(x), own(x))
    batchnorm.make_local(wide)
    assert vars(wide).keys() == vars(own).keys()
