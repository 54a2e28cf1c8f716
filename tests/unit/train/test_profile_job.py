"""What profiling finds, and that it leaves no trace."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from echelon.errors import ModelError
from echelon.train.profile_job import profile_model


def two_layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(64, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Dropout(), nn.Linear(128, 8)
    )


def losses(model: nn.Module) -> Callable[[int], Callable[[], Tensor]]:
    def loss_of(size: int) -> Callable[[], Tensor]:
        return lambda: model(torch.randn(size, 64)).square().mean()

    return loss_of


def test_profiling_leaves_weights_states_gradients_modes_and_random_numbers_as_they_were():
    model = two_layers()
    optimizer = torch.optim.Adam(model.parameters())
    losses(model)(4)().backward()
    optimizer.step()
    model.eval()
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    gradients = [p.grad.clone() for p in model.parameters()]
    numbers = torch.get_rng_state()
    profile_model("two", model, losses(model), optimizer, batch=8, limit_s=0.05)
    assert torch.equal(torch.get_rng_state(), numbers)
    assert not model.training
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[0][name]), name
    for p, gradient in zip(model.parameters(), gradients, strict=True):
        assert torch.equal(p.grad, gradient)
    for index, state in optimizer.state_dict()["state"].items():
        for name, value in state.items():
            assert torch.equal(value, before[1]["state"][index][name])


def test_an_optimizer_without_states_has_none_afterwards():
    model = two_layers()
    optimizer = torch.optim.Adam(model.parameters())
    profile_model("two", model, losses(model), optimizer, batch=8, limit_s=0.05)
    assert not optimizer.state


def test_every_trained_parameter_is_a_layer_with_its_bytes_factors_and_time():
    model = two_layers()
    model[0].bias.requires_grad_(False)
    found = profile_model("two", model, losses(model), None, batch=8, limit_s=0.05)
    assert [layer.name for layer in found.layers] == [
        "0.weight",
        "1.weight",
        "1.bias",
        "4.weight",
        "4.bias",
    ]
    assert found.gradient_bytes == 4 * (64 * 128 + 2 * 128 + 128 * 8 + 8)
    assert found.layers[0].factors == (128, 64)
    assert found.layers[1].factors == (0, 0)
    first, *_, last, _ = (layer.ready_at for layer in found.layers)
    assert 0 < last < first <= 1
    assert found.exchanges == 2
    assert found.cost.apply_s == 0


def test_rows_count_the_positions_of_a_sequence():
    model = nn.Sequential(nn.Linear(4, 4))
    found = profile_model(
        "rows",
        model,
        lambda size: lambda: model(torch.randn(size, 7, 4)).sum(),
        None,
        batch=4,
        limit_s=0.05,
    )
    assert [layer.rows for layer in found.layers] == [7, 1]


def test_memory_grows_with_samples_by_what_forward_keeps():
    model = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 8))
    found = profile_model("kept", model, losses(model), None, batch=8, limit_s=0.05)
    kept = 4 * (64 + 128 + 8)  # inputs, the output of tanh, and what is squared
    assert found.sample_bytes == kept
    assert found.base_bytes >= 3 * found.gradient_bytes


def test_a_larger_batch_costs_more():
    model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512))
    found = profile_model("grows", model, losses(model), None, batch=256, limit_s=0.3)
    assert found.cost.per_sample_s > 0
    assert found.cost.at(256) > found.cost.at(1) > 0


def test_a_loss_without_a_gradient_is_refused():
    model = two_layers()
    with pytest.raises(ModelError, match="loss with a gradient"):
        profile_model("none", model, lambda size: lambda: torch.zeros(()), None, batch=4)


def test_weights_are_restored_after_an_error():
    model = two_layers()
    before = copy.deepcopy(model.state_dict())

    def loss_of(size: int) -> Callable[[], Tensor]:
        if size > 2:
            raise ValueError("no data")
        return losses(model)(2)

    with pytest.raises(ValueError, match="no data"):
        profile_model("fails", model, loss_of, None, batch=8, limit_s=0.05)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
