"""Runs with parameter servers for tests in warm workers, with a run folder as `echelon run` makes one.

    def work(name, *args):                       # at the top of a test module; runs in the workers
        return take_part(globals()[name], *args)

    def test_...(warm_pool, tmp_path):
        run = ServedRun(tmp_path, workers=3, servers=2, sync="async")
        trained, kept = run.run(warm_pool, work, "script")

Servers are threads of a warm process of their own. With four workers there is no process left, and they are
threads of the leader's process. They run the function that a server's process runs.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from echelon.comm.meet.place import SERVERS_VARIABLE, Place
from echelon.observe.events import AnyEvent, Arrived, Decided, read_events
from echelon.observe.run_folder import RunFolder
from echelon.plan.plan import PlanRequest, make_plan
from echelon.server.process import serve_run
from echelon.server.server import ParameterServer
from warm import WarmPool

_PROCESSES = 4
_PATIENCE_S = 90.0


@dataclass
class Kept:
    """A server's state at the end: weights and versions by table and shard, and the undecided pushes."""

    weights: dict[tuple[int, int], Tensor]
    versions: dict[tuple[int, int], int]
    waiting: int


class ServedRun:
    """The workers, servers and folder of one run."""

    def __init__(self, folder: Path, *, workers: int, servers: int = 0, sync: str, **asked: Any) -> None:
        self.workers = workers
        self.servers = servers
        self.folder = RunFolder(folder).with_subfolders()
        told = PlanRequest(sync=sync, round_timeout_s=asked.pop("round_timeout_s", 90.0), **asked)
        plan = make_plan("test", ["here"] * workers, told, cores=1)
        self.folder.plan.write_text(replace(plan, servers=("here",) * servers).to_toml())

    def run(
        self, pool: WarmPool, work: Callable[..., Any], *args: Any, timeout_s: float = 180
    ) -> tuple[list[Any], list[Kept]]:
        """The workers' results, and the servers' state at the end."""
        apart = self.servers > 0 and self.workers < _PROCESSES
        outcomes = pool.run(self.workers + apart, work, *args, env=self.environment, timeout_s=timeout_s)
        if apart:
            return outcomes[:-1], outcomes[-1]
        if self.workers < _PROCESSES:
            return outcomes, []
        kept = [found for _, found in outcomes if found]
        return [outcome for outcome, _ in outcomes], kept[0] if kept else []

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables beyond those of warm workers."""
        return {
            "WORLD_SIZE": str(self.workers),
            SERVERS_VARIABLE: str(self.servers),
            "ECHELON_RUN": str(self.folder.path),
        }

    def record(self) -> list[AnyEvent]:
        """The coordinator's recorded arrivals and decisions."""
        events = read_events(self.folder.events_of(self.workers))
        return [event for event in events if isinstance(event, Arrived | Decided)]


def take_part(work: Callable[..., Any], *args: Any) -> Any:
    """Be a worker, or all the servers, or both, in a warm process."""
    place = Place.from_environment(os.environ)
    if place.rank >= place.world_size:
        return _Servers(place).ended()
    if place.world_size < _PROCESSES:
        return work(*args)
    servers = _Servers(place) if place.rank == 0 else None
    outcome = work(*args)
    return outcome, servers.ended() if servers else []


class _Servers:
    """All servers of a run, each a thread."""

    def __init__(self, place: Place) -> None:
        self._servers: dict[int, ParameterServer] = {}
        self._errors: list[BaseException] = []
        folder = RunFolder(Path(os.environ["ECHELON_RUN"]))
        ranks = range(place.world_size, place.process_count)
        self._threads = [
            threading.Thread(target=self._serve, args=(replace(place, rank=rank), folder), daemon=True)
            for rank in ranks
        ]
        for thread in self._threads:
            thread.start()

    def _serve(self, place: Place, folder: RunFolder) -> None:
        try:
            server = serve_run(place, folder)
        except BaseException as error:  # noqa: BLE001 - `ended` raises it again
            self._errors.append(error)
        else:
            assert server is not None
            self._servers[place.rank] = server

    def ended(self) -> list[Kept]:
        """Wait for all servers; raises the first error of one."""
        for thread in self._threads:
            thread.join(_PATIENCE_S)
        if self._errors:
            raise self._errors[0]
        return [_kept(self._servers[rank]) for rank in sorted(self._servers)]


def _kept(server: ParameterServer) -> Kept:
    shards = {
        (number, index): shard.state
        for number, table in server._tables.items()
        for index, shard in table.kept.items()
    }
    return Kept(
        weights={key: shard.flat.detach().clone() for key, shard in shards.items()},
        versions={key: shard.version for key, shard in shards.items()},
        waiting=sum(shard.waiting for shard in shards.values()) + len(server._arriving),
    )
