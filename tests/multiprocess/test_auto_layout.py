"""`parallel="auto"` in prepare: all workers choose alike, training is exact, and the choice is recorded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import echelon
from echelon.errors import EchelonError
from echelon.observe.events import LayoutsPredicted, read_events
from echelon.parallel.layout import parse_layout


class Named(nn.Module):
    """A model that cannot be traced: it decides by values."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) if float(x.sum()) > -1e9 else x


def build(kind: str) -> nn.Module:
    torch.manual_seed(1)
    if kind == "norm":
        return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)).double()
    if kind == "named":
        return Named().double()
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def trained(kind: str, layout: str, folder: str, how: str = "prepare") -> dict[str, Any]:
    asked = {"parallel": layout} if how == "join" else {}
    session = echelon.join(record=True, runs=folder, shares="equal", seed=3, **asked)
    model = build(kind)
    optimizer = optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(40, 6, generator=generator, dtype=torch.float64)
    y = torch.randint(3, (40,), generator=generator)
    loader = DataLoader(TensorDataset(x, y), batch_size=10, shuffle=True)
    options: dict[str, Any] = {} if how == "join" else {"parallel": layout}
    torch.manual_seed(5)
    model, optimizer, loader = session.prepare(model, optimizer, loader, **options)
    drawn = float(torch.rand(()))
    for _ in session.epochs(1):
        for a, b in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(a), b).backward()
            optimizer.step()
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    session.close()
    events = [one for one in read_events(session.folder.events_of(0)) if isinstance(one, LayoutsPredicted)]
    return {"weights": weights, "events": events, "plan": session.folder.plan.read_text(), "drawn": drawn}


@pytest.mark.parametrize(
    ("kind", "how", "without"),
    [
        ("plain", "prepare", ""),
        ("plain", "join", ""),
        ("norm", "prepare", "norm"),
        ("named", "join", "traced"),
    ],
)
def test_workers_choose_alike_train_exactly_and_record_the_reason(warm_pool, tmp_path, kind, how, without):
    (alone,) = warm_pool.run(1, trained, kind, "auto", str(tmp_path / "alone"))
    found = warm_pool.run(2, trained, kind, "auto", str(tmp_path / "auto"), how)
    (event,) = found[0]["events"]
    parse_layout(event.chosen)
    assert event.chosen in event.steps_s
    assert f'parallel = "{event.chosen}"' in found[0]["plan"].replace('\\"', "'")
    assert "auto, by predicted steps" in found[0]["plan"]
    if without:
        assert [text for text in event.left_out if text.startswith("pipeline")]
        assert not event.chosen.startswith("pipeline")
    for one in found:
        for name, value in alone["weights"].items():
            assert torch.allclose(one["weights"][name].double(), value.double(), rtol=0, atol=1e-12), name
    assert found[0]["drawn"] == alone["drawn"], "measuring draws no random numbers of the script"


class Stream(IterableDataset[Tensor]):
    def __iter__(self) -> Any:
        yield from torch.randn(20, 6)


def refused(what: str) -> str:
    session = echelon.join(record=False)
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3))
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    things: dict[str, tuple[Any, ...]] = {
        "no loader": (model, optimizer),
        "a stream": (model, optimizer, DataLoader(Stream(), batch_size=4)),
        "other samples": (model, optimizer, DataLoader(TensorDataset(torch.randn(20, 5)), batch_size=4)),
    }
    try:
        session.prepare(*things[what], parallel="auto")
    except EchelonError as error:
        return str(error)
    finally:
        session.close()
    return ""


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("no loader", "1 models and 0 loaders"),
        ("a stream", "can be read only once"),
        ("other samples", "could not be measured with the loader's samples on rank 0"),
    ],
)
def test_what_cannot_be_measured_is_an_error_that_asks_for_a_layout(warm_pool, what, says):
    for text in warm_pool.run(2, refused, what):
        assert says in text
        assert "give a layout instead" in text
        assert len(text.splitlines()) == 3
