"""Servers that only sum: members of the view that have no gradients of their own.

A server does not know what the workers will reduce. The leader sends it a short message ahead of each
reduction: the operation's tag, length, type and kind. Then the server carries out its part of the schedule
like a worker. The workers are ranks 0 to W-1, the servers W to W+S-1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from echelon.comm.group import Op
from echelon.comm.schedule.collective import Move, Schedule, ScheduleStep
from echelon.comm.schedule.collectives.ps import served
from echelon.comm.wire.exchange import Exchange
from echelon.comm.wire.loop import Loop

SERVERS_DO = "what servers do"  # the leader's entry in the rendezvous: SUM, or KEEP parameters
SUM, KEEP = "sum", "keep"
_DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16,
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool,
    torch.complex64, torch.complex128,
)  # fmt: skip
_OPS: tuple[Op, ...] = ("sum", "max", "min")
_FIELDS = 4  # tag, length, type, kind
_OVER = 0  # in place of a tag
_FIRST = -(1 << 60)  # the priority of the leader's messages
_EVER_S = 1e9


class SumServers:
    """The summing servers of a run, on a worker."""

    def __init__(self, loop: Loop, *, rank: int, workers: int, servers: int) -> None:
        self.count = servers
        self._loop = loop
        self._rank = rank
        self._workers = workers
        self._sent = 0

    def schedule(self, length: int) -> Schedule:
        """This worker's part of a reduction by the servers."""
        return served(self._rank, self._workers, self.count, length)

    def announce(self, tag: int, flat: Tensor, op: Op) -> None:
        """Tell the servers of the next reduction; only the leader sends."""
        if self._rank == 0:
            self._tell([tag, flat.numel(), _DTYPES.index(flat.dtype), _OPS.index(op)])

    def dismiss(self) -> None:
        """Tell the servers to end, and wait until that is sent."""
        if self._rank == 0:
            self._tell([_OVER, 0, 0, 0]).future.wait()

    def _tell(self, fields: list[int]) -> Exchange:
        self._sent += 1
        everyone = range(self._workers, self._workers + self.count)
        step = ScheduleStep(sends=tuple(Move(server, 0, _FIELDS) for server in everyone))
        message = Exchange(
            self._sent,
            torch.tensor(fields),
            [step],
            rank=self._rank,
            op="sum",
            deadline_s=_EVER_S,
            priority=_FIRST,
        )
        self._loop.submit(message)
        return message


def serve(loop: Loop, *, rank: int, workers: int, servers: int, deadline_s: float) -> int:
    """Sum for the workers until the leader dismisses the server; returns the number of sums."""
    in_flight: list[Exchange] = []
    received = 0
    while True:
        received += 1
        fields = torch.zeros(_FIELDS, dtype=torch.int64)
        step = ScheduleStep(takes=(Move(0, 0, _FIELDS),))
        message = Exchange(
            received, fields, [step], rank=rank, op="sum", deadline_s=_EVER_S, priority=_FIRST
        )
        loop.submit(message)
        message.future.wait()
        tag, length, dtype, op = fields.tolist()
        if tag == _OVER:
            for exchange in in_flight:
                exchange.future.wait()
            return received - 1
        exchange = Exchange(
            tag,
            torch.empty(length, dtype=_DTYPES[dtype]),
            served(rank, workers, servers, length),
            rank=rank,
            op=_OPS[op],
            deadline_s=deadline_s,
            priority=0,
        )
        loop.submit(exchange)
        in_flight = [one for one in [*in_flight, exchange] if not one.ended or one.error is not None]
        for one in in_flight:
            if one.error is not None:
                raise one.error
