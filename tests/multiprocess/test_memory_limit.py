"""Models that do not fit are refused in prepare, with what is missing and would fit. Measured memory."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import nn, optim

import echelon
from echelon.errors import PlanError
from echelon.observe.events import MemoryUsed, read_events
from echelon.train import fitting_memory

WIDTH = 256  # a layer of 256 KiB
WIDE = 1024  # a layer of 4 MiB


def layers(width: int = WIDTH) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(4)))


class Free:
    def __init__(self, memory_bytes: float) -> None:
        self.memory_bytes = memory_bytes


def refused(layout: str, free: tuple[float, ...]) -> str:
    """What prepare says on a machine with so much free memory for each worker, in MiB."""
    session = echelon.join(record=False, shares="equal")
    real = fitting_memory.allowance
    fitting_memory.allowance = lambda _: Free(free[session.rank] * 2**20)  # type: ignore[assignment,return-value]
    try:
        model = layers()
        session.prepare(model, optim.AdamW(model.parameters()), parallel=layout)
    except PlanError as error:
        return str(error)
    finally:
        fitting_memory.allowance = real
        session.close()
    return ""


@pytest.mark.parametrize(
    ("layout", "free", "says"),
    [
        # 1 MiB of parameters, which are there already, 1 MiB of gradients, 2 MiB of states
        ("data", (3.5, 3.5), ()),
        (
            "data",
            (3.5, 1.9),
            ("rank 1 on", "4.0 MiB", "1.1 MiB are missing", "use parallel 'pipeline", "fits"),
        ),
        ("sharded(level=1)", (1.9, 1.9), ("3.0 MiB", "102.4 KiB are missing", "use parallel")),
        ("sharded(level=3)", (1.3, 1.3), ()),
        ("sharded(level=3)", (0.0, 0.0), ("2.2 MiB", "no layout of 2 workers fits", "start 6 workers")),
        ("pipeline(stages=2)", (1.1, 0.95), ()),
        ("pipeline(stages=2)", (0.9, 0.9), ("2 workers of a replica", "4.0 MiB", "204.8 KiB are missing")),
    ],
)
def test_a_model_that_does_not_fit_is_refused_with_what_is_missing(warm_pool, layout, free, says):
    one, other = warm_pool.run(2, refused, layout, free)
    assert one == other, "all workers say the same"
    assert bool(one) == bool(says)
    assert len(one.splitlines()) == (3 if says else 0)
    for part in says:
        assert part in one


def test_predicted_states_are_those_that_optimizers_make():
    for make, options in [
        ("SGD", {}),
        ("SGD", {"momentum": 0.9}),
        ("Adam", {"amsgrad": True}),
        ("RMSprop", {"momentum": 0.1, "centered": True}),
        *((one.__name__, {}) for one in fitting_memory._STATES if one is not optim.SGD),
    ]:
        model = layers()
        optimizer = getattr(optim, make)(model.parameters(), **options)
        predicted = fitting_memory.bytes_of([model], [optimizer]).states
        model(torch.randn(2, WIDTH)).sum().backward()
        optimizer.step()
        values = [
            v for state in optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor)
        ]
        assert sum(v.numel() * v.element_size() for v in values if v.dim()) == predicted, (make, options)


def trained(folder: str, layout: str) -> list[Any]:
    gc.collect()  # of earlier tests, so that this worker does not shrink meanwhile
    session = echelon.join(record=True, shares="equal", runs=folder)
    model = layers(WIDE)
    optimizer = optim.AdamW(model.parameters())
    model, optimizer = session.prepare(model, optimizer, parallel=layout)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(4, WIDE)).square().mean().backward()
        optimizer.step()
    session.close()
    events = list(read_events(session.folder.events_of(session.rank)))
    return [[one for one in events if isinstance(one, MemoryUsed)], session.folder.plan.read_text()]


@pytest.mark.parametrize("layout", ["sharded(level=2)", "pipeline(stages=2)"])
def test_predicted_and_measured_memory_are_recorded(warm_pool, tmp_path, layout):
    for found, plan in warm_pool.run(2, trained, str(tmp_path), layout):
        (used,) = found
        assert used.states_bytes == 16 * 2**20
        assert used.measured_bytes > 16 * 2**20, "at least the model, which was whole once"
        assert used.room_bytes > used.measured_bytes
        assert f"predicted for {layout}" in plan
        assert "optimizer states 16.0 MiB" in plan
