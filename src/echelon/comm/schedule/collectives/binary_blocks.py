"""Binary blocks: the workers form blocks whose sizes are powers of two, the largest first. Each block runs
recursive halving; smaller blocks pass sums to larger ones, and results return the same way.

13 workers form blocks of 8, 4 and 1. After the halving, each worker of a block of b holds the block's sum
of one of b shares. It divides its share among the workers of the next larger block that own the parts of
it, and they add them. Sums reach the largest block; results go back down, and every block doubles. About 2
lg P steps and 2 n elements for any number of workers (Rabenseifner, Thakur): a worker of a block of b moves
n/b more each way, where folding (`halving-doubling`) moves n. For powers of two it equals
`halving-doubling`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from echelon.comm.schedule.collective import Move, Scattering, Schedule, ScheduleStep, on, trim
from echelon.comm.schedule.collectives.halving_doubling import halve, share


@dataclass(frozen=True, slots=True, kw_only=True)
class BinaryBlocks(Scattering):
    """Halving-doubling in blocks of 2, 4, 8, ... workers; best if their number is not a power of two."""

    name: ClassVar[str] = "binary-blocks"

    def reduce_scatter(self, rank: int, size: int, length: int) -> Schedule:
        """Halve in the block, add the smaller block's sums, send to the larger block."""
        found, at = _locate(rank, size)
        block, position = found[at], rank - found[at].start
        steps = on(block, halve(position, len(block), length))
        if at + 1 < len(found):
            smaller = found[at + 1]
            giver = smaller[position % len(smaller)]
            # A step of its own: next to the last halving, the order of two adds would vary.
            steps.append(ScheduleStep(adds=(Move(giver, *share(position, len(block), length)),)))
        if at > 0:
            larger = found[at - 1]
            takers = range(position, len(larger), len(block))
            gives = (Move(larger[taker], *share(taker, len(larger), length)) for taker in takers)
            steps.append(ScheduleStep(sends=tuple(gives)))
        return trim(steps)

    def owned_range(self, rank: int, size: int, length: int) -> tuple[int, int]:
        """A share of the buffer in the largest block; an empty range in the others."""
        found, at = _locate(rank, size)
        return share(rank, len(found[0]), length) if at == 0 else (length, length)


def blocks(size: int) -> list[range]:
    """The ranks of each block, the largest block first: one block per bit of the number of workers."""
    out = []
    start = 0
    for bit in reversed(range(size.bit_length())):
        if size >> bit & 1:
            out.append(range(start, start + (1 << bit)))
            start += 1 << bit
    return out


def _locate(rank: int, size: int) -> tuple[list[range], int]:
    """All blocks, and the index of the worker's block."""
    found = blocks(size)
    return found, next(index for index, block in enumerate(found) if rank in block)
