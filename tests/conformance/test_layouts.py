"""Every way to spread a model over workers trains it as one process does, to float64 rounding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import echelon
from echelon.parallel.dimension import DIMENSIONS
from echelon.zoo.dataset import SampleSpec
from echelon.zoo.model import MODELS
from echelon.zoo.task import loss_of

SAMPLES, BATCH, CLASSES = 44, 10, 3
CLOSE = 1e-12

# Layouts by their number of workers; `exact masks`: one replica draws the numbers that one process draws.
LAYOUTS = {
    "pipeline(stages=2, micro=3)": 2,
    "pipeline(stages=4)": 4,
    "pipeline(stages=2, schedule=1f1b, micro=4)": 2,
    "pipeline(stages=4, schedule=1f1b, micro=6, ahead=1)": 4,
    "pipeline(stages=3, schedule=filled, micro=5)": 3,
    "pipeline(stages=2, schedule=interleaved, micro=3)": 2,
    'pipeline(schedule=interleaved, cuts="1,2,3", micro=5, ahead=1, recompute=true)': 2,
    'pipeline(stages=2, cuts="1", micro=10, recompute=true)': 2,
    "data": 2,
    "sharded(level=1)": 2,
    'sharded(level=2, shares="3,1,2")': 3,
    'sharded(level=3, shares="1,3")': 2,
    "sharded(level=3)": 4,
    "sharded(level=2, workers=2) * data": 4,
    "pipeline(stages=2) * data": 4,
    "data * pipeline(stages=2, micro=2)": 4,
    "pipeline(stages=2) * sharded(level=1)": 4,
    'sharded(level=2, workers=2, shares="3,1") * pipeline(stages=2, schedule=filled)': 4,
    "pipeline(stages=2, schedule=1f1b, micro=3) * sharded(level=3)": 4,
    "pipeline(stages=2, schedule=interleaved, micro=3) * sharded(level=3)": 4,
    'pipeline(stages=1, recompute=true) * sharded(level=3, shares="1,2") * data': 4,
    "pipeline(stages=1, schedule=1f1b, samples=2) * data": 2,
    "threads(replicas=3)": 1,
    "threads(replicas=2) * data": 2,
}
every_layout = pytest.mark.parametrize(("layout", "workers"), LAYOUTS.items())
one_replica = pytest.mark.parametrize(
    ("layout", "workers"),
    [
        (text, count)
        for text, count in LAYOUTS.items()
        if text.startswith(("pipeline", "threads")) and "*" not in text
    ],
)


class Residual(nn.Module):
    """A loop over a ModuleList, connections that skip layers, a shared layer, a parameter of its own."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.entry = nn.Linear(6, 8)
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])
        self.layers.append(self.layers[0])
        self.drop = nn.Dropout(dropout)
        self.scale = nn.Parameter(torch.ones(8))
        self.exit = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = first = self.entry(x)
        for layer in self.layers:
            h = h + torch.tanh(layer(self.drop(h) * self.scale))
        return self.exit(h + first)


def build(kind: str, dropout: float) -> nn.Module:
    torch.manual_seed(1)
    if kind == "residual":
        return Residual(dropout).double()
    return nn.Sequential(
        nn.Linear(6, 16),
        nn.Tanh(),
        nn.Dropout(dropout),
        nn.Sequential(nn.Linear(16, 13), nn.ReLU(inplace=True)),
        nn.Dropout(dropout),
        nn.Linear(13, CLASSES),
    ).double()


def samples() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(SAMPLES, 6, generator=generator, dtype=torch.float64)
    return x, torch.randint(CLASSES, (SAMPLES,), generator=generator)


def train(
    kind: str,
    layout: str | None,
    dropout: float = 0.0,
    folder: str = "",
    epochs: int = 2,
    load: bool = False,
    shares: Any = "equal",
) -> tuple[list[float], dict[str, Tensor]]:
    """Two epochs: clipping, accumulation, a scheduler, an evaluation; losses and weights."""
    session = echelon.join(record=False, shares=shares)
    torch.manual_seed(3)
    model = build(kind, dropout)
    torch.manual_seed(4)
    x, y = samples()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    loader = DataLoader(TensorDataset(x, y), batch_size=BATCH, shuffle=True)
    options: dict[str, Any] = {"parallel": layout} if layout else {}
    model, optimizer, loader, scheduler = session.prepare(model, optimizer, loader, scheduler, **options)
    if load:
        session.load(folder)
    losses = []
    for _ in session.epochs(epochs):
        model.train()
        for index, (a, b) in enumerate(loader):
            with session.accumulate(index == 1):
                loss = nn.functional.cross_entropy(model(a), b)
                loss.backward()
            told = session.all_reduce(loss.detach().reshape(1), op="mean", weight=float(len(a)))
            losses.append(float(told))
            if index != 1:
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
        scheduler.step()
        model.eval()
        with torch.no_grad():
            losses.append(float(nn.functional.cross_entropy(model(x), y)))
        if folder and not load:
            session.save(folder)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    session.close()
    return losses, state


def distance(
    one: tuple[list[float], dict[str, Tensor]], other: tuple[list[float], dict[str, Tensor]]
) -> float:
    assert list(one[1]) == list(other[1])
    assert len(one[0]) == len(other[0])
    weights = max(float((one[1][name] - other[1][name]).abs().max()) for name in one[1])
    return max(weights, *(abs(a - b) for a, b in zip(one[0], other[0], strict=True)))


