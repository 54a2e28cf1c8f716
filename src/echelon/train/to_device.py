"""Data on the device of a worker."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def to_device(data: Any, device: torch.device) -> Any:
    """Move tensors to the device, also inside tuples, lists and dicts; on the CPU do nothing."""
    if device.type == "cpu":
        return data
    if isinstance(data, Tensor):
        return data.to(device, non_blocking=True)
    if isinstance(data, dict):
        return {key: to_device(value, device) for key, value in data.items()}
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return type(data)(*(to_device(value, device) for value in data))
    if isinstance(data, (list, tuple)):
        return type(data)(to_device(value, device) for value in data)
    return data
