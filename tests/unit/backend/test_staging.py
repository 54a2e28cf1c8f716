"""Buffers are kept, and dropped in the order of their last use."""

from __future__ import annotations

import torch
from torch import Tensor

from echelon.backend import staging
from echelon.comm.alone import SoloGroup

MEGABYTE = 1 << 20


class SharedGroup(SoloGroup):
    """Two workers of one machine, as far as buffers are concerned."""

    own_transport = True
    size = 2

    def __init__(self) -> None:
        self.made: list[int] = []
        self.released: list[int] = []

    def buffer(self, length: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        self.made.append(length)
        return torch.empty(length, dtype=dtype)

    def release(self, buffer: Tensor) -> None:
        self.released.append(buffer.numel())


def test_buffer_of_the_same_size_and_type_is_used_again() -> None:
    group = SharedGroup()
    held = staging.Staging(group)
    first = held.buffer(100, torch.float32)
    assert held.buffer(100, torch.float32) is first
    assert held.buffer(100, torch.float64) is not first
    assert group.made == [100, 100]


def test_buffers_that_were_not_used_for_longest_make_room() -> None:
    group = SharedGroup()
    held = staging.Staging(group)
    for length in (60, 61, 62, 63):
        held.buffer(length * MEGABYTE, torch.uint8)
    held.buffer(60 * MEGABYTE, torch.uint8)
    held.buffer(59 * MEGABYTE, torch.uint8)
    assert group.released == [61 * MEGABYTE]


def test_small_tensors_and_workers_on_machines_of_their_own_need_no_buffer() -> None:
    group = SharedGroup()
    assert staging.Staging(group).takes(MEGABYTE, torch.float32)
    assert not staging.Staging(group).takes(100, torch.float32)
    group.machines = 2
    assert not staging.Staging(group).takes(MEGABYTE, torch.float32)
