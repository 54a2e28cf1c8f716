"""Divided states on real workers: what a loop may do, how much memory is held, what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

import echelon
from echelon.errors import EchelonError
from echelon.observe.events import StepEnded, read_events

X = torch.randn(8, 4, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
LEVELS = (1, 2, 3)


class Odd(nn.Module):
    """Tied weights, a parameter that nobody uses, attention, an LSTM, batch normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.entry = nn.Linear(6, 6)
        self.again = nn.Linear(6, 6)
        self.again.weight = self.entry.weight
        self.unused = nn.Linear(2, 2)
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.memory = nn.LSTM(6, 6, batch_first=True)
        self.norm = nn.BatchNorm1d(4)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.again(torch.tanh(self.entry(x))))
        h = h + self.attention(h, h, h, need_weights=False)[0]
        return self.frozen(self.norm(self.memory(h)[0]))


def one_step(model: nn.Module, optimizer: optim.Optimizer, x: Tensor) -> None:
    """Gradients are set to zero between forward and backward, as many scripts do."""
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def two_backward_passes(model: nn.Module, optimizer: optim.Optimizer, x: Tensor) -> None:
    first, second = model(x).square().mean(), model(x.flip(0)).sin().mean()
    first.backward()
    second.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)


def gradients_that_stay(model: nn.Module, optimizer: optim.Optimizer, x: Tensor) -> None:
    model(x).square().mean().backward()
    optimizer.step()


LOOPS = {loop.__name__: loop for loop in (one_step, two_backward_passes, gradients_that_stay)}


def trained(level: int, loop: str, steps: int = 3) -> tuple[dict[str, Tensor], dict[str, int], int]:
    """Weights after some steps; then elements of parameters, and of optimizer states, on this worker."""
    session = echelon.join(record=False, shares="equal")
    torch.manual_seed(1)
    model = Odd().double()
    optimizer = optim.AdamW(model.parameters(), lr=0.02)
    options: dict[str, Any] = {"parallel": f"sharded(level={level})"} if level else {}
    model, optimizer = session.prepare(model, optimizer, **options)
    half = len(X) // session.world_size
    own = X[session.rank * half : (session.rank + 1) * half]
    act: Callable[..., None] = LOOPS[loop]
    for _ in range(steps):
        act(model, optimizer, own)
    held = {name: p.untyped_storage().nbytes() // 8 for name, p in model.named_parameters()}
    states = sum(
        value.numel() for state in optimizer.state.values() for value in state.values() if value.dim()
    )
    found = {name: value.clone() for name, value in model.state_dict().items()}
    session.close()
    return found, held, states


@pytest.mark.parametrize("loop", LOOPS)
def test_odd_models_and_loops_train_as_with_data_parallelism(warm_pool, loop):
    (alone, whole, states), *_ = warm_pool.run(1, trained, 0, loop)
    for level in LEVELS:
        parts = warm_pool.run(2, trained, level, loop)
        for found, held, _ in parts:
            for name, value in alone.items():
                assert torch.allclose(found[name].double(), value.double(), rtol=0, atol=1e-12), (
                    level,
                    name,
                )
            if level == 3:
                assert held["memory.weight_ih_l0"] == whole["memory.weight_ih_l0"] // 2
        assert sum(part[2] for part in parts) == states


def refused(optimizer: str, layout: str) -> tuple[str, str]:
    session = echelon.join(record=False)
    model = nn.Linear(4, 4)
    try:
        session.prepare(model, getattr(optim, optimizer)(model.parameters()), parallel=layout)
    except EchelonError as error:
        return error.message, error.fix
    finally:
        session.close()
    return "", ""


@pytest.mark.parametrize(
    ("optimizer", "layout", "says", "fix"),
    [
        ("LBFGS", "sharded(level=1)", "LBFGS may compute with whole parameters", "AdamW"),
        ("Adafactor", "sharded(level=3)", "Adafactor may compute with whole parameters", "SGD"),
        ("SGD", "sharded(level=4)", "level is 4", "1, 2 or 3"),
        ("SGD", 'sharded(shares="1,2,1")', "for 3 workers, there are 2", "start 3 workers"),
        ("SGD", 'sharded(shares="1,-2")', "shares are '1,-2'", "0 or more"),
        ("SGD", 'sharded(workers=2, shares="1")', "1 shares for 2 workers", "give 2 numbers"),
        (
            "SGD",
            "sharded(level=3, workers=1) * pipeline(stages=2, schedule=filled)",
            "sharded(level=3) does not go with schedule filled",
            "sharded(level=2)",
        ),
    ],
)
def test_what_cannot_be_divided_is_refused_in_prepare(warm_pool, optimizer, layout, says, fix):
    for message, way in warm_pool.run(2, refused, optimizer, layout):
        assert says in message
        assert fix in way


def lengths_in_stages(level: int) -> tuple[int, list[int]]:
    """The bytes of all parameters with values after a step, and the lengths of the optimizer's states."""
    session = echelon.join(record=False, shares="equal")
    model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(4)))
    optimizer = optim.Adam(model.parameters())
    layout = f"pipeline(stages=2, schedule=1f1b, cuts='2') * sharded(level={level})"
    model, optimizer = session.prepare(model, optimizer, parallel=layout)
    model(torch.ones(8, 8)).square().mean().backward()
    optimizer.step()
    held = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in model.parameters()}
    states = [len(state["exp_avg"]) for state in optimizer.state.values()]
    session.close()
    return sum(size for size in held.values() if size > 8), states


