"""bf16: the upper half of a float32, 2 bytes per element.

8 significant bits, and the range of float32. Only values that round up to 2^128 would become infinite; they
are scaled by one half (`codec/halves.py`). Totals are added in float32 and rounded once more.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from echelon.codec.halves import Halves

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Bf16(Halves):
    """Rounds to bfloat16: 2x smaller, 8 significant bits, the range of float32."""

    name: ClassVar[str] = "bf16"
    infinity: ClassVar[int] = 0x7F80
    overflow: ClassVar[float] = 2.0**128 * (1 - 2.0**-9)
    relative: ClassVar[float] = 2.0**-8
    smallest: ClassVar[float] = 2.0**-126  # some processors treat smaller values as zero

    def dtype(self) -> torch.dtype:
        """bfloat16."""
        import torch

        return torch.bfloat16
