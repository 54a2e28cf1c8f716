"""Parameter server: some of the workers sum for all; each of s servers sums one of s shards of the buffer.

Two steps. A worker sends n elements and receives n; a server receives (P-1) n/s for its shard and sends as
many back, so one server is enough only for few workers or small buffers. The first workers are the servers;
with as many servers as workers this equals `direct`.

Servers can also be separate processes that have nothing to add (`served`): `echelon run --servers 2`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from echelon.comm.schedule.collective import Move, Scattering, Schedule, ScheduleStep, pieces, trim
from echelon.comm.schedule.collectives.direct import to_owners
from echelon.errors import ConfigError


def served(rank: int, workers: int, servers: int, length: int) -> Schedule:
    """The steps of a worker, or of a server (whose rank follows the workers'), to sum the workers' buffers.

    A server's own buffer is not part of the sum: the first worker's shard overwrites it.
    """
    shards = pieces(0, length, servers)
    if rank < workers:
        moves = tuple(Move(workers + at, *shard) for at, shard in enumerate(shards))
        return trim([ScheduleStep(sends=moves), ScheduleStep(takes=moves)])
    shard = shards[rank - workers]
    moves = tuple(Move(worker, *shard) for worker in range(workers))
    return trim([ScheduleStep(takes=moves[:1]), ScheduleStep(adds=moves[1:]), ScheduleStep(sends=moves)])


@dataclass(frozen=True, slots=True, kw_only=True)
class PsCollective(Scattering):
    """The first workers are servers that each sum a shard; two steps, few connections."""

    name: ClassVar[str] = "ps"
    servers: int = 1

    def __post_init__(self) -> None:
        if self.servers < 1:
            raise ConfigError(
                f"ps cannot have {self.servers} servers", where="servers", fix="give 1 or more servers"
            )

    def check(self, size: int) -> None:
        """Servers are workers, so there cannot be more of them."""
        if self.servers > size:
            workers = "1 worker" if size == 1 else f"{size} workers"
            raise ConfigError(
                f"ps has {self.servers} servers, but its group has {workers}",
                where="collective ps, servers",
                fix=f"lower servers to {size}, or start more workers",
            )

    def reduce_scatter(self, rank: int, size: int, length: int) -> Schedule:
        """All workers send shard j to server j."""
        return to_owners(rank, self._shards(size, length))

    def owned_range(self, rank: int, size: int, length: int) -> tuple[int, int]:
        """A server's shard; an empty range for other workers."""
        return self._shards(size, length)[rank]

    def _shards(self, size: int, length: int) -> list[tuple[int, int]]:
        self.check(size)
        return pieces(0, length, self.servers) + [(length, length)] * (size - self.servers)
