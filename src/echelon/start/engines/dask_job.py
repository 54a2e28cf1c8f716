"""The agents of a run as tasks of Dask: one on each of some of its workers.

A task's only work is to run an agent as a child of Dask's worker and to wait for it. Dask cannot end a task
that runs, so an agent ends with its connection to the launcher, and it dies with Dask's worker.
"""

from __future__ import annotations

import contextlib
import importlib
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from echelon.cluster.machine import usable_cores
from echelon.errors import ConfigError, LaunchError
from echelon.start.agents.callback import Invitation, host_and_tell

_LOOK_S = 0.5
_GET_S = 5.0
_CLOSE_S = 5.0


class Letter:
    """An invitation that shows itself nowhere: Dask logs the arguments of a task that raises."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return "Letter(...)"


def deliver(letter: Letter) -> str:
    """The task: run the agent until it ends; returns what went wrong, if anything."""
    return host_and_tell(letter.text)


class DaskSession:
    """A Dask cluster that is ready to use: `client` talks to its scheduler."""

    def __init__(self, client: Any, close: Callable[[], None], *, is_own: bool) -> None:
        self.client = client
        self.close = close
        self.is_own = is_own

    def busy(self) -> dict[str, int]:
        """How many tasks each of Dask's workers has now."""
        return {address: len(tasks) for address, tasks in self.client.processing().items()}

    def threads(self) -> dict[str, int]:
        """How many threads each of Dask's workers has."""
        return dict(self.client.nthreads())


def open_dask(address: str, workers: int, timeout_s: float) -> DaskSession:
    """The cluster at the address, that of the program's client, the configured one, or one for this run."""
    try:
        distributed: Any = importlib.import_module("distributed")
        config: Any = importlib.import_module("dask.config")
    except ImportError as error:
        raise LaunchError(
            f"Dask cannot be imported: {error}", where="--on dask", fix='pip install "echelon[dask]"'
        ) from error
    if not address:
        with contextlib.suppress(ValueError):
            client = distributed.Client.current()
            if client.asynchronous:
                raise ConfigError(
                    "the program's Dask client is asynchronous",
                    where="--on dask",
                    fix="make a Client without asynchronous=True",
                )
            return DaskSession(client, lambda: None, is_own=False)
    address = address or config.get("scheduler-address", None) or ""
    if address:
        return _connected(distributed, address, timeout_s)
    # Its workers are threads of this process: the agents, which do the work, are processes.
    cluster = distributed.LocalCluster(
        n_workers=workers or usable_cores(),
        threads_per_worker=1,
        processes=False,
        dashboard_address=None,
        silence_logs="CRITICAL",
    )
    client = distributed.Client(cluster, set_as_default=False)

    def close() -> None:
        with contextlib.suppress(Exception):
            client.close(_CLOSE_S)
        with contextlib.suppress(Exception):
            cluster.close(_CLOSE_S)

    return DaskSession(client, close, is_own=True)


def _connected(distributed: Any, address: str, timeout_s: float) -> DaskSession:
    try:
        client = distributed.Client(address, timeout=timeout_s, set_as_default=False)
    except Exception as error:
        raise LaunchError(
            f"no Dask scheduler answers at {address}: {error}",
            where="--on dask",
            fix="start one with `dask scheduler`, or correct dask(address=...); "
            "Dask must have the same version here and there",
        ) from error

    def close() -> None:
        with contextlib.suppress(Exception):
            client.close(_CLOSE_S)

    return DaskSession(client, close, is_own=False)


class DaskJob:
    """Tasks that run agents, for as long as the run lasts."""

    def __init__(
        self, session: DaskSession, invitations: Sequence[Invitation], addresses: Sequence[str]
    ) -> None:
        self._session = session
        self._addresses = list(addresses)
        self._ended: str | None = None
        self._looked_at = time.monotonic()
        name = secrets.token_hex(4)
        self._futures = [
            session.client.submit(
                deliver,
                Letter(invitation.encode()),
                key=f"echelon-agent-{name}-{at}",
                workers=[address],
                allow_other_workers=False,
                pure=False,
            )
            for at, (invitation, address) in enumerate(zip(invitations, addresses, strict=True))
        ]

    def waiting_for(self) -> str:
        """Workers that are busy with other tasks."""
        busy = self._session.busy()
        others = {address: busy.get(address, 1) - 1 for address in self._addresses}
        told = [f"{address} has {count} other tasks" for address, count in others.items() if count > 0]
        return "; ".join(told)

    def why_ended(self) -> str | None:
        """The first thing that went wrong with a task, or that all have ended."""
        if self._ended is None:
            self._ended = self._looked()
        return self._ended

    def end(self) -> None:
        """Forget the tasks, whose agents end with their connections, and leave the cluster."""
        if self._ended is None:
            self._ended = "the run has ended"
        if self._futures:
            with contextlib.suppress(Exception):
                self._session.client.cancel(self._futures)
            self._futures = []
            self._session.close()

    def _looked(self) -> str | None:
        for address, future in zip(self._addresses, self._futures, strict=True):
            told = _told(future)
            if told:
                return f"on Dask's worker {address}: {told}"
        if all(future.status == "finished" for future in self._futures):
            return "all its tasks have ended"
        if time.monotonic() - self._looked_at < _LOOK_S:
            return None
        self._looked_at = time.monotonic()
        return self._lost()

    def _lost(self) -> str | None:
        """A worker of Dask's that is gone: Dask would wait for it."""
        try:
            there = self._session.threads()
        except (OSError, RuntimeError) as error:
            return f"Dask's scheduler does not answer: {error}"
        gone = [address for address in self._addresses if address not in there]
        return f"Dask's worker {gone[0]} is gone" if gone else None


def _told(future: Any) -> str:
    """What went wrong with a task; empty if nothing has so far."""
    if future.status == "finished":
        return str(future.result(timeout=_GET_S))
    if future.status == "error":
        error = future.exception(timeout=_GET_S)
        return f"{type(error).__name__}: {error}"
    return "its task was cancelled" if future.status in ("cancelled", "lost") else ""


def chosen(threads: Mapping[str, int], busy: Mapping[str, int], count: int) -> list[str]:
    """The addresses of so many workers: idle ones first, and then few machines rather than many."""
    hosts: dict[str, list[str]] = {}
    for address in sorted(threads, key=lambda one: (busy.get(one, 0) >= threads[one], one)):
        hosts.setdefault(address.rpartition(":")[0], []).append(address)
    idle = {
        host: sum(busy.get(one, 0) < threads[one] for one in addresses) for host, addresses in hosts.items()
    }
    order = [one for host in sorted(hosts, key=lambda host: -idle[host]) for one in hosts[host]]
    order.sort(key=lambda one: busy.get(one, 0) >= threads[one])  # stable
    return order[:count]
