"""Optimizer states in mapped files: the same bits, where they lie, what is left, what is refused."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn, optim

from echelon.errors import ConfigError
from echelon.parallel import offload
from echelon.parallel.freed_memory import _SETTINGS
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


KEPT = """
import sys
from pathlib import Path
from echelon.parallel.freed_memory import give_back_freed_memory

def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 >> 20

if sys.argv[1] == "fixed":
    assert give_back_freed_memory()
bytearray(2 << 20)  # freed at once: without a fixed threshold such blocks are parts of the heap from now on
before = resident()
blocks = [bytearray(b"x") * (1 << 20) for _ in range(64)]
kept = blocks[1::2]
del blocks
print(resident() - before - len(kept))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")
def test_freed_memory_goes_back_to_the_system():
    def held(how: str) -> int:
        run = [sys.executable, "-c", KEPT, how]
        env = {name: value for name, value in os.environ.items() if name not in _SETTINGS}
        told = subprocess.run(run, env=env, capture_output=True, text=True, timeout=120, check=True)
        return int(told.stdout)

    assert held("fixed") < 5 < held("as it is")
