"""How are an optimizer's states kept on disk? In files that are mapped into memory.

The optimizer steps one parameter after another. Its states lie in a mapped file; after the step their
pages are given back to the system, which writes them to disk when memory is scarce and reads them again at
the next step. The arithmetic is the same, on the same values: results are bit for bit those without files.

A file has no name from the moment that it is open, so nothing is left however a worker ends.
"""

from __future__ import annotations

import mmap
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from echelon.config.units import show_bytes
from echelon.errors import ConfigError

_PAGE = mmap.PAGESIZE
_REGION_BYTES = 32 << 20  # that a file grows by, at least


@dataclass(slots=True, eq=False)
class _Region:
    """A mapped part of a file; `used` bytes of it belong to states."""

    memory: mmap.mmap
    size: int
    used: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class _Place:
    """Where a state tensor lies."""

    region: _Region
    begin: int
    size: int

    def tensor(self, like: Tensor) -> Tensor:
        """The state in its place."""
        flat = torch.frombuffer(self.region.memory, dtype=like.dtype, count=like.numel(), offset=self.begin)
        return flat.view(like.shape)

    def rest(self) -> None:
        """Its pages need not stay in memory until they are used again."""
        self.region.memory.madvise(mmap.MADV_DONTNEED, self.begin, self.size)


class OffloadedStates:
    """The states of optimizers in mapped files of one folder."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._regions: list[_Region] = []
        self._places: dict[tuple[int, str], tuple[_Place, Tensor]] = {}
        self._resting: list[tuple[nn.Parameter, Tensor]] = []
        self._check()

    def _check(self) -> None:
        if sys.platform != "linux":
            raise ConfigError(
                "optimizer states are kept on disk on Linux only",
                where="sharded, offload",
                fix="leave offload out",
            )
        if not Path(self._folder).is_dir():
            raise ConfigError(
                f"there is no folder {self._folder!r} to keep optimizer states in",
                where="sharded, offload",
                fix="make it on every machine, on a disk with room for the states",
            )
        self._grow(_PAGE)

    def _grow(self, size: int) -> _Region:
        """A new file, mapped; its name is gone at once, its room on the disk is taken at once."""
        size = -(-size // _PAGE) * _PAGE
        try:
            with tempfile.TemporaryFile(dir=self._folder) as file:
                os.posix_fallocate(file.fileno(), 0, size)
                region = _Region(mmap.mmap(file.fileno(), size), size)
        except OSError as error:
            raise ConfigError(
                f"{show_bytes(size)} of states cannot be kept in {self._folder!r}: {error.strerror}",
                where="sharded, offload",
                fix="give a folder that this worker may write to, on a disk with more room",
            ) from error
        self._regions.append(region)
        return region

    # Steps -----------------------------------------------------------------------------------------

    def step(self, optimizer: Optimizer) -> None:
        """Update every parameter that has a gradient, one after another; the step that follows has none.

        The gradients are there again after `stepped`.
        """
        own_step = type(optimizer).step
        plain = getattr(own_step, "__wrapped__", own_step)  # without the hooks, which this is called from
        with_gradient = [(p, p.grad) for p in _parameters(optimizer) if p.grad is not None]
        for p, _ in with_gradient:
            p.grad = None
        for p, grad in with_gradient:
            p.grad = grad
            plain(optimizer)
            p.grad = None
            self.keep(optimizer, p)
        self._resting = with_gradient

    def stepped(self, optimizer: Optimizer) -> None:
        """The optimizer's own step is over."""
        for p, grad in self._resting:
            p.grad = grad
        self._resting = []
        for known in list(optimizer.state):
            self.keep(optimizer, known)

    def keep(self, optimizer: Optimizer, p: Tensor) -> None:
        """Move a parameter's states to the files, where they are not there yet."""
        state: dict[str, Any] = optimizer.state.get(p, {})
        for key, value in state.items():
            if not isinstance(value, Tensor) or value.numel() * value.element_size() < _PAGE:
                continue
            known = self._places.get((id(p), key))
            if known is None or known[1].shape != value.shape or known[1].dtype != value.dtype:
                room = self._room(value.numel() * value.element_size())
                known = self._places[id(p), key] = room, room.tensor(value)
            place, there = known
            if value.data_ptr() != there.data_ptr():
                there.copy_(value)
                state[key] = there
            place.rest()

    def _room(self, size: int) -> _Place:
        size = -(-size // _PAGE) * _PAGE
        region = self._regions[-1]
        if region.size - region.used < size:
            region = self._grow(max(size, _REGION_BYTES, sum(one.size for one in self._regions) // 4))
        place = _Place(region, region.used, size)
        region.used += size
        return place


def _parameters(optimizer: Optimizer) -> Iterator[nn.Parameter]:
    for group in optimizer.param_groups:
        yield from group["params"]
