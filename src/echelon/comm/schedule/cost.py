"""Predicts the time of a collective, from its schedule or by formula, and chooses the cheapest.

With alpha seconds per message, beta per byte on the wire, gamma per byte added, n bytes, P workers:

    ring               2 (P-1) alpha + 2 (P-1)/P n beta + (P-1)/P n gamma
    halving-doubling   2 lg P alpha + the same beta and gamma
    butterfly          lg P (alpha + n beta + n gamma)
    direct             2 alpha + 2 (P-2) m + the beta and gamma of a ring, m for a further message in a step

Folding P to a power of two adds 2 alpha + 2 n beta + n gamma. The model assumes equal, full-duplex links
that nobody else uses.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from echelon.comm.schedule.collective import COLLECTIVES, Schedule, ScheduleStep
from echelon.config.units import show_bytes
from echelon.errors import ConfigError

# If costs are this close, the order of preference decides: a ring talks only to neighbours, and
# it sends in a step what arrived in the step before, which is still in the cache.
_NEAR = 1.01
_PREFERRED = ("ring", "halving-doubling", "binary-blocks", "direct", "butterfly")


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkCost:
    """The cost of a worker's link. `message_s` is the cost of each further message of a step.

    If unknown, it defaults to the full latency, as if messages left one after the other.
    """

    latency_s: float
    seconds_per_byte: float
    message_s: float | None = None

    @property
    def further_s(self) -> float:
        """Seconds for each message of a step after the first."""
        return self.latency_s if self.message_s is None else self.message_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The work of the slowest worker: the terms of the formulas."""

    steps: int = 0
    further_messages: int = 0
    wire_bytes: float = 0.0
    added_bytes: float = 0.0

    def seconds(self, link: LinkCost, reduce_seconds_per_byte: float) -> float:
        """The time that the work takes."""
        return (
            self.steps * link.latency_s
            + self.further_messages * link.further_s
            + self.wire_bytes * link.seconds_per_byte
            + self.added_bytes * reduce_seconds_per_byte
        )

    def __add__(self, other: Work) -> Work:
        return Work(
            steps=self.steps + other.steps,
            further_messages=self.further_messages + other.further_messages,
            wire_bytes=self.wire_bytes + other.wire_bytes,
            added_bytes=self.added_bytes + other.added_bytes,
        )


def critical_work(
    schedules: Mapping[int, Schedule], link: LinkCost, reduce_seconds_per_byte: float, itemsize: int = 4
) -> Work:
    """The longest chain of dependent work until all workers have finished their schedules, by rank.

    A step begins when the worker's previous step has ended and all its senders have begun to send. It takes
    its messages' latency, the larger of its sent and received bytes, and its additions. Senders whose
    schedules are not given count as never late: where workers do the same at the same time, one of them
    stands for all.
    """

    def later(*chains: Work) -> Work:
        return max(chains, key=lambda work: work.seconds(link, reduce_seconds_per_byte))

    before = {rank: [Work()] for rank in schedules}  # the work before each step that a worker has reached
    senders = _senders(schedules)
    behind = {rank for rank, schedule in schedules.items() if schedule}
    while behind:
        moved = False
        for rank in sorted(behind):
            at = len(before[rank]) - 1
            awaited = senders[rank][at]
            if any(sent_at >= len(before[peer]) for peer, sent_at in awaited):
                continue
            start = later(before[rank][at], *(before[peer][sent_at] for peer, sent_at in awaited))
            before[rank].append(start + _work(schedules[rank][at], itemsize))
            moved = True
            if at + 1 == len(schedules[rank]):
                behind.remove(rank)
        if not moved:
            raise ConfigError(
                f"the schedules deadlock: workers {sorted(behind)} wait for each other",
                where="collective",
                fix="repair the collective: the k-th send to a worker is its k-th receive from the sender",
            )
    return later(Work(), *(chain[-1] for chain in before.values()))


def _senders(schedules: Mapping[int, Schedule]) -> dict[int, list[list[tuple[int, int]]]]:
    """For each step of each worker: the known peers, and their steps, that send what it receives."""
    sent: dict[tuple[int, int], deque[int]] = {}
    for rank, schedule in schedules.items():
        for at, step in enumerate(schedule):
            for move in step.sends:
                sent.setdefault((rank, move.peer), deque()).append(at)

    def sender(receiver: int, peer: int) -> tuple[int, int]:
        steps = sent.get((peer, receiver))
        if not steps:
            raise ConfigError(
                f"worker {receiver} waits for a message that worker {peer} does not send",
                where="collective",
                fix="repair the collective: the k-th send to a worker is its k-th receive from the sender",
            )
        return peer, steps.popleft()

    return {
        rank: [
            [sender(rank, move.peer) for move in (*step.adds, *step.takes) if move.peer in schedules]
            for step in schedule
        ]
        for rank, schedule in schedules.items()
    }


def _work(step: ScheduleStep, itemsize: int) -> Work:
    added = sum(move.length for move in step.adds)
    received = added + sum(move.length for move in step.takes)
    sent = sum(move.length for move in step.sends)
    messages = max(len(step.sends), len(step.adds) + len(step.takes))
    return Work(
        steps=1,
        further_messages=messages - 1,
        wire_bytes=max(sent, received) * itemsize,
        added_bytes=added * itemsize,
    )


