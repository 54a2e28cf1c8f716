"""What is kept of a tensor: all of its values if they are few, a sample of them if they are many, its norm.

The sample is always of the same positions, so that two sides can be compared element by element.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import torch
import xxhash
from torch import Tensor

_SAMPLE = 16_384


@dataclass(frozen=True, slots=True)
class KeptTensor:
    """Values, in 32 or 64 bits, and the norm of the whole tensor."""

    values: Tensor
    norm: float


def keep(tensor: Tensor) -> KeptTensor:
    """Keep what is needed of a tensor."""
    flat = _flat(tensor)
    norm = float(torch.linalg.vector_norm(flat, dtype=torch.float64))
    if len(flat) > _SAMPLE:
        flat = flat[_positions(len(flat))]
    wide = torch.float64 if flat.dtype == torch.float64 else torch.float32
    return KeptTensor(flat.to(wide, copy=True).cpu(), norm)


def digest(tensor: Tensor) -> str:
    """A short text that is the same for the same bits."""
    flat = tensor.detach().reshape(-1).contiguous().cpu()
    return str(xxhash.xxh3_64_hexdigest(flat.view(torch.uint8).numpy().data))


def _flat(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.reshape(-1)


@functools.lru_cache(maxsize=64)
def _positions(count: int) -> Tensor:
    return torch.from_numpy(np.random.Generator(np.random.PCG64(0)).integers(count, size=_SAMPLE))
