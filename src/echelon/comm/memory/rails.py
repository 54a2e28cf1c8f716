"""Several workers on each of several machines: shared memory inside a machine, TCP across.

There are as many rails as the smallest machine has workers. Rail r has the r-th worker of every machine
(its carrier there) and one slice of each buffer. A carrier sums its slice over the buffers of its machine,
into its own buffer; the carriers of a rail sum over TCP, by the group's collective; then each carrier
writes the result to all buffers of its machine. So a slice leaves each machine once, all links of a
machine's workers are used at once, and all workers end with the same bits.

A thread does this while the trainer computes. The workers of a machine see each other's progress on their
board. The loop knows of a reduction as soon as this worker is ready for it, even if this worker carries
nothing: so it names dead and late workers here, too. After a failure nothing is reduced any more, because a
late worker may still write to the buffers of others.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from functools import lru_cache

from torch import Tensor

from echelon.comm.future import Future
from echelon.comm.group import Op
from echelon.comm.meet.rendezvous import Member
from echelon.comm.memory.shm import DONE, READY, Board, SharedMemoryTeam, sleep_s, sum_into
from echelon.comm.schedule.collective import Collective, Schedule, on, pieces
from echelon.comm.wire.connection import Connection
from echelon.comm.wire.exchange import Exchange
from echelon.comm.wire.loop import Loop, Operation
from echelon.errors import PeerLost, WorkerError

TAGS = 2  # tags of a reduction: its own, and that of the start of its crossing
_log = logging.getLogger(__name__)


def machines(members: Sequence[Member]) -> list[list[int]]:
    """The ranks of each machine's workers."""
    found: dict[tuple[str, str], list[int]] = {}
    for member in members:
        found.setdefault((member.host, member.node), []).append(member.rank)
    return list(found.values())


class RailLayout:
    """A worker's place among machines and rails. Pure."""

    def __init__(self, machines: Sequence[Sequence[int]], rank: int) -> None:
        self.machine = next(index for index, ranks in enumerate(machines) if rank in ranks)
        self.machines = len(machines)
        self.mates = list(machines[self.machine])
        self.position = self.mates.index(rank)
        self.rails = min(len(ranks) for ranks in machines)
        self.carries = self.position < self.rails
        """Whether this worker exchanges sums with other machines."""
        self.rail = tuple(ranks[self.position] for ranks in machines) if self.carries else ()

    def slice(self, length: int) -> tuple[int, int]:
        """The part of a buffer that this worker carries."""
        return pieces(0, length, self.rails)[self.position] if self.carries else (0, 0)

    def schedule(self, collective: Collective, length: int) -> Schedule:
        """This worker's part of summing its slice of a buffer of that length over its rail."""
        start, stop = self.slice(length)
        return _schedule(collective, self.rail, self.machine, stop - start) if self.carries else []


@lru_cache(maxsize=256)
def _schedule(collective: Collective, rail: tuple[int, ...], position: int, length: int) -> Schedule:
    return on(rail, collective.schedule(position, len(rail), length))


class RailReduction(Operation[Tensor]):
    """A reduction on one worker, from being ready for it until all carriers of its machine are done.

    `parts` are the buffers of this machine. `crossing`, the exchange with other machines, starts when the
    sum of this machine is computed.
    """

    def __init__(
        self, number: int, parts: list[Tensor], op: Op, crossing: Exchange, layout: RailLayout, board: Board
    ) -> None:
        super().__init__(crossing.tag, crossing.deadline_s, parts[layout.position])
        self.number = number
        self.parts = parts
        self.op = op
        self.crossing = crossing
        self.summed = self.written = not layout.carries
        self._is_crossing = False
        self._layout = layout
        self._board = board
        self._connections: Mapping[int, Connection] = {}
        self.timing.begun = self.timing.sent = time.perf_counter()

    def begin(self, connections: Mapping[int, Connection]) -> None:
        """Nothing to send yet."""
        self._connections = connections

    def start_crossing(self) -> None:
        """This machine's sum is computed; runs in the loop's thread."""
        if not self.ended:
            self._is_crossing = True
            self.crossing.begin(self._connections)

    def needs(self, rank: int) -> bool:
        """Whether that worker is not ready, has not written its slice, or still exchanges something."""
        if rank in self._layout.mates:
            return rank in self._behind(READY) or rank in self._behind(DONE)
        if not self._is_crossing:  # nobody on this rail can be done without our part
            return rank in self._layout.rail
        return not self.crossing.ended and self.crossing.needs(rank)

    def awaited(self) -> set[int]:
        """Workers of this machine that are not ready; else those on the rail; else carriers."""
        late = self._behind(READY)
        if not late and self._layout.carries and not self.crossing.ended:
            late = self.crossing.awaited()
        return late or self._behind(DONE)

    def requires(self, rank: int) -> bool:
        """All workers: the result is their sum."""
        return True

    def end(self, error: BaseException | None = None) -> None:
        """End the crossing, too."""
        if not self.ended:
            self.timing.sent = max(self.timing.sent, self.crossing.timing.sent)
            self.timing.adding_s += self.crossing.timing.adding_s
        super().end(error)
        self.crossing.end(error)

    @property
    def is_ready(self) -> bool:
        """Whether all buffers of this machine are filled."""
        return not self._behind(READY)

    @property
    def has_crossed(self) -> bool:
        """Whether the sum of all machines is in this worker's slice."""
        return self.crossing.ended and not self.ended  # a reduction that fails ends before its crossing

    @property
    def is_done(self) -> bool:
        """Whether the result is in all buffers of this machine."""
        return not self._behind(DONE)

    def _behind(self, row: int) -> set[int]:
        late = self._board.behind(row, self.number)
        return {self._layout.mates[at] for at in late if row == READY or at < self._layout.rails}


