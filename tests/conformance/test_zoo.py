"""Every registered model and data set against its contract; new ones are tested automatically."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Literal

import pytest
import torch

from echelon.config.registry import Registry, Strategy, options_of
from echelon.errors import ConfigError
from echelon.zoo.dataset import DATASETS, SampleSpec, Splits
from echelon.zoo.model import MODELS
from echelon.zoo.task import loss_of


def classify(*shape: int, classes: int = 10) -> SampleSpec:
    return SampleSpec(shape=shape, dtype="float32", classes=classes, task="classify")


# The samples of each data set: most need files that a fresh machine does not have.
SAMPLES = {
    "digits": classify(1, 8, 8),
    "generated": classify(20),
    "mnist": classify(1, 28, 28),
    "fashion-mnist": classify(1, 28, 28),
    "cifar10": classify(3, 32, 32),
    "image-folder": classify(3, 224, 224, classes=7),
    "activity": classify(9, 128, classes=6),
    "text": SampleSpec(shape=(32,), dtype="int64", classes=65, task="next-token"),
}
BUILT_IN = ("digits", "generated", "activity")  # data sets that need no files
WRONG_DTYPE: dict[bool, Literal["float32", "int64"]] = {False: "int64", True: "float32"}
WRONG_TASK: dict[bool, Literal["classify", "next-token"]] = {False: "next-token", True: "classify"}
# Too large for more than one real pass: other passes run on the meta device, which computes nothing.
HEAVY = ("alexnet", "vgg16", "resnet18")

KINDS: list[tuple[Registry[Strategy], str]] = [
    (registry, name) for registry in (MODELS, DATASETS) for name in registry.names()
]
FITTING = [(model, data) for model in MODELS.names() for data in MODELS.get(model).fits]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """On a busy machine, threads of one operation wait for each other longer than they compute."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def logits_shape(sample: SampleSpec, batch: int) -> tuple[int, ...]:
    positions = sample.shape if sample.task == "next-token" else ()
    return (batch, *positions, sample.classes)


def batch_of(sample: SampleSpec, batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    if sample.task == "next-token":
        inputs = torch.randint(sample.classes, (batch, *sample.shape))
        return inputs, torch.randint(sample.classes, (batch, *sample.shape))
    return torch.randn(batch, *sample.shape), torch.randint(sample.classes, (batch,))


def without_gradient(module: torch.nn.Module) -> list[str]:
    return [name for name, parameter in module.named_parameters() if parameter.grad is None]


def refusal(model: str, sample: SampleSpec) -> ConfigError | None:
    """The error if the model does not take the sample; None if it builds."""
    try:
        with torch.device("meta"):
            MODELS.build(model).build(sample)
    except ConfigError as error:
        return error
    return None


@pytest.mark.parametrize(("registry", "name"), KINDS, ids=lambda value: str(getattr(value, "kind", value)))
def test_a_strategy_is_a_frozen_dataclass_with_name_and_help(
    registry: Registry[Strategy], name: str
) -> None:
    kind = registry.get(name)
    assert dataclasses.is_dataclass(kind)
    assert kind.__dataclass_params__.frozen  # type: ignore[attr-defined]
    assert all(field.kw_only for field in dataclasses.fields(kind))
    assert re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", name)
    help_line = (inspect.getdoc(kind) or "").partition("\n")[0]
    assert re.fullmatch(r"[A-Z0-9].{20,100}\.", help_line)
    assert not help_line.startswith(f"{kind.__name__}(")  # the default docstring of a dataclass


@pytest.mark.parametrize(("registry", "name"), KINDS, ids=lambda value: str(getattr(value, "kind", value)))
def test_default_options_can_be_written_as_json(registry: Registry[Strategy], name: str) -> None:
    defaults = {option.name: option.default for option in options_of(registry.get(name))}
    assert json.loads(json.dumps(defaults)) == defaults


def test_every_data_set_has_a_sample_in_this_file() -> None:
    assert sorted(SAMPLES) == DATASETS.names()


@pytest.mark.parametrize("name", MODELS.names())
def test_a_model_describes_suitable_samples_and_names_data_sets(name: str) -> None:
    model = MODELS.get(name)
    assert "takes" in vars(model)
    assert model.fits
    assert set(model.fits) <= set(DATASETS.names())


@pytest.mark.parametrize(("model", "data"), FITTING)
def test_logits_have_the_right_shape_and_every_parameter_gets_a_gradient(model: str, data: str) -> None:
    sample = SAMPLES[data]
    heavy = model in HEAVY
    with torch.device("meta" if heavy else "cpu"):
        module = MODELS.build(model).build(sample)
        inputs, targets = batch_of(sample, 2)
        logits = module(inputs)
        assert logits.shape == logits_shape(sample, 2)
        assert logits.dtype == torch.float32
        loss_of(sample)(logits, targets).backward()
    assert without_gradient(module) == []


@pytest.mark.parametrize("model", HEAVY)
def test_a_heavy_model_computes_finite_logits_and_gradients(model: str) -> None:
    torch.manual_seed(0)
    sample = classify(3, 64, 64, classes=3)
    module = MODELS.build(model).build(sample)
    inputs, targets = batch_of(sample, 2)
    logits = module(inputs)
    assert bool(logits.isfinite().all())
    loss_of(sample)(logits, targets).backward()
    assert without_gradient(module) == []
    assert all(bool(p.grad.isfinite().all()) for p in module.parameters() if p.grad is not None)


@pytest.mark.parametrize("name", MODELS.names())
def test_building_twice_gives_the_same_state_keys_and_values_by_seed(name: str) -> None:
    sample = SAMPLES[MODELS.get(name).fits[0]]
    if name in HEAVY:
        with torch.device("meta"):
            first, second = (MODELS.build(name).build(sample).state_dict() for _ in range(2))
        assert list(first) == list(second)
        return
    states = []
    for _ in range(2):
        torch.manual_seed(3)
        states.append(MODELS.build(name).build(sample).state_dict())
    assert list(states[0]) == list(states[1])
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])


