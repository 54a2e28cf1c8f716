"""A number for the bytes of a tensor or of an optimizer's state; almost surely another for other bytes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import xxhash
from torch import Tensor


def checksum(tensor: Tensor | None) -> int:
    """A number for the tensor's bytes, its shape and its type; 0 for none."""
    if tensor is None:
        return 0
    digest = xxhash.xxh3_64(f"{tuple(tensor.shape)} {tensor.dtype}".encode())
    flat = tensor.detach().contiguous().cpu().view(-1)
    if flat.numel():
        digest.update(flat.view(torch.uint8).numpy().data)
    return digest.intdigest() >> 1


def state_checksum(state: Mapping[str, Any]) -> int:
    """A number for what an optimizer keeps of one parameter; 0 for nothing."""
    if not state:
        return 0
    parts = [
        f"{name} {checksum(value) if isinstance(value, Tensor) else repr(value)}"
        for name, value in sorted(state.items())
    ]
    return xxhash.xxh3_64_intdigest("\n".join(parts).encode()) >> 1
