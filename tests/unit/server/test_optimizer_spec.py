"""An optimizer's description is enough to build one that does the same."""

from __future__ import annotations

import sys

import msgspec
import pytest
import torch
from torch import nn

from echelon.config import allowed
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


@pytest.fixture(autouse=True)
def nothing_registered(monkeypatch):
    monkeypatch.setattr(spec, "_registered", {})
    monkeypatch.setattr(spec, "_words", {})
    monkeypatch.setattr(allowed, "_given", set())


def test_parameters_of_a_subclass_from_another_module_are_never_split():
    class Mine(torch.optim.SGD):
        pass

    Mine.__qualname__ = "SGD"
    Mine.__module__ = "mine"
    spec.register_optimizer(Mine)
    assert not spec.updates_elements(spec.describe(Mine(weights(), lr=0.1)))


def test_an_optimizer_that_is_not_registered_is_refused_on_the_worker():
    class Local(torch.optim.SGD):
        pass

    with pytest.raises(ConfigError, match=r"neither of torch\.optim nor registered") as caught:
        spec.describe(Local(weights(), lr=0.1))
    assert "echelon.register_optimizer before join" in str(caught.value.fix)
    with pytest.raises(ConfigError, match="LBFGS evaluates the loss"):
        spec.describe(torch.optim.LBFGS(weights()))


def test_a_registered_optimizer_of_the_script_itself_is_built():
    @spec.register_optimizer
    class Local(torch.optim.SGD):
        pass

    assert type(spec.build(sent(spec.describe(Local(weights(), lr=0.5))), weights(), [0, 0, 0])) is Local


def test_only_classes_of_optimizers_can_be_registered():
    with pytest.raises(ConfigError, match="is not a class of optimizers"):
        spec.register_optimizer(print)


@pytest.fixture
def trap(tmp_path, monkeypatch):
    """A module that leaves a marker when it is imported, and another when its function is called."""
    (tmp_path / "trap.py").write_text(
        "from pathlib import Path\n"
        "import torch\n"
        "Path(__file__).with_name('imported').touch()\n"
        "def run(*args, **options):\n    Path(__file__).with_name('called').touch()\n"
        "class Mine(torch.optim.SGD): pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    sys.modules.pop("trap", None)


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("trap", "run"),
        ("trap", "Mine"),
        ("os", "system"),
        ("torch.optim", "lr_scheduler"),
        ("torch.optim.sgd", "torch"),
        ("torch.optim.optimizer", "Optimizer"),
        ("torch.optim.sgd", "Adam"),
        (None, ["SGD"]),
    ],
)
def test_nothing_that_a_message_names_is_imported_or_called(trap, module, name):
    made = {"module": module, "name": name, "defaults": {}, "groups": [{}]}
    with pytest.raises(ConfigError, match=r"neither of torch\.optim nor registered"):
        spec.build(sent(made), weights(), [0, 0, 0])
    assert not (trap / "imported").exists()
    assert not (trap / "called").exists()


def test_an_optimizer_that_the_user_named_is_imported(trap, monkeypatch):
    made = {"module": "trap", "name": "Mine", "defaults": {"lr": 0.5}, "groups": [{}]}
    monkeypatch.setenv("ECHELON_ALLOW", "trap:Mine trap:run no_such_module:Mine")
    assert type(spec.build(made, weights(), [0, 0, 0])).__name__ == "Mine"
    with pytest.raises(ConfigError, match="is not a class of optimizers"):
        spec.build({**made, "name": "run"}, weights(), [0, 0, 0])
    assert not (trap / "called").exists()
    with pytest.raises(ConfigError, match=r"cannot import optimizer no_such_module\.Mine"):
        spec.build({**made, "module": "no_such_module"}, weights(), [0, 0, 0])


class Wants(torch.optim.SGD):
    """Some optimizers have no defaults, and an argument that is no option of a group."""

    def __init__(self, params, lr, *, secret=None):
        super().__init__(params, lr=lr)


def test_an_optimizer_whose_constructor_has_no_defaults_gets_its_options():
    spec.register_optimizer(Wants)
    built = spec.build(sent(spec.describe(Wants(weights(), 0.25))), weights(), [0, 0, 0])
    assert type(built) is Wants
    assert built.param_groups[0]["lr"] == 0.25
    described = spec.describe(Wants(weights(), 0.25))
    with pytest.raises(ConfigError, match=r"cannot build optimizer Wants: .*'lr'"):
        spec.build({**described, "defaults": {}}, weights(), [0, 0, 0])


WRONG = [
    {"lr": {"a": 1}},
    {"lr": "0.1"},
    {"lr": b"x"},
    {"betas": [[1, 2]]},
    {"betas": ["a"]},
    {"betas": [0.1] * 1000},
    {"params": [1.0]},
    {"__class__": 1},
    [],
    None,
]


@pytest.mark.parametrize("options", WRONG)
def test_options_of_a_wrong_type_are_refused(options):
    made = spec.describe(torch.optim.Adam(weights()))
    with pytest.raises(ConfigError):
        spec.build(sent({**made, "groups": [options]}), weights(), [0, 0, 0])
    with pytest.raises(ConfigError):
        spec.update(torch.optim.Adam(weights()), sent([options]))


def test_texts_are_options_only_if_they_were_registered():
    class Worded(torch.optim.SGD):
        def __init__(self, params, lr=0.1, how="plain"):
            super().__init__(params, lr=lr)
            self.defaults["how"] = how
            self.param_groups[0]["how"] = how

    spec.register_optimizer(Worded, words=["plain"])
    made = sent(spec.describe(Worded(weights())))
    assert spec.build(made, weights(), [0, 0, 0]).param_groups[0]["how"] == "plain"
    with pytest.raises(ConfigError, match="option how of the optimizer cannot be 'other'"):
        spec.build({**made, "groups": [{"how": "other"}]}, weights(), [0, 0, 0])


def test_names_of_parameter_groups_stay_on_the_worker():
    named = torch.optim.SGD([{"params": weights(), "name": "all", "param_names": ["a", "b", "c"]}], lr=0.1)
    assert not {"name", "param_names"} & set(spec.settings(named)[0])
    spec.build(sent(spec.describe(named)), weights(), [0, 0, 0])


def test_an_option_that_is_not_a_number_is_refused_by_name():
    optimizer = torch.optim.SGD(weights(), lr=0.1)
    optimizer.param_groups[0]["schedule"] = lambda step: 0.1
    with pytest.raises(ConfigError, match="option schedule of the optimizer is a function"):
        spec.settings(optimizer)