def ring_work(size: int, length_bytes: float) -> Work:
    """2(P-1) steps of n/P."""
    return Work(steps=2 * (size - 1)) + _scattered(size, length_bytes)


def direct_work(size: int, length_bytes: float) -> Work:
    """Two steps of P-1 messages of n/P."""
    if size == 1:
        return Work()
    return Work(steps=2, further_messages=2 * (size - 2)) + _scattered(size, length_bytes)


def halving_doubling_work(size: int, length_bytes: float) -> Work:
    """2 lg P steps of n/2, n/4, ..., and back; folded if P is not a power of two."""
    bits = size.bit_length() - 1
    return Work(steps=2 * bits) + _scattered(1 << bits, length_bytes) + _folding(size, length_bytes)


def butterfly_work(size: int, length_bytes: float) -> Work:
    """lg P steps of n; folded if P is not a power of two."""
    bits = size.bit_length() - 1
    whole = bits * length_bytes
    return Work(steps=bits, wire_bytes=whole, added_bytes=whole) + _folding(size, length_bytes)


def _scattered(size: int, length_bytes: float) -> Work:
    """The bytes of every algorithm in which each worker sums one part."""
    most = (size - 1) / size * length_bytes
    return Work(wire_bytes=2 * most, added_bytes=most)


def _folding(size: int, length_bytes: float) -> Work:
    if size & (size - 1) == 0:
        return Work()
    return Work(steps=2, wire_bytes=2 * length_bytes, added_bytes=length_bytes)


_FORMULAS = {
    "ring": ring_work,
    "halving-doubling": halving_doubling_work,
    "direct": direct_work,
    "butterfly": butterfly_work,
}


def choose(
    size: int, length_bytes: int, link: LinkCost, reduce_seconds_per_byte: float = 0.0, itemsize: int = 4
) -> tuple[str, dict[str, float], str]:
    """The cheapest flat collective, the predicted seconds of each, and a sentence with the reason.

    Of those within 1 % of the cheapest, the first in order of preference is chosen, `ring` first. Costs
    come from formulas, because many buckets ask; binary blocks have no formula, so their cost comes from
    the schedule, and only if P is not a power of two.

    Two workers always use `direct`, so that they use one algorithm for all lengths. That loses a little for
    small buffers: over loopback, in four short runs on a busy machine, a butterfly of two took 0.7 to 1.0
    of its time for 4 kB, 0.8 to 1.1 for 64 kB and 0.9 to 1.5 for 1 MB.
    """
    if size == 1 or not length_bytes:
        name = "direct" if size == 2 else "ring"
        return name, dict.fromkeys(_FORMULAS, 0.0), f"{name}: nothing to send"
    work = {name: formula(size, length_bytes) for name, formula in _FORMULAS.items()}
    if size & (size - 1):
        work["binary-blocks"] = _blocks_work(size, length_bytes, link, reduce_seconds_per_byte, itemsize)
    costs = {name: counted.seconds(link, reduce_seconds_per_byte) for name, counted in work.items()}
    near = _NEAR * min(costs.values())
    name = next(name for name in _PREFERRED if name in costs and costs[name] <= near)
    if size == 2:
        name = "direct"
    return name, costs, f"{name}: {_reason(name, size, length_bytes, work)}"


@lru_cache(maxsize=4096)
def _blocks_work(
    size: int, length_bytes: int, link: LinkCost, reduce_seconds_per_byte: float, itemsize: int
) -> Work:
    """The first worker of each block stands for the block: the others move as much, or an element less."""
    built = COLLECTIVES.build("binary-blocks")
    length = -(-length_bytes // itemsize)
    schedules = {rank: built.schedule(rank, size, length) for rank in _block_starts(size)}
    return critical_work(schedules, link, reduce_seconds_per_byte, itemsize)


def _block_starts(size: int) -> list[int]:
    """The first rank of each block of binary blocks, of which there is one for each bit of the size."""
    starts, start = [], 0
    for bit in reversed(range(size.bit_length())):
        if size >> bit & 1:
            starts.append(start)
            start += 1 << bit
    return starts


def _reason(name: str, size: int, length_bytes: int, work: dict[str, Work]) -> str:
    """Its advantages: fewer steps than a ring, or fewer bytes than a butterfly."""
    mine, ring, butterfly = work[name], work["ring"], work["butterfly"]
    beats = []
    if mine.steps < ring.steps:
        verb = "step of latency beats" if mine.steps == 1 else "steps of latency beat"
        beats.append(f"{mine.steps} {verb} {ring.steps}")
    if mine.wire_bytes < butterfly.wire_bytes:
        beats.append(f"{show_bytes(mine.wire_bytes)} on the wire beat {show_bytes(butterfly.wire_bytes)}")
    elif mine.added_bytes < butterfly.added_bytes:
        beats.append(f"adding {show_bytes(mine.added_bytes)} beats {show_bytes(butterfly.added_bytes)}")
    return f"{size} workers, {show_bytes(length_bytes)}: {', '.join(beats) or 'as cheap as any'}"
