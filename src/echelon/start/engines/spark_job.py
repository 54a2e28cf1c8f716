"""A Spark job that is one agent for each worker: a barrier stage, run from a thread of its own.

All tasks of a barrier stage start together, or none does. Spark gives up its result stage at the first
failure and does not try it again, so no worker is started twice. The task that Spark sends to executors is
pickled by value, with the invitations in it: they are on no command line, on no page of Spark's UI and in
no event log, and an executor without Echelon can say so.
"""

from __future__ import annotations

import contextlib
import re
import secrets
from collections.abc import Callable, Iterable, Sequence
from typing import Any

# Agents that are done end their tasks by themselves within this time; then the job is cancelled.
_FINISH_S = 1.0
_CANCEL_S = 5.0
_MOST_TEXT = 2000
_GROUP = "spark.jobGroup.id"
_CODES = re.compile(r"\[[A-Z_.]+\] | SQLSTATE: \w+")


class SparkJob:
    """Runs one agent in each of as many slots as there are invitations; `close` is called at its end."""

    def __init__(self, context: Any, invitations: Sequence[str], close: Callable[[], None]) -> None:
        from pyspark import InheritableThread

        self._context = context
        self._invitations = list(invitations)
        self._close = close
        self._tag = f"echelon-{secrets.token_hex(4)}"
        self._why: str | None = None
        self._ended = False
        # Inherits the scheduler's pool, tags and job group of the caller's thread.
        self._thread = InheritableThread(target=self._run, name=f"{self._tag} job", daemon=True)
        self._thread.start()

    def waiting_for(self) -> str:
        """How many slots Spark has, and whether other jobs have some of them."""
        with contextlib.suppress(Exception):  # it is only said in an error, which must not be replaced
            others = len(self._context.statusTracker().getActiveJobsIds()) - 1  # without this one
            busy = f"{others} other job{'s run' if others > 1 else ' runs'}" if others > 0 else ""
            needed = len(self._invitations)
            text = f"Spark has {slots(self._context)} slots, of which {needed} must be free at once"
            return f"{text}; {busy}" if busy else text
        return ""

    def why_ended(self) -> str | None:
        """What Spark said, once the job has ended."""
        return self._why

    def end(self) -> None:
        """End the job, and by it the agents."""
        if self._ended:
            return
        self._ended = True
        try:
            self._thread.join(_FINISH_S)
            if self._thread.is_alive():
                with contextlib.suppress(Exception):  # the session may have been stopped
                    self._context.cancelJobsWithTag(self._tag)
                self._thread.join(_CANCEL_S)
        finally:
            self._close()

    def _run(self) -> None:
        count = len(self._invitations)
        try:
            self._context.addJobTag(self._tag)
            if self._context.getLocalProperty(_GROUP) is None:
                self._context.setJobGroup(self._tag, f"Echelon, {count} workers", interruptOnCancel=True)
            else:  # cancelling the user's own group ends the workers too
                self._context.setInterruptOnCancel(True)
            slots_of_job = self._context.parallelize(range(count), count)
            slots_of_job.barrier().mapPartitions(_task(self._invitations)).collect()
            self._why = "its tasks have ended"
        except Exception as error:  # noqa: BLE001 - Spark's errors have no common class; it is told on
            self._why = reason(error)


def slots(context: Any) -> int:
    """How many tasks Spark can run at once, with the executors that it has now."""
    scala = context._jsc.sc()
    return int(scala.maxNumConcurrentTasks(scala.resourceProfileManager().defaultResourceProfile()))


def reason(error: Exception) -> str:
    """What went wrong in a Spark job, without the stacks of Java and Python."""
    java = getattr(error, "java_exception", None)
    text = str(error)
    with contextlib.suppress(Exception):  # the connection to Java may be gone
        text = (java.getMessage() if java is not None else text) or text
    text = _CODES.sub("", text.partition("\n\tat ")[0])
    lines = [line for line in text.splitlines() if line.strip()]
    ours = [line for line in lines if line.startswith(_MARK)]
    return ours[-1].removeprefix(_MARK) if ours else "\n".join(lines)[-_MOST_TEXT:]


_MARK = "RuntimeError: "  # of what a task raises, in Python's traceback


def _task(invitations: Sequence[str]) -> Callable[[Iterable[int]], list[int]]:
    """What each task does: host an agent, then hold its slot until all agents have ended.

    Several slots of one machine share an agent, so a task whose own agent was dismissed has nothing to do;
    but its slot belongs to a worker of the run. A function in a function is pickled by value.
    """

    def host(_: Iterable[int]) -> list[int]:
        import socket
        import sys

        from pyspark import BarrierTaskContext

        here = socket.gethostname()
        try:
            from echelon.start.agents.callback import host_agent
        except ModuleNotFoundError as error:
            raise RuntimeError(
                f"{sys.executable} on {here} has no module {error.name}: install Echelon there, or set "
                "PYSPARK_PYTHON to an interpreter that has it before the session is created"
            ) from error
        context = BarrierTaskContext.get()
        code = host_agent(invitations[context.partitionId()])
        if code:
            raise RuntimeError(
                f"the agent on {here} ended with exit code {code}; the executor's stderr says why"
            )
        context.barrier()
        return []

    return host
