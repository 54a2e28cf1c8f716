"""Global batch normalisation computes as torch does, and tells where workers wait for each other."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import accumulate

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from echelon.comm.alone import SoloGroup
from echelon.comm.future import Future
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


SHAPES = {"1d": (6, 4), "sequences": (3, 4, 5), "2d": (3, 4, 5, 2), "3d": (2, 4, 2, 3, 2)}
LAYERS = {"1d": nn.BatchNorm1d, "sequences": nn.BatchNorm1d, "2d": nn.BatchNorm2d, "3d": nn.BatchNorm3d}


def trained(layer, x, out_gradient):
    """The output, and the gradients of the input and the parameters."""
    x = x.clone(memory_format=torch.preserve_format).requires_grad_()
    out = layer(x)
    out.backward(out_gradient)
    return [out.detach(), x.grad, *(p.grad for p in layer.parameters())]


def drawn(kind, dtype=torch.float64, layout=torch.contiguous_format):
    torch.manual_seed(1)
    x, gradient = (torch.randn(SHAPES[kind]).to(dtype) for _ in range(2))
    return (3 + 2 * x).contiguous(memory_format=layout), gradient


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("options", [{}, {"momentum": None}, {"affine": False}], ids=str)
def test_alone_it_computes_what_torch_computes(kind, options):
    x, gradient = drawn(kind)
    own, wide = (LAYERS[kind](4, dtype=torch.float64, **options) for _ in range(2))
    batchnorm.make_global(wide, SoloGroup(), lambda: 1.0)
    for _ in range(3):
        for found, expected in zip(trained(wide, x, gradient), trained(own, x, gradient), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    for name, expected in own.state_dict().items():
        torch.testing.assert_close(wide.state_dict()[name], expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
def test_the_output_and_the_gradient_have_the_layout_of_the_input(layout):
    x, gradient = drawn("2d", layout=layout)
    wide = nn.BatchNorm2d(4, dtype=torch.float64)
    batchnorm.make_global(wide, SoloGroup(), lambda: 1.0)
    out, dx, *_ = trained(wide, x, gradient)
    assert out.is_contiguous(memory_format=layout)
    assert dx.is_contiguous(memory_format=layout)
    torch.testing.assert_close(dx, trained(nn.BatchNorm2d(4, dtype=torch.float64), x, gradient)[1])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_is_normalised_in_float32_and_rounded_once(dtype):
    x, gradient = drawn("2d", dtype)
    wide = nn.BatchNorm2d(4)
    batchnorm.make_global(wide, SoloGroup(), lambda: 1.0)
    found = trained(wide, x, gradient.to(dtype))
    expected = trained(nn.BatchNorm2d(4), x.float(), gradient.to(dtype).float())
    assert [one.dtype for one in found] == [dtype, dtype, torch.float32, torch.float32]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other.to(one.dtype), rtol=2e-2, atol=2e-2)


def test_squares_do_not_cancel_where_the_mean_is_large():
    torch.manual_seed(0)
    x = 3000 + torch.randn(16, 2, 8, 8)
    moments = batchnorm._combined([batchnorm._own_moments(x)])
    exact = x.double().var((0, 2, 3), correction=0).numpy()
    assert moments.variance == pytest.approx(exact, rel=1e-6)  # squares about zero would be off by half


@pytest.mark.parametrize(
    ("mean", "about", "taken"),
    [(0.0, 0.0, True), (1.5, 1.4, True), (1.0, 0.0, True), (0.5, 30.0, False), (50.0, 49.9, False)],
)
def test_one_pass_over_the_samples_is_enough_where_it_loses_no_digits(mean, about, taken):
    torch.manual_seed(0)
    x = mean + torch.randn(16, 3, 8, 8)
    known = torch.full((3,), about)
    assert (batchnorm._moments_about(x, known, 16 * 64) is not None) == taken
    moments = batchnorm._combined([batchnorm._own_moments(x, known)])
    exact = x.double()
    assert moments.mean == pytest.approx(exact.mean((0, 2, 3)).numpy(), rel=1e-6, abs=1e-6)
    assert moments.variance == pytest.approx(exact.var((0, 2, 3), correction=0).numpy(), rel=2e-6)


@pytest.mark.parametrize("value", [0.0, 1.0, math.inf, math.nan], ids=str)
def test_channels_of_one_value_have_the_moments_of_that_value(value):
    x = torch.full((4, 2, 3), value)
    for about in (None, torch.tensor([0.3, 0.0]), torch.ones(2)):
        *moments, count = batchnorm._own_moments(x, about).tolist()
        expected = 2 * [value] + 2 * [0.0 if math.isfinite(value) else math.nan]
        assert moments == pytest.approx(expected, nan_ok=True)
        assert count == 12


class Threads(SoloGroup):
    """Workers that are threads of this process; for the two operations that batch normalisation needs."""

    def __init__(self, rank, size, barrier, room):
        super().__init__()
        self.rank, self.size, self._barrier, self._room = rank, size, barrier, room

    def all_gather(self, tensor):
        self._room[self.rank] = tensor.detach().clone()
        self._barrier.wait(20)
        parts = [part.clone() for part in self._room]
        self._barrier.wait(20)
        return parts

    def all_reduce(self, tensor, op="sum", *, priority=0):
        return Future.completed(torch.stack(self.all_gather(tensor)).sum(0))


def in_threads(shares, x, loss_of):
    """Forward and backward of one layer on workers with these shares of the samples."""
    barrier, room = threading.Barrier(len(shares)), [None] * len(shares)
    layers = [nn.BatchNorm1d(x.shape[1], dtype=x.dtype) for _ in shares]
    ends = list(accumulate(shares))

    def work(rank):
        part = shares[rank] / len(x)
        batchnorm.make_global(layers[rank], Threads(rank, len(shares), barrier, room), lambda: part)
        mine = x[ends[rank] - shares[rank] : ends[rank]].clone().requires_grad_()
        out = layers[rank](mine)
        (loss_of(out) / max(1, len(mine))).backward()
        return out.detach(), mine.grad * part, layers[rank]

    with ThreadPoolExecutor(len(shares)) as pool:
        return list(pool.map(work, range(len(shares))))


@settings(deadline=None, max_examples=25)
@given(
    shares=st.lists(st.integers(0, 4), min_size=1, max_size=4).filter(lambda shares: sum(shares) > 1),
    offset=st.floats(-1e3, 1e3),
)
def test_any_shares_of_a_batch_are_normalised_as_the_whole_batch(shares, offset):
    torch.manual_seed(sum(shares))
    x = offset + torch.randn(sum(shares), 3, 2, dtype=torch.float64)
    weights = torch.randn(3, 2, dtype=torch.float64)

    def loss_of(out):
        return (out.sin() * weights).sum()

    whole, layer = x.clone().requires_grad_(), nn.BatchNorm1d(3, dtype=x.dtype)
    expected = layer(whole)
    (loss_of(expected) / len(x)).backward()
    found = in_threads(shares, x, loss_of)
    torch.testing.assert_close(torch.cat([out for out, _, _ in found]), expected.detach())
    # The loss of a share is its mean; weighted by shares, gradients are those of the whole batch.
    torch.testing.assert_close(torch.cat([dx for _, dx, _ in found]), whole.grad, rtol=1e-7, atol=1e-9)
    for _, _, one in found:
        torch.testing.assert_close(one.running_var, layer.running_var)