class _StartCrossing(Operation[None]):
    """Starts the crossing of a reduction, in the loop's thread."""

    def __init__(self, reduction: RailReduction) -> None:
        super().__init__(reduction.tag + 1, reduction.deadline_s, None)
        self.thread = reduction.thread
        self._reduction = reduction

    def begin(self, connections: Mapping[int, Connection]) -> None:
        self._reduction.start_crossing()
        self.end()

    def needs(self, rank: int) -> bool:
        return False

    def awaited(self) -> set[int]:
        return set()


class Rails:
    """The reductions of a group across machines, and the thread that carries them out."""

    def __init__(
        self,
        team: SharedMemoryTeam,
        layout: RailLayout,
        collective: Collective,
        loop: Loop,
        *,
        rank: int,
        deadline_s: float,
    ) -> None:
        self.layout = layout
        self._team = team
        self._collective = collective
        self._loop = loop
        self._rank = rank
        self._deadline_s = deadline_s
        self._number = 0
        self._open: list[RailReduction] = []
        self._door = threading.Lock()
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        self._broken: BaseException | None = None

    def adopt(self, collective: Collective, machines: Sequence[Sequence[int]]) -> None:
        """Sum over machines by this collective from now on, in which they have these positions."""
        self._collective = collective
        self.layout = RailLayout(machines, self._rank)

    def start(self, tag: int, parts: list[Tensor], op: Op, priority: int) -> Future[Tensor]:
        """Publish that this worker's part is filled, and sum it over all machines, in the background.

        `tag` and the next one belong to this reduction; `parts` are those of this machine's workers.
        """
        self._number += 1
        start, stop = self.layout.slice(parts[0].numel())
        crossing = Exchange(
            tag,
            parts[self.layout.position][start:stop],
            self.layout.schedule(self._collective, parts[0].numel()),
            rank=self._rank,
            op=op,
            deadline_s=self._deadline_s,
            priority=priority,
        )
        reduction = RailReduction(self._number, parts, op, crossing, self.layout, self._team.board)
        for future in (crossing.future, reduction.future):
            future.add_done_callback(self._wake.set)
        with self._door:
            if self._broken is None:
                self._open.append(reduction)
                self._begin_thread()
        if self._broken is not None:
            reduction.end(self._broken)
        else:
            self._loop.submit(
                reduction
            )  # before publishing: a peer that sees all ready submits the next operation
            self._team.board.publish(READY, reduction.number)
            self._wake.set()

        return reduction.future

    def sent_elements(self, length: int) -> int:
        """How many elements this worker sends to other machines for a buffer of that length."""
        steps = self.layout.schedule(self._collective, length)
        return sum(move.length for step in steps for move in step.sends)

    def close(self) -> None:
        """End the thread and all reductions at once."""
        self._break(PeerLost("this worker has left the group"))
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    # The thread ----------------------------------------------------------------------------------

    def _begin_thread(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="echelon-rails", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        """Poll the board while reductions are open: it cannot wake a thread."""
        moved_at = time.perf_counter()
        try:
            while self._broken is None:
                self._wake.clear()
                now = time.perf_counter()
                if self._advance():
                    moved_at = now
                else:
                    self._wake.wait(sleep_s(now - moved_at) if self._open else None)
        except Exception as error:  # noqa: BLE001 - waiting threads must learn of any error
            _log.exception("the thread that reduces across machines failed")
            defect = WorkerError(
                f"the thread that reduces across machines failed: {type(error).__name__}: {error}",
                fix="report this as a defect",
            )
            defect.__cause__ = error
            self._break(defect)

    def _advance(self) -> bool:
        """Do what can be done for the open reductions, in their order; returns whether it did."""
        moved = False
        in_order = True  # numbers on the board only grow
        for reduction in list(self._open):
            if reduction.ended:
                self._break(reduction.error or PeerLost("this worker has left the group"))
                return True
            if not reduction.summed and reduction.is_ready:
                self._sum(reduction)
                moved = True
            if in_order and not reduction.written and reduction.has_crossed:
                self._write(reduction)
                moved = True
            in_order = in_order and reduction.written
            if in_order and reduction.is_done:
                self._finish(reduction)
                moved = True
        return moved

    def _sum(self, reduction: RailReduction) -> None:
        begun = time.perf_counter()
        start, stop = self.layout.slice(reduction.parts[0].numel())
        for low, high in self._team.cache_sized(start, stop, reduction.parts[0].element_size()):
            sum_into(self.layout.position, reduction.parts, low, high, reduction.op)
        reduction.timing.adding_s += time.perf_counter() - begun
        reduction.summed = True
        self._loop.submit(_StartCrossing(reduction))

    def _write(self, reduction: RailReduction) -> None:
        start, stop = self.layout.slice(reduction.parts[0].numel())
        own = reduction.parts[self.layout.position]
        for low, high in self._team.cache_sized(start, stop, own.element_size()):
            for other in reduction.parts:
                if other is not own:
                    other[low:high].copy_(own[low:high])
        reduction.written = True
        self._team.board.publish(DONE, reduction.number)

    def _finish(self, reduction: RailReduction) -> None:
        with self._door:
            self._open = [other for other in self._open if other is not reduction]
        reduction.end()
        if reduction.error is not None:  # the loop was first
            self._break(reduction.error)

    def _break(self, error: BaseException) -> None:
        """Fail all open and later reductions with this error."""
        with self._door:
            self._broken = self._broken or error
            left, self._open = self._open, []
        for reduction in left:
            reduction.end(self._broken)
        self._wake.set()
