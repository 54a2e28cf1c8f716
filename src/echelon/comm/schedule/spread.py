"""Schedules that distribute data: broadcast, and all-gather of equal blocks.

Each has two versions: few steps for small buffers, and few bytes for large ones. Cost, for alpha per
message and beta per byte (`cost.py` compares any two schedules):

    broadcast, small   binomial tree                     lg P (alpha + n beta)
    broadcast, large   binomial scatter, then a ring     (lg P + P-1) alpha + 2 (P-1)/P n beta
    gather, small      every pair exchanges directly     (P-1) (alpha + n beta), in 1 step
    gather, large      ring                              (P-1) alpha + (P-1) n beta

Reduce-scatter is the first half of every `Scattering` collective.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from echelon.comm.schedule.collective import Move, Schedule, ScheduleStep, on, pieces, trim
from echelon.comm.schedule.collectives.ring import RingCollective


def broadcast(rank: int, size: int, length: int, source: int = 0, *, large: bool = False) -> Schedule:
    """Send the source's elements to all workers."""
    spread = broadcast_pieces if large else broadcast_tree
    return spread(rank, size, length, source)


def broadcast_tree(rank: int, size: int, length: int, source: int = 0) -> Schedule:
    """A binomial tree: in each step, every worker that has the elements sends them to one that has not."""
    return _tree(rank, size, source, [(0, length)] * size)


def broadcast_pieces(rank: int, size: int, length: int, source: int = 0) -> Schedule:
    """The source sends one part to each worker along a tree; then the parts go round a ring."""
    scatter = _tree(rank, size, source, pieces(0, length, size))
    return scatter + _round(rank, size, length, first=source)


def gather_all(rank: int, size: int, length_each: int, *, large: bool = False) -> Schedule:
    """Send block r of the buffer, which worker r has, to all; the buffer holds `size` blocks."""
    gather = gather_ring if large else gather_direct
    return gather(rank, size, length_each)


def gather_direct(rank: int, size: int, length_each: int) -> Schedule:
    """Every worker sends its block to all others, in one step."""
    others = [(rank + shift) % size for shift in range(1, size)]
    mine = (rank * length_each, (rank + 1) * length_each)
    step = ScheduleStep(
        sends=tuple(Move(peer, *mine) for peer in others),
        takes=tuple(Move(peer, peer * length_each, (peer + 1) * length_each) for peer in others),
    )
    return trim([step])


def gather_blocks(rank: int, lengths: Sequence[int]) -> Schedule:
    """Every worker sends its block to all others, in one step; blocks may have unequal lengths."""
    cuts = list(accumulate(lengths, initial=0))
    others = [(rank + shift) % len(lengths) for shift in range(1, len(lengths))]
    step = ScheduleStep(
        sends=tuple(Move(peer, cuts[rank], cuts[rank + 1]) for peer in others),
        takes=tuple(Move(peer, cuts[peer], cuts[peer + 1]) for peer in others),
    )
    return trim([step])


def gather_ring(rank: int, size: int, length_each: int) -> Schedule:
    """Blocks go round a ring of neighbours."""
    return _round(rank, size, size * length_each, first=0)


def _round(rank: int, size: int, length: int, *, first: int) -> Schedule:
    """A ring all-gather in which worker `first` has part 0, the next one part 1, and so on."""
    # In `RingCollective`, position p owns part p+1.
    members = [(first + 1 + position) % size for position in range(size)]
    return on(members, RingCollective().all_gather(members.index(rank), size, length))


def _tree(rank: int, size: int, source: int, parts: list[tuple[int, int]]) -> Schedule:
    """A binomial tree that sends each worker the ranges that it and its descendants need.

    Positions count from the source. `parts` are the ranges that the positions need. The worker at a
    position whose lowest bit is b receives from position - b, and sends to position + b/2, + b/4, ..., + 1;
    so its descendants are the next b - 1 positions.
    """
    position = (rank - source) % size
    top = 1 << (size - 1).bit_length()
    reach = position & -position or top

    def needed(child: int, span: int) -> tuple[int, int]:
        return parts[child][0], parts[min(child + span, size) - 1][1]

    steps: Schedule = []
    if position:
        giver = (source + position - reach) % size
        steps.append(ScheduleStep(takes=(Move(giver, *needed(position, reach)),)))
    span = reach // 2
    while span:
        if position + span < size:
            child = position + span
            steps.append(ScheduleStep(sends=(Move((source + child) % size, *needed(child, span)),)))
        span //= 2
    return trim(steps)
