"""Schedules that spread what some workers have: broadcast, and all-gather of equal blocks.

Each exists twice: in few steps for small buffers, and in few bytes for large ones. Cost, for alpha per
message and beta per byte (`comm/cost.py` compares any two schedules):

    broadcast, small   binomial tree                     lg P (alpha + n beta)
    broadcast, large   binomial scatter, then a ring     (lg P + P-1) alpha + 2 (P-1)/P n beta
    gather, small      everybody sends to everybody      (P-1) (alpha + n beta), in 1 step
    gather, large      ring                              (P-1) alpha + (P-1) n beta

The other spreading operation, reduce-scatter, is the first half of every `Scattering` collective.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from echelon.comm.schedule.collective import Move, Schedule, ScheduleStep, on, pieces, trim
from echelon.comm.schedule.collectives.ring import RingCollective


def broadcast(rank: int, size: int, length: int, source: int = 0, *, large: bool = False) -> Schedule:
    """Everybody gets the elements of the source."""
    spread = broadcast_pieces if large else broadcast_tree
    return spread(rank, size, length, source)


def broadcast_tree(rank: int, size: int, length: int, source: int = 0) -> Schedule:
    """A binomial tree: in each step, everybody who has the elements gives them to one who has not."""
    return _tree(rank, size, source, [(0, length)] * size)


def broadcast_pieces(rank: int, size: int, length: int, source: int = 0) -> Schedule:
    """The source hands out one part to each worker along a tree; then the parts go round a ring."""
    scatter = _tree(rank, size, source, pieces(0, length, size))
    return scatter + _round(rank, size, length, first=source)


def gather_all(rank: int, size: int, length_each: int, *, large: bool = False) -> Schedule:
    """Block r of the buffer, which worker r has, gets to all; the buffer holds `size` blocks."""
    gather = gather_ring if large else gather_direct
    return gather(rank, size, length_each)


def gather_direct(rank: int, size: int, length_each: int) -> Schedule:
    """Everybody sends its block to everybody, in one step."""
    others = [(rank + shift) % size for shift in range(1, size)]
    mine = (rank * length_each, (rank + 1) * length_each)
    step = ScheduleStep(
        sends=tuple(Move(peer, *mine) for peer in others),
        takes=tuple(Move(peer, peer * length_each, (peer + 1) * length_each) for peer in others),
    )
    return trim([step])


def gather_blocks(rank: int, lengths: Sequence[int]) -> Schedule:
    """Blocks of unequal lengths, everybody's to everybody, in one step."""
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
    """A ring on which the worker `first` has part 0, the next one part 1, and so on."""
    # In the ring's own order, position p has part p+1.
    members = [(first + 1 + position) % size for position in range(size)]
    return on(members, RingCollective().all_gather(members.index(rank), size, length))


def _tree(rank: int, size: int, source: int, parts: list[tuple[int, int]]) -> Schedule:
    """A binomial tree that hands each worker what it and those behind it need.

    Positions count from the source. `parts` are the ranges that the positions need. The worker at a
    position whose lowest bit is b gets its elements from position - b, and hands on to position + b/2,
    + b/4, ..., + 1; so the positions behind it are the b - 1 next ones.
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
