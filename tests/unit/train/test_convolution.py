"""Convolutions compute their weight gradients while statistics travel, and the gradients are torch's."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from echelon.comm.alone import SoloGroup
from echelon.train import batchnorm, convolution

LAYERS = {
    "1d": (nn.Conv1d(4, 6, 3, padding=1), (3, 4, 9)),
    "2d": (nn.Conv2d(4, 6, 3, padding=1, bias=False), (3, 4, 5, 7)),
    "3d": (nn.Conv3d(4, 6, 2), (2, 4, 3, 4, 3)),
    "stride": (nn.Conv2d(4, 6, 3, stride=2), (3, 4, 7, 7)),
    "dilation": (nn.Conv2d(4, 6, 3, dilation=2, padding=2), (3, 4, 7, 7)),
    "groups": (nn.Conv2d(4, 8, 3, groups=4), (3, 4, 5, 5)),
    "same padding": (nn.Conv2d(4, 6, 3, padding="same"), (3, 4, 5, 5)),
    "reflected": (nn.Conv2d(4, 6, 3, padding=1, padding_mode="reflect"), (3, 4, 5, 5)),
}


@pytest.fixture(autouse=True)
def every_convolution_is_worth_it(monkeypatch):
    monkeypatch.setattr(convolution, "_LEAST_WORK", 0)


def two_models(layer, channels=4):
    """Batch normalisation before a convolution, twice: torch's own, and over all workers (here one)."""
    norm = {3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}[layer.weight.dim()]
    torch.manual_seed(0)
    plain = nn.Sequential(norm(channels), nn.ReLU(inplace=True), copy.deepcopy(layer)).double()
    wide = copy.deepcopy(plain)
    batchnorm.make_global(wide, SoloGroup(), lambda: 1.0)
    return plain, wide


def gradients(model, x, passes=1, through=lambda model, x: model(x)):
    x = x.clone().requires_grad_()
    for _ in range(passes):
        through(model, x).square().sum().backward()
    return [x.grad, *(p.grad for p in model.parameters())]


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("passes", [1, 2])
def test_gradients_of_every_convolution_are_those_of_torch(kind, passes):
    layer, shape = LAYERS[kind]
    plain, wide = two_models(layer)
    x = torch.randn(shape, dtype=torch.float64)
    torch.testing.assert_close(gradients(wide, x, passes), gradients(plain, x, passes))


def test_weight_gradient_is_computed_between_sending_sums_and_receiving_them(monkeypatch):
    order: list[str] = []
    for kind, name in (
        (batchnorm._SendSums, "sums sent"),
        (convolution._WeightGradient, "weight gradient"),
        (batchnorm._Normalise, "sums received"),
    ):
        monkeypatch.setattr(kind, "backward", staticmethod(noted(kind.backward, name, order)))
    _, wide = two_models(LAYERS["2d"][0])
    gradients(wide, torch.randn(LAYERS["2d"][1], dtype=torch.float64))
    assert order == ["sums sent", "weight gradient", "sums received"]


def noted(function, name, order):
    def run(*args):
        order.append(name)
        return function(*args)

    return run


def test_only_the_first_convolution_after_a_normalisation_is_delayed():
    layers = [nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3)]
    model = nn.Sequential(*layers)
    batchnorm.make_global(model, SoloGroup(), lambda: 1.0)
    out = torch.randn(2, 4, 8, 8)
    kinds = []
    for layer in model:
        out = layer(out)
        kinds.append(type(out.grad_fn).__name__)
    assert kinds[1::2] == ["_KeepGradientBackward", "ConvolutionBackward0"]


def test_small_convolution_is_left_as_it_is(monkeypatch):
    monkeypatch.setattr(convolution, "_LEAST_WORK", 10**8)
    _, wide = two_models(LAYERS["2d"][0])
    out = wide(torch.randn(LAYERS["2d"][1], dtype=torch.float64))
    assert type(out.grad_fn).__name__ == "ConvolutionBackward0"


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_model_has_the_same_gradients(reentrant):
    layer, shape = LAYERS["2d"]
    plain, wide = two_models(layer)
    x = torch.randn(shape, dtype=torch.float64)

    def through(model, x):
        return checkpoint(model, x, use_reentrant=reentrant)

    torch.testing.assert_close(gradients(wide, x, through=through), gradients(plain, x))


def test_gradients_asked_for_by_name_and_frozen_weights_work():
    layer, shape = LAYERS["2d"]
    plain, wide = two_models(layer)
    x = torch.randn(shape, dtype=torch.float64)
    found = torch.autograd.grad(wide(x).square().sum(), [wide[2].weight, wide[0].weight])
    wanted = torch.autograd.grad(plain(x).square().sum(), [plain[2].weight, plain[0].weight])
    torch.testing.assert_close(found, wanted)
    for model in (plain, wide):
        model[2].weight.requires_grad_(False)
    torch.testing.assert_close(gradients(wide, x)[:3], gradients(plain, x)[:3])


def test_copies_and_pickles_are_torchs_own_layers_and_release_restores_them():
    plain, wide = two_models(LAYERS["2d"][0])
    for made in (copy.deepcopy(wide), pickle.loads(pickle.dumps(wide))):
        assert [type(layer) for layer in made] == [type(layer) for layer in plain]
        torch.testing.assert_close(made.state_dict(), plain.state_dict())
    batchnorm.make_local(wide)
    assert [vars(layer).keys() for layer in wide] == [vars(layer).keys() for layer in plain]
    assert [type(layer) for layer in wide] == [type(layer) for layer in plain]