@pytest.mark.parametrize(("level", "parts"), [(1, 1), (3, 2)])
def test_workers_with_the_same_stage_divide_its_states(warm_pool, level, parts):
    for held, states in warm_pool.run(4, lengths_in_stages, level):
        assert held == 2 * 64 * 4 // parts
        assert states == [32, 32]


def sent_bytes(layout: str, folder: str) -> int:
    """The bytes that this worker sent in the second and third step."""
    session = echelon.join(record=True, shares="equal", factors="never", runs=folder, transport="tcp")
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    loader = torch.utils.data.DataLoader(torch.randn(24, 64), batch_size=8)
    model, optimizer, loader = session.prepare(model, optimizer, loader, parallel=layout)
    for batch in loader:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
    session.close()
    events = list(read_events(session.folder.events_of(session.rank)))
    return sum(one.sent_bytes for one in events if isinstance(one, StepEnded) and one.step in (1, 2))


def test_levels_1_and_2_send_what_an_all_reduce_sends_and_level_3_half_as_much_again(warm_pool, tmp_path):
    def sent(layout: str) -> int:
        (one, other) = warm_pool.run(2, sent_bytes, layout, str(tmp_path / layout))
        return one + other

    whole = sent("data")
    for level, times in ((1, 1.0), (2, 1.0), (3, 1.5)):
        assert sent(f"sharded(level={level})") == pytest.approx(times * whole, rel=0.02)


def on_disk(folder: str, layout: str) -> tuple[dict[str, Tensor], bool]:
    """Weights after some steps and a checkpoint, and whether states lie in mapped files of the folder."""
    session = echelon.join(record=False, shares="equal")
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 200), nn.Tanh(), nn.Linear(200, 200), nn.Linear(200, 6)).double()
    optimizer = optim.AdamW(model.parameters(), lr=0.02)
    model, optimizer = session.prepare(model, optimizer, parallel=layout)
    half = len(X) // session.world_size
    own = X[session.rank * half : (session.rank + 1) * half]
    for step in range(4):
        one_step(model, optimizer, own)
        if step == 1:
            session.save(f"{folder}/checkpoint-{'offload' in layout}")
            session.load(f"{folder}/checkpoint-{'offload' in layout}")
    maps = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    files = [line.split()[0].split("-") for line in maps if f"{folder}/states" in line]
    large = [v for s in optimizer.state.values() for v in s.values() if v.numel() > 4096]
    inside = [
        any(int(begin, 16) <= value.data_ptr() < int(end, 16) for begin, end in files) for value in large
    ]
    found = {name: value.clone() for name, value in model.state_dict().items()}
    session.close()
    return found, bool(inside) and all(inside)


@pytest.mark.parametrize(("level", "workers"), [(1, 1), (1, 2), (3, 2)])
def test_states_on_disk_train_to_the_same_bits_and_leave_no_file(warm_pool, tmp_path, level, workers):
    (tmp_path / "states").mkdir()
    folder = str(tmp_path)
    plain = "data" if workers == 1 else f"sharded(level={level})"
    for one, other in zip(
        warm_pool.run(workers, on_disk, folder, plain),
        warm_pool.run(workers, on_disk, folder, f'sharded(level={level}, offload="{folder}/states")'),
        strict=True,
    ):
        assert not one[1]
        assert other[1], "states lie in mapped files"
        for name, value in one[0].items():
            assert torch.equal(other[0][name], value), name
    assert not list((tmp_path / "states").iterdir())