@pytest.mark.parametrize("name", MODELS.names())
def test_an_unsuitable_sample_is_refused_with_suitable_data_sets(name: str) -> None:
    model = MODELS.get(name)
    wrong_dtype = dataclasses.replace(SAMPLES[model.fits[0]], dtype=WRONG_DTYPE[model.fits[0] == "text"])
    wrong_task = dataclasses.replace(SAMPLES[model.fits[0]], task=WRONG_TASK[model.fits[0] == "text"])
    for sample in (wrong_dtype, wrong_task):
        assert refusal(name, sample) is not None
    tried = [*SAMPLES.values(), wrong_dtype, wrong_task, classify(3, 4, 4), classify(2, 3, 4, 5)]
    for sample in tried:
        error = refusal(name, sample)
        if error is not None:
            assert model.takes in error.message
            assert str(sample) in error.message
            assert all(data in error.fix for data in model.fits)


@pytest.mark.parametrize("name", BUILT_IN)
def test_the_samples_of_a_data_set_match_its_spec(name: str) -> None:
    splits = DATASETS.build(name).load()
    assert isinstance(splits, Splits)
    assert splits.spec == SAMPLES[name]
    for split in (splits.train, splits.test):
        loader = torch.utils.data.DataLoader(split, batch_size=3, collate_fn=splits.collate)
        inputs, targets = next(iter(loader))
        assert inputs.shape == (3, *splits.spec.shape)
        assert str(inputs.dtype) == f"torch.{splits.spec.dtype}"
        assert targets.dtype == torch.int64
        assert 0 <= targets.min() <= targets.max() < splits.spec.classes


def test_listing_models_and_data_sets_imports_nothing_heavy() -> None:
    program = (
        "import sys, echelon.zoo, echelon.zoo.task\n"
        "from echelon.zoo.model import MODELS\n"
        "from echelon.zoo.dataset import DATASETS\n"
        "assert len(MODELS.describe()) >= 9 and len(DATASETS.describe()) >= 8\n"
        "heavy = {'torch', 'numpy', 'sklearn', 'PIL'} & set(sys.modules)\n"
        "sys.exit(', '.join(heavy) or 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
