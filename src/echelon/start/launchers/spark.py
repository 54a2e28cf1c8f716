"""Spark starts the agents: in a barrier job with one task for each worker.

The active session is used if there is one, as in a notebook or a program under spark-submit. Spark only
starts processes here: gradients travel over Echelon's own connections.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, ClassVar

from echelon.cluster.machine import usable_cores
from echelon.errors import ConfigError, LaunchError
from echelon.start.agents.callback import Reception
from echelon.start.agents.driver import ConnectedAgent
from echelon.start.agents.gather import gather
from echelon.start.engines.spark_job import SparkJob, reason, slots
from echelon.start.engines.spark_session import is_local, open_session
from echelon.start.launcher import Launcher, Wanted

_POLL_S = 0.1
_SETTLED_S = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Spark(Launcher):
    """Slots of Spark: of the active session, or of a new one on a cluster or on this machine."""

    name: ClassVar[str] = "spark"
    master: str = ""  # of a new session: spark://host:7077; default: SPARK_MASTER, or this machine
    python: str = ""  # the executors' interpreter in a new session; default: PYSPARK_PYTHON, or this one

    def connect(self, wanted: Wanted) -> list[ConnectedAgent]:
        """One agent in each task of a barrier job."""
        if wanted.hosts:
            raise ConfigError(
                "Spark knows its machines, so --hosts has no meaning with --on spark",
                where="--hosts",
                fix="leave it out",
            )
        session = open_session(self.master, self.python, wanted.workers or usable_cores())
        try:
            context = session.context
            _refuse_dynamic(context)
            count = _enough(context, wanted.workers, wanted.timeout_s)
            reception = Reception(wanted.timeout_s, wanted.env)
            try:
                texts = [reception.invitation(order=at).encode() for at in range(count)]
                job = SparkJob(context, texts, session.close)
            except BaseException:
                reception.close()
                raise
        except BaseException:
            session.close()
            raise
        # YARN counts the memory of each executor's processes, so each has its own workers only.
        share = not context.master.startswith("yarn")
        return gather(reception, job, count, engine="spark", timeout_s=wanted.timeout_s, share=share)


def _refuse_dynamic(context: Any) -> None:
    dynamic = context.getConf().get("spark.dynamicAllocation.enabled", "false")
    if dynamic.lower() == "true" and not is_local(context.master):
        raise LaunchError(
            "Spark cannot run barrier jobs in a session with dynamic allocation",
            where="spark.dynamicAllocation.enabled",
            fix="create the session with spark.dynamicAllocation.enabled=false",
        )


def _enough(context: Any, workers: int, timeout_s: float) -> int:
    """How many workers there will be. Waits for executors as long as their number grows."""
    started = changed = time.monotonic()
    there = -1
    while True:
        found = _asked(context)
        now = time.monotonic()
        if found != there:
            there, changed = found, now
        if there >= max(workers, 1) and (workers or is_local(context.master)):
            return workers or there
        if is_local(context.master) or now - started > timeout_s:
            break
        if there > 0 and now - changed > _SETTLED_S:
            if not workers:
                return there
            break
        time.sleep(_POLL_S)
    needed = max(workers, 1)
    raise LaunchError(
        f"Spark has {there} slot{'' if there == 1 else 's'}, {needed} worker{'s' if needed > 1 else ''} "
        f"need{'s' if needed == 1 else ''} {needed}",
        where=context.master,
        fix="start fewer workers, or create a session with more slots: local[N], or more executor cores",
    )


def _asked(context: Any) -> int:
    try:
        return slots(context)
    except Exception as error:
        raise LaunchError(
            f"Spark does not answer: {reason(error)}",
            where=context.master,
            fix="create a new session: this one was stopped, or its Java process is gone",
        ) from error
