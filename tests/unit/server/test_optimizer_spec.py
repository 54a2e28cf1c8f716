"""An optimizer's description is enough to build one that does the same."""

from __future__ import annotations

import msgspec
import pytest
import torch
from torch import nn

from echelon.errors import ConfigError
from echelon.server import optimizer_spec as spec

# Every optimizer of torch.optim that takes dense gradients, with options that are not their defaults.
MADE = {
    "SGD": {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
    "Adam": {"lr": 0.01, "betas": (0.8, 0.95), "amsgrad": True},
    "AdamW": {"lr": torch.tensor(0.01), "weight_decay": 0.2},
    "Adagrad": {"lr": 0.1, "initial_accumulator_value": 0.5},
    "RMSprop": {"lr": 0.01, "centered": True, "momentum": 0.5},
    "Adadelta": {"rho": 0.8},
    "Adamax": {"lr": 0.01},
    "NAdam": {"lr": 0.01},
    "RAdam": {"lr": 0.01},
    "ASGD": {"lr": 0.1, "t0": 2},
    "Rprop": {"etas": (0.4, 1.3)},
    "Adafactor": {"lr": 0.05, "d": 2.0},
}
WHOLE = {"Adafactor", "Muon", "SparseAdam", "LBFGS"}


def sent(description):
    """As it arrives at a server."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(description))


def weights():
    made = torch.Generator().manual_seed(2)
    return [torch.randn(shape, generator=made, requires_grad=True) for shape in [(6, 4), (6,), (3, 6)]]


def trained(optimizer, parameters):
    made = torch.Generator().manual_seed(3)
    for _ in range(5):
        for p in parameters:
            p.grad = torch.randn(p.shape, generator=made)
        optimizer.step()
    return [p.detach().clone() for p in parameters]


@pytest.mark.parametrize("name", MADE)
def test_an_optimizer_built_from_its_spec_takes_the_same_steps(name):
    kind = getattr(torch.optim, name)
    own, theirs = weights(), weights()
    described = kind([{"params": own[:2]}, {"params": own[2:], "lr": 0.003}], **MADE[name])
    built = spec.build(sent(spec.describe(described)), theirs, [0, 0, 1])
    assert type(built) is kind
    for one, other in zip(trained(described, own), trained(built, theirs), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)  # a learning rate may be a tensor


def test_options_that_change_are_updated():
    own, theirs = weights(), weights()
    described = torch.optim.SGD(own, lr=0.1, momentum=0.9)
    built = spec.build(sent(spec.describe(described)), theirs, [0, 0, 0])
    described.param_groups[0].update(lr=0.5, momentum=0.1)
    spec.update(built, sent(spec.settings(described)))
    for one, other in zip(trained(described, own), trained(built, theirs), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", sorted({*MADE, *WHOLE} - {"LBFGS"}))
def test_element_wise_optimizers_are_recognised(name):
    kind = getattr(torch.optim, name)
    parameter = nn.Parameter(torch.ones(3, 2))
    described = spec.describe(kind([parameter], lr=0.1))
    assert spec.updates_elements(described) == (name not in WHOLE)


@pytest.mark.parametrize("name", sorted(set(MADE) - WHOLE))
def test_element_wise_step_of_split_parameters_equals_a_whole_step(name):
    """As the server does for a parameter that is split."""
    options = MADE[name]
    (whole,) = weights()[:1]
    parts = [
        part.detach().clone().requires_grad_() for part in whole.detach().reshape(-1).split([5, 12, 7])
    ]
    kind = getattr(torch.optim, name)
    one, other = kind([whole], **options), kind(parts, **options)
    for step in range(5):
        whole.grad = torch.randn(whole.shape, generator=torch.Generator().manual_seed(step))
        for part, gradient in zip(parts, whole.grad.reshape(-1).split([5, 12, 7]), strict=True):
            part.grad = gradient.clone()
        one.step()
        other.step()
    torch.testing.assert_close(torch.cat(parts), whole.reshape(-1), rtol=1e-6, atol=1e-7)


def test_parameters_of_a_subclass_from_another_module_are_never_split():
    class Mine(torch.optim.SGD):
        pass

    Mine.__qualname__ = "SGD"
    Mine.__module__ = "mine"
    assert not spec.updates_elements(spec.describe(Mine(weights(), lr=0.1)))


def test_an_optimizer_that_a_server_cannot_import_is_refused():
    class Local(torch.optim.SGD):
        pass

    with pytest.raises(ConfigError, match="defined in the script") as caught:
        spec.describe(Local(weights(), lr=0.1))
    assert "module of its own" in str(caught.value.fix)
    with pytest.raises(ConfigError, match="LBFGS evaluates the loss"):
        spec.describe(torch.optim.LBFGS(weights()))


def test_a_module_that_is_missing_on_the_server_is_named():
    with pytest.raises(ConfigError, match=r"cannot import optimizer no_such_module\.Mine"):
        spec.build(
            {"module": "no_such_module", "name": "Mine", "defaults": {}, "groups": [{}]},
            weights(),
            [0, 0, 0],
        )
    with pytest.raises(ConfigError, match=r"cannot import optimizer torch\.optim\.Mine"):
        spec.build(
            {"module": "torch.optim", "name": "Mine", "defaults": {}, "groups": [{}]}, weights(), [0, 0, 0]
        )


class Wants(torch.optim.SGD):
    """Some optimizers have no defaults, and an argument that is no option of a group."""

    def __init__(self, params, lr, *, secret=None):
        super().__init__(params, lr=lr)


def test_an_optimizer_whose_constructor_has_no_defaults_gets_its_options(monkeypatch):
    monkeypatch.setattr(spec.importlib, "import_module", lambda name: type("mine", (), {"Wants": Wants}))
    built = spec.build(sent(spec.describe(Wants(weights(), 0.25))), weights(), [0, 0, 0])
    assert type(built) is Wants
    assert built.param_groups[0]["lr"] == 0.25
    described = spec.describe(Wants(weights(), 0.25))
    with pytest.raises(ConfigError, match=r"cannot build optimizer Wants: .*'lr'"):
        spec.build({**described, "defaults": {}}, weights(), [0, 0, 0])


def test_an_option_that_is_not_a_number_is_refused_by_name():
    optimizer = torch.optim.SGD(weights(), lr=0.1)
    optimizer.param_groups[0]["schedule"] = lambda step: 0.1
    with pytest.raises(ConfigError, match="option schedule of the optimizer is a function"):
        spec.settings(optimizer)