def test_every_dimension_has_a_layout_here() -> None:
    assert all(any(name in layout for layout in LAYOUTS) for name in DIMENSIONS.names())


@every_layout
@pytest.mark.parametrize("kind", ["sequential", "residual"])
def test_losses_and_weights_are_those_of_one_process(warm_pool, kind, layout, workers):
    alone = warm_pool.run(1, train, kind, None)[0]
    for found in warm_pool.run(workers, train, kind, layout, timeout_s=60):
        assert distance(found, alone) < CLOSE


@pytest.mark.parametrize(
    "layout",
    [
        "pipeline(stages=2, schedule=1f1b) * data",
        "sharded(level=3)",
        "pipeline(stages=2, micro=3) * sharded(level=3)",
    ],
)
def test_unequal_shares_of_a_batch_are_weighed(warm_pool, layout):
    (alone,) = warm_pool.run(1, train, "sequential", None)
    for found in warm_pool.run(
        4, train, "sequential", layout, 0.0, "", 2, False, (3, 3, 1, 1), timeout_s=60
    ):
        assert distance(found, alone) < CLOSE


@one_replica
@pytest.mark.parametrize("kind", ["sequential", "residual"])
def test_one_replica_draws_the_dropout_masks_of_one_process(warm_pool, kind, layout, workers):
    alone = warm_pool.run(1, train, kind, None, 0.3)[0]
    for found in warm_pool.run(workers, train, kind, layout, 0.3, timeout_s=60):
        assert distance(found, alone) < CLOSE


@every_layout
def test_a_checkpoint_of_a_layout_continues_in_one_process_and_back(
    warm_pool, layout, workers, tmp_path: Path
):
    whole = warm_pool.run(1, train, "sequential", None, 0.0, "", 3)[0]
    folder = str(tmp_path / "of-layout")
    warm_pool.run(workers, train, "sequential", layout, 0.0, folder, 2, timeout_s=60)
    (found,) = warm_pool.run(1, train, "sequential", None, 0.0, folder, 3, True)
    assert distance((found[0], found[1]), (whole[0][-len(found[0]) :], whole[1])) < CLOSE
    folder = str(tmp_path / "of-one")
    warm_pool.run(1, train, "sequential", None, 0.0, folder, 2)
    for found in warm_pool.run(workers, train, "sequential", layout, 0.0, folder, 3, True, timeout_s=60):
        assert distance((found[0], found[1]), (whole[0][-len(found[0]) :], whole[1])) < CLOSE


ZOO = {"mlp": "digits", "lenet": "digits", "cnn": "digits", "char-transformer": "text", "char-lstm": "text"}
SPECS = {
    "digits": SampleSpec(shape=(1, 8, 8), dtype="float32", classes=10, task="classify"),
    "text": SampleSpec(shape=(6,), dtype="int64", classes=11, task="next-token"),
}


def zoo_model(name: str) -> tuple[nn.Module, Tensor, Tensor]:
    """A small model of the zoo without dropout, and a batch for it."""
    spec = SPECS[ZOO[name]]
    torch.manual_seed(1)
    model = MODELS.build(name).build(spec).double()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    generator = torch.Generator().manual_seed(2)
    if spec.dtype == "int64":
        tokens = torch.randint(spec.classes, (12, *spec.shape), generator=generator)
        return model, tokens, tokens.roll(-1, 1)
    x = torch.randn(12, *spec.shape, generator=generator, dtype=torch.float64)
    return model, x, torch.randint(spec.classes, (12,), generator=generator)


def train_zoo(layout: str | None, replicas: int) -> dict[str, dict[str, Tensor]]:
    """The weights of each model after three steps."""
    found = {}
    for name in ZOO:
        session = echelon.join(record=False, shares="equal")
        model, x, y = zoo_model(name)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        options: dict[str, Any] = {"parallel": layout} if layout else {}
        model, optimizer = session.prepare(model, optimizer, random="same", **options)
        begin, end = 0, len(x)
        if layout and layout.startswith("sharded"):
            begin, end = session.rank * len(x) // replicas, (session.rank + 1) * len(x) // replicas
        for _ in range(3):
            output = model(x[begin:end])
            optimizer.zero_grad()
            loss_of(SPECS[ZOO[name]])(output, y[begin:end]).backward()
            optimizer.step()
        found[name] = {key: value.clone() for key, value in model.state_dict().items()}
        session.close()
    return found


@pytest.mark.parametrize(
    "layout",
    [
        "pipeline(stages=2)",
        "pipeline(stages=2, schedule=1f1b)",
        "sharded(level=1)",
        'sharded(level=2, shares="2,1")',
        "sharded(level=3)",
    ],
)
def test_models_of_the_zoo_get_the_weights_of_one_process(warm_pool, layout):
    (alone,) = warm_pool.run(1, train_zoo, None, 1)
    for found in warm_pool.run(2, train_zoo, layout, 2, timeout_s=90):
        for name, weights in alone.items():
            for key, value in weights.items():
                assert torch.allclose(found[name][key], value, rtol=0, atol=CLOSE), (name, key)
