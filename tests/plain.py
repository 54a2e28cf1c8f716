"""The same script in plain PyTorch and on several workers, and the comparison of their results.

    def script(session, journal):            # at the top of a test module, as a user would write it
        model, optimizer, loader = session.prepare(...)
        for epoch in session.epochs(7):
            ...
            journal.note(loss, len(x))
        return model

With `Plain()` for a session the script is plain PyTorch in one process: that is the reference. A test
module runs its scripts in warm workers through `in_session`, and compares with `assert_same`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import echelon

# The number of workers, and how they join. In the last one the smallest share is a single sample.
CLUSTERS: dict[str, tuple[int, dict[str, Any]]] = {
    "two-equal": (2, {}),
    "two-unequal": (2, {"shares": (3, 1), "transport": "c10d"}),
    "four-equal": (4, {"transport": "c10d"}),
    "four-unequal": (4, {"shares": (4, 3, 2, 1)}),
}


class Plain:
    """A stand-in for the session of a script that runs in plain PyTorch."""

    rank = 0
    world_size = 1

    def prepare(self, *things: Any, **options: Any) -> Any:
        return things[0] if len(things) == 1 else things

    def epochs(self, count: int) -> Iterable[int]:
        return range(count)

    def accumulate(self, active: bool = True) -> AbstractContextManager[None]:
        return nullcontext()

    def weigh(self, count: float) -> None:
        pass


class Journal:
    """The losses and figures that a script notes."""

    def __init__(self) -> None:
        self.sums: list[tuple[float, float]] = []
        self.figures: list[float] = []

    def note(self, loss: Tensor, count: float) -> None:
        """The loss of one batch: a mean over so many."""
        self.sums.append((float(loss.detach()) * count, float(count)))

    def note_sum(self, loss: Tensor) -> None:
        """The loss of one batch: a sum."""
        self.sums.append((float(loss.detach()), 0.0))

    def note_figure(self, value: Tensor | float) -> None:
        """A number that must be the same on all workers."""
        self.figures.append(float(value))


@dataclass
class Trained:
    """The results of a script: losses of the global batches, figures, and final model states."""

    losses: list[float]
    figures: list[float]
    state: dict[str, Tensor]


@cache
def plainly(script: Callable[..., Any], *args: Any) -> Trained:
    """Run the script in plain PyTorch."""
    journal = Journal()
    return _trained(journal, journal.sums, script(Plain(), journal, *args))


def in_session(script: Callable[..., Any], options: Mapping[str, Any], *args: Any) -> Trained:
    """Run the script as one of the workers that there are; they join with these options."""
    with echelon.join(record=False, round_timeout_s=90, **options) as session:
        journal = Journal()
        models = script(session, journal, *args)
        sums = session.all_reduce(torch.tensor(journal.sums, dtype=torch.float64))
        return _trained(journal, sums.tolist(), models)


def _trained(journal: Journal, sums: Iterable[tuple[float, float]], models: Any) -> Trained:
    models = [models] if isinstance(models, nn.Module) else models
    state = {
        f"{index}.{name}": value.detach().clone()
        for index, model in enumerate(models)
        for name, value in model.state_dict().items()
    }
    return Trained([total / (count or 1.0) for total, count in sums], journal.figures, state)


def assert_same(reference: Trained, workers: list[Trained], *, rtol: float) -> None:
    """All workers ended with the same bits, and those are the reference's to float tolerance."""
    assert len(reference.losses) >= 30, "too few steps to tell"
    first = workers[0]
    for worker in workers:
        assert_identical(worker, first)
    assert first.state.keys() == reference.state.keys()
    close = {"rtol": rtol, "atol": rtol / 10}
    torch.testing.assert_close(torch.tensor(first.losses), torch.tensor(reference.losses), **close)
    torch.testing.assert_close(torch.tensor(first.figures), torch.tensor(reference.figures), **close)
    for name, value in reference.state.items():
        torch.testing.assert_close(
            first.state[name], value, **close, msg=lambda text, n=name: f"{n}: {text}"
        )


def assert_identical(one: Trained, other: Trained) -> None:
    """The same to the bit."""
    assert one.losses == other.losses
    assert one.figures == other.figures
    assert one.state.keys() == other.state.keys()
    for name, value in one.state.items():
        assert torch.equal(value, other.state[name]), name


def examples(count: int = 52, *, features: int = 8, dtype: torch.dtype = torch.float64) -> TensorDataset:
    """A small problem with three classes, always the same.

    52 samples in batches of 12 leave 4: nobody of four workers is without a sample in the last batch.
    """
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(count, features, generator=draw, dtype=torch.float64)
    y = (x[:, :3] + 0.5 * torch.randn(count, 3, generator=draw, dtype=torch.float64)).argmax(1)
    return TensorDataset(x.to(dtype), y)


def seed_weights(session: Any) -> None:
    """Every worker begins with different weights; training must start from the leader's."""
    torch.manual_seed(3 + 100 * session.rank)


def network(session: Any, *, features: int = 8, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    """A small classifier."""
    seed_weights(session)
    return nn.Sequential(nn.Linear(features, 16), nn.Tanh(), nn.Linear(16, 3)).to(dtype)
