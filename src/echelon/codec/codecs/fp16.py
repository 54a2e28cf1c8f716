"""fp16: half precision on the wire, 2 bytes per element.

11 significant bits, magnitudes from 2^-24 to 65504. Larger values are scaled, not lost (`codec/halves.py`);
those below 2^-25 are rounded to zero. Totals are added in float32 and rounded once more.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from echelon.codec.halves import Halves

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp16(Halves):
    """Rounds to half precision: 2x smaller, 11 significant bits; values that would overflow are scaled."""

    name: ClassVar[str] = "fp16"
    infinity: ClassVar[int] = 0x7C00
    overflow: ClassVar[float] = 65520.0  # from here on, values round to 65536
    relative: ClassVar[float] = 2.0**-11
    smallest: ClassVar[float] = 2.0**-25

    def dtype(self) -> torch.dtype:
        """IEEE half precision."""
        import torch

        return torch.float16
