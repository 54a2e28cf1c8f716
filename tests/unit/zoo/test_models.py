"""The models: their published sizes, and the special properties of each."""

from __future__ import annotations

import pickle

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from echelon.errors import ConfigError
from echelon.zoo.dataset import DATASETS, SampleSpec
from echelon.zoo.layers import Frame
from echelon.zoo.model import MODELS
from echelon.zoo.task import count_correct, loss_of


def images(*shape: int, classes: int = 10) -> SampleSpec:
    return SampleSpec(shape=shape, dtype="float32", classes=classes, task="classify")


def tokens(context: int, vocabulary: int) -> SampleSpec:
    return SampleSpec(shape=(context,), dtype="int64", classes=vocabulary, task="next-token")


def parameters(model: str, sample: SampleSpec) -> int:
    with torch.device("meta"):  # needs no memory
        module = MODELS.build(model).build(sample)
    return sum(parameter.numel() for parameter in module.parameters())


@pytest.mark.parametrize(
    ("model", "sample", "count"),
    [
        ("lenet", images(1, 28, 28), 61_706),
        ("lenet", images(1, 8, 8), 61_706),
        ("alexnet", images(3, 224, 224, classes=1000), 61_100_840),
        ("vgg16", images(3, 224, 224, classes=1000), 138_357_544),
        ("vgg16", images(3, 224, 224, classes=3), 134_272_835),
        ("resnet18", images(3, 224, 224, classes=1000), 11_689_512),
        ("resnet18", images(3, 32, 32), 11_173_962),
        ("cnn", images(3, 32, 32), 188_810),
        ("har-cnn", images(9, 128, classes=6), 41_926),
        ("mlp(width=1024, depth=4)", images(784), 784 * 1024 + 3 * 1024**2 + 4 * 1024 + 10_250),
        ("mlp(depth=0)", images(20), 210),
        ("char-lstm", tokens(128, 65), 2 * 65 * 128 + 65 + 8 * 2 * (128**2 + 128)),
        (
            "char-transformer",
            tokens(64, 65),
            2 * 65 * 128 + 65 + 64 * 128 + 4 * (12 * 128**2 + 13 * 128) + 2 * 128,
        ),
    ],
)
def test_parameter_counts_are_as_documented(model: str, sample: SampleSpec, count: int) -> None:
    assert parameters(model, sample) == count


def test_resnet_keeps_the_size_of_a_small_image_and_shrinks_a_large_one() -> None:
    with torch.device("meta"):
        small = MODELS.build("resnet18").build(images(3, 32, 32))
        large = MODELS.build("resnet18").build(images(3, 224, 224))
        seen = {}
        for name, module, side in (("small", small, 32), ("large", large, 224)):
            module.get_submodule("layer1").register_forward_hook(
                lambda _m, args, _o, name=name: seen.update({name: args[0].shape[-1]})
            )
            module(torch.zeros(1, 3, side, side))
    assert seen == {"small": 32, "large": 56}
    assert set(small.state_dict()) == set(large.state_dict())


def test_an_8_by_8_image_is_enlarged_four_times() -> None:
    image = torch.rand(1, 1, 8, 8)
    framed = Frame(32)(image)
    assert torch.equal(framed, image.repeat_interleave(4, -1).repeat_interleave(4, -2))


def test_a_28_by_28_image_gets_a_border_of_two() -> None:
    image = torch.rand(1, 1, 28, 28)
    framed = Frame(32)(image)
    assert framed.shape == (1, 1, 32, 32)
    assert torch.equal(framed[..., 2:30, 2:30], image)
    assert framed.sum() == pytest.approx(image.sum().item(), rel=1e-5)


@pytest.mark.parametrize("model", ["char-lstm(width=16)", "char-transformer(width=16, depth=2, heads=2)"])
@pytest.mark.parametrize("changed", [0, 3, 7])
def test_a_character_model_never_looks_ahead(model: str, changed: int) -> None:
    torch.manual_seed(0)
    module = MODELS.build(model).build(tokens(8, 5))
    text = torch.randint(5, (1, 8))
    other = text.clone()
    other[0, changed] = (other[0, changed] + 1) % 5
    before, after = module(text), module(other)
    assert torch.allclose(before[:, :changed], after[:, :changed], atol=1e-6)
    later = (before[:, changed:] - after[:, changed:]).abs().amax(dim=-1)
    assert bool((later > 1e-6).all())


