"""Optimizer states in mapped files: the same bits, where they lie, what is left, what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn, optim

from echelon.errors import ConfigError
from echelon.parallel import offload
from echelon.parallel.offload import OffloadedStates


def mapped_in(folder: Path, tensor: Tensor) -> bool:
    """Whether a tensor lies in a mapped file of the folder."""
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        begin, end = (int(word, 16) for word in line.split()[0].split("-"))
        if begin <= tensor.data_ptr() < end:
            return str(folder) in line
    return False


def trained(make: str, folder: Path | None) -> tuple[list[Tensor], optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)).double()
    options = {"SGD": {"momentum": 0.9}}.get(make, {})
    optimizer = getattr(optim, make)(model.parameters(), lr=0.05, **options)
    if folder is not None:
        states = OffloadedStates(str(folder))
        optimizer.register_step_pre_hook(lambda *_: states.step(optimizer))
        optimizer.register_step_post_hook(lambda *_: states.stepped(optimizer))
    x = torch.randn(8, 64, dtype=torch.float64)
    for _ in range(3):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        assert all(p.grad is not None for p in model.parameters()), "a step leaves gradients"
    return [p.detach().clone() for p in model.parameters()], optimizer


@pytest.mark.parametrize("make", ["SGD", "AdamW", "Adagrad", "NAdam", "Rprop"])
def test_states_on_disk_give_the_same_bits_and_leave_no_file(make, tmp_path):
    alone, _ = trained(make, None)
    found, optimizer = trained(make, tmp_path)
    for one, other in zip(alone, found, strict=True):
        assert torch.equal(one, other)
    large = [
        value for state in optimizer.state.values() for value in state.values() if value.numel() > 4000
    ]
    assert large
    assert all(mapped_in(tmp_path, value) for value in large)
    assert not list(tmp_path.iterdir()), "a killed worker leaves nothing either"


def test_a_folder_that_is_not_there_is_refused_by_name(tmp_path):
    with pytest.raises(ConfigError, match=r"there is no folder .*gone") as refused:
        OffloadedStates(str(tmp_path / "gone"))
    assert refused.value.where == "sharded, offload"


def test_a_full_disk_is_an_error_before_states_are_written(tmp_path, monkeypatch):
    def full(*_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(offload.os, "posix_fallocate", full)
    with pytest.raises(ConfigError, match="No space left on device") as refused:
        OffloadedStates(str(tmp_path))
    assert "more room" in refused.value.fix
