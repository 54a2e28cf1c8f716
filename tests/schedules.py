"""Runs the schedules of all workers in memory, and rejects those that break a rule of `collective.py`.

Messages arrive in random order, and are added or written when they arrive. With `hold`, the transport
buffers messages and a send ends at once; otherwise it ends when its receiver takes it.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence

from echelon.comm.schedule.collective import Collective, Move, Schedule, ScheduleStep
from echelon.comm.schedule.cost import LinkCost, critical_work


class Broken(Exception):
    """A schedule that breaks a rule, or never ends."""


class _Worker:
    def __init__(self, rank: int, schedule: Schedule, buffer: list) -> None:
        self.rank = rank
        self.schedule = schedule
        self.buffer = buffer
        self.at = -1
        self.unsent = 0
        self.awaited: dict[int, tuple[Move, bool]] = {}

    @property
    def ended(self) -> bool:
        return self.at == len(self.schedule)


class _Run:
    def __init__(self, workers: list[_Worker], hold: bool, order: random.Random) -> None:
        self.workers = workers
        self.hold = hold
        self.order = order
        self.outbox: dict[tuple[int, int], deque[list]] = {}
        self.ready: list[tuple[int, int]] = []

    def advance(self, worker: _Worker) -> None:
        """Enter the next step, and those after it while they have nothing to wait for."""
        while not worker.ended and not worker.awaited and not worker.unsent:
            worker.at += 1
            if not worker.ended:
                self._enter(worker, worker.schedule[worker.at])

    def _enter(self, worker: _Worker, step: ScheduleStep) -> None:
        _check(worker.rank, step, len(self.workers), len(worker.buffer))
        for move in step.sends:
            waiting = self.outbox.setdefault((worker.rank, move.peer), deque())
            waiting.append(worker.buffer[move.start : move.stop])
            worker.unsent += not self.hold
            if len(waiting) == 1 and worker.rank in self.workers[move.peer].awaited:
                self.ready.append((worker.rank, move.peer))
        for move in (*step.adds, *step.takes):
            worker.awaited[move.peer] = (move, move in step.adds)
            if self.outbox.get((move.peer, worker.rank)):
                self.ready.append((move.peer, worker.rank))

    def deliver_one(self) -> None:
        at = self.order.randrange(len(self.ready))
        self.ready[at], self.ready[-1] = self.ready[-1], self.ready[at]
        sender, receiver = (self.workers[rank] for rank in self.ready.pop())
        data = self.outbox[sender.rank, receiver.rank].popleft()
        move, add = receiver.awaited.pop(sender.rank)
        if len(data) != move.length:
            raise Broken(f"{sender.rank} sends {len(data)} elements, {receiver.rank} wants {move.length}")
        if add:
            data = [a + b for a, b in zip(receiver.buffer[move.start : move.stop], data, strict=True)]
        receiver.buffer[move.start : move.stop] = data
        sender.unsent -= not self.hold
        self.advance(sender)
        self.advance(receiver)


def _check(rank: int, step: ScheduleStep, size: int, length: int) -> None:
    for moves in (step.sends, (*step.adds, *step.takes)):
        peers = [move.peer for move in moves]
        if len(set(peers)) < len(peers):
            raise Broken(f"{rank} has two messages for one peer in one direction: {step}")
    every = (*step.sends, *step.adds, *step.takes)
    if not every:
        raise Broken(f"{rank} has a step that does nothing")
    for move in every:
        if move.peer == rank or not 0 <= move.peer < size:
            raise Broken(f"{rank} has no peer {move.peer}")
        if not 0 <= move.start < move.stop <= length:
            raise Broken(f"{rank} moves {move}, which is empty or outside of {length} elements")
    for take in step.takes:
        for other in (*step.adds, *step.takes):
            if other is not take and other.start < take.stop and take.start < other.stop:
                raise Broken(f"{rank} overwrites what it receives in the same step: {step}")


def execute(
    schedules: Sequence[Schedule], buffers: Sequence[list], *, hold: bool = True, seed: int = 0
) -> list[list]:
    """Each worker's buffer after all schedules have ended."""
    workers = [
        _Worker(rank, schedule, list(buffer))
        for rank, (schedule, buffer) in enumerate(zip(schedules, buffers, strict=True))
    ]
    run = _Run(workers, hold, random.Random(seed))
    for worker in workers:
        run.advance(worker)
    while run.ready:
        run.deliver_one()
    stuck = {worker.rank: worker.at for worker in workers if not worker.ended}
    if stuck:
        raise Broken(f"deadlock: these workers never leave these steps: {stuck}")
    lost = [way for way, waiting in run.outbox.items() if waiting]
    if lost:
        raise Broken(f"nobody receives what is sent from and to: {lost}")
    return [worker.buffer for worker in workers]


def sent_elements(schedule: Schedule) -> int:
    """How many elements a worker sends."""
    return sum(move.length for step in schedule for move in step.sends)


def predict(
    collective: Collective, size: int, length_bytes: int, link: LinkCost, add_s: float, itemsize: int = 4
) -> float:
    """The predicted seconds for `size` workers to sum buffers of `length_bytes`, from their schedules."""
    length = -(-length_bytes // itemsize)
    schedules = [collective.schedule(rank, size, length) for rank in range(size)]
    return critical_work(dict(enumerate(schedules)), link, add_s, itemsize).seconds(link, add_s)
