"""Dask starts the agents: on the workers of its cluster, one on each.

Dask only starts processes here: gradients travel over Echelon's own connections. While a run lasts, each of
its workers occupies one thread of one of Dask's workers.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import ClassVar

from echelon.errors import ConfigError, LaunchError
from echelon.start.agents.callback import Reception
from echelon.start.agents.driver import ConnectedAgent
from echelon.start.agents.gather import gather, limit_cores
from echelon.start.engines.dask_job import DaskJob, DaskSession, chosen, open_dask
from echelon.start.launcher import Launcher, Wanted

_WHERE = "--on dask"


@dataclass(frozen=True, slots=True, kw_only=True)
class Dask(Launcher):
    """Workers of a Dask cluster: the program's own, at an address, or one on this machine."""

    name: ClassVar[str] = "dask"
    address: str = ""  # of the scheduler: tcp://host:8786
    wait_s: float = 0.0  # for so many of Dask's workers to be there

    def connect(self, wanted: Wanted) -> list[ConnectedAgent]:
        """One task on each of as many of Dask's workers."""
        if wanted.hosts:
            raise ConfigError("Dask knows its machines itself", where="--hosts", fix="leave --hosts out")
        session = open_dask(self.address, wanted.workers, wanted.timeout_s)
        try:
            addresses = self._addresses(session, wanted.workers)
            threads = session.threads()
            reception = Reception(wanted.timeout_s, wanted.env)
        except BaseException:
            session.close()
            raise
        try:
            invitations = [reception.invitation(order=at) for at in range(len(addresses))]
            job = DaskJob(session, invitations, addresses)
        except BaseException:
            reception.close()
            session.close()
            raise
        agents = gather(reception, job, len(addresses), engine="dask", timeout_s=wanted.timeout_s)
        if not session.is_own:
            limit_cores(agents, min(threads.get(address, 1) for address in addresses))
        return agents

    def _addresses(self, session: DaskSession, workers: int) -> list[str]:
        if self.wait_s and workers:
            with contextlib.suppress(TimeoutError):
                session.client.wait_for_workers(workers, timeout=self.wait_s)
        threads = session.threads()
        count = workers or len(threads)
        if count > len(threads) or not count:
            raise LaunchError(
                f"{max(count, 1)} workers are asked for, and the Dask cluster at "
                f"{session.client.scheduler.address} has {len(threads)}",
                where=_WHERE,
                fix="start more of Dask's workers, each takes one of Echelon's; or start fewer here; "
                "dask(wait_s=60) waits for workers that are about to come",
            )
        return chosen(threads, session.busy(), count)