def test_a_transformer_takes_sequences_shorter_than_its_context() -> None:
    module = MODELS.build("char-transformer(width=16, depth=1, heads=2)").build(tokens(8, 5))
    assert module(torch.zeros(2, 3, dtype=torch.int64)).shape == (2, 3, 5)


def test_position_matters_to_a_transformer() -> None:
    torch.manual_seed(0)
    module = MODELS.build("char-transformer(width=16, depth=1, heads=2)").build(tokens(4, 5))
    logits = module(torch.zeros(1, 4, dtype=torch.int64))
    assert not torch.allclose(logits[0, 0], logits[0, 3])


@pytest.mark.parametrize("model", ["alexnet", "vgg16", "har-cnn", "char-lstm", "char-transformer"])
@pytest.mark.parametrize("dropout", ["-0.1", "1.5"])
def test_dropout_out_of_range_is_refused(model: str, dropout: str) -> None:
    with pytest.raises(ConfigError, match="dropout"):
        MODELS.build(f"{model}(dropout={dropout})")


@pytest.mark.parametrize(
    "model",
    [
        "mlp(width=0)",
        "mlp(depth=-1)",
        "cnn(width=0)",
        "har-cnn(width=0)",
        "char-lstm(width=0)",
        "char-lstm(depth=0)",
        "char-transformer(heads=0)",
        "char-transformer(width=10, heads=4)",
    ],
)
def test_impossible_sizes_are_refused(model: str) -> None:
    with pytest.raises(ConfigError):
        MODELS.build(model)


def test_dropout_is_passed_on() -> None:
    with torch.device("meta"):
        module = MODELS.build("vgg16(dropout=0.25)").build(images(3, 224, 224))
    assert [part.p for part in module.modules() if isinstance(part, nn.Dropout)] == [0.25, 0.25]


def test_dropout_of_the_transformer_acts_only_in_training() -> None:
    torch.manual_seed(0)
    module = MODELS.build("char-transformer(width=16, depth=1, heads=2, dropout=0.5)").build(tokens(8, 5))
    text = torch.zeros(1, 8, dtype=torch.int64)
    assert not torch.equal(module(text), module(text))
    module.eval()
    assert torch.equal(module(text), module(text))


@pytest.mark.parametrize(
    ("model", "sample"),
    [("lenet", images(1, 8, 8)), ("char-lstm", tokens(8, 5)), ("resnet18", images(3, 32, 32))],
)
def test_a_module_can_be_pickled(model: str, sample: SampleSpec) -> None:
    module = MODELS.build(model).build(sample)
    copy = pickle.loads(pickle.dumps(module))
    assert list(copy.state_dict()) == list(module.state_dict())


def accuracy_after(model: str, data: str, *, epochs: int, rate: float) -> float:
    """The accuracy on the test split after plain SGD with momentum in one process."""
    torch.manual_seed(0)
    splits = DATASETS.build(data).load()
    module = MODELS.build(model).build(splits.spec)
    optimizer = torch.optim.SGD(module.parameters(), lr=rate, momentum=0.9)
    loss = loss_of(splits.spec)
    for _ in range(epochs):
        for inputs, targets in DataLoader(splits.train, 32, shuffle=True, collate_fn=splits.collate):
            optimizer.zero_grad()
            loss(module(inputs), targets).backward()
            optimizer.step()
    module.eval()
    right = total = 0
    with torch.no_grad():
        for inputs, targets in DataLoader(splits.test, 500, collate_fn=splits.collate):
            correct, count = count_correct(module(inputs), targets)
            right, total = right + correct, total + count
    return right / total


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    ("model", "data", "epochs", "rate", "least"),
    [
        ("lenet", "digits", 6, 0.02, 0.95),
        ("mlp", "generated", 2, 0.05, 0.7),
        ("har-cnn", "activity(samples=4000)", 2, 0.02, 0.8),
    ],
)
def test_a_few_epochs_are_enough_to_learn(
    model: str, data: str, epochs: int, rate: float, least: float
) -> None:
    assert accuracy_after(model, data, epochs=epochs, rate=rate) > least
