"""What Spark says of a failed job, without stacks and codes."""

from __future__ import annotations

import pytest

from echelon.errors import LaunchError
from echelon.start.engines.spark_job import reason
from echelon.start.launchers.spark import _enough, _refuse_dynamic

ABORTED = """Job aborted due to stage failure: Most recent failure reason: Stage failed.
org.apache.spark.api.python.PythonException: [PYTHON_EXCEPTION] An exception was thrown: Traceback:
  File "worker.py", line 1, in process
    raise RuntimeError(
RuntimeError: the agent on a ended with exit code 1
 SQLSTATE: 38000
\tat org.apache.spark.api.python.PythonRunner.read(PythonRunner.scala:1642)
"""


class JavaError(Exception):
    """As py4j's errors are."""

    def __init__(self, message: str | None) -> None:
        super().__init__("An error occurred while calling o22.collect")
        self.java_exception = self
        self.getMessage = lambda: message


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (JavaError(ABORTED), "the agent on a ended with exit code 1"),
        (JavaError("[SPARK_JOB_CANCELLED] Job 2 cancelled SQLSTATE: XXKDA"), "Job 2 cancelled"),
        (JavaError(None), "An error occurred while calling o22.collect"),
        (ConnectionRefusedError("nobody listens"), "nobody listens"),
    ],
)
def test_reason_is_what_the_task_or_spark_said(error: Exception, told: str) -> None:
    assert reason(error) == told


class Context:
    """The parts of a SparkContext that are asked for."""

    def __init__(self, master: str, slots: list[int], **settings: str) -> None:
        self.master = master
        self._slots = slots
        self._settings = settings
        self._jsc = self

    def getConf(self) -> dict[str, str]:  # noqa: N802
        return {"spark.dynamicAllocation.enabled": self._settings.get("dynamic", "false")}

    def sc(self) -> Context:
        return self

    resourceProfileManager = defaultResourceProfile = sc  # noqa: N815

    def maxNumConcurrentTasks(self, profile: object) -> int:  # noqa: N802
        return self._slots[0] if len(self._slots) == 1 else self._slots.pop(0)


def test_dynamic_allocation_is_refused_where_spark_cannot_have_it() -> None:
    _refuse_dynamic(Context("local[2]", [2], dynamic="true"))
    _refuse_dynamic(Context("yarn", [2]))
    with pytest.raises(LaunchError, match="with dynamic allocation"):
        _refuse_dynamic(Context("yarn", [2], dynamic="true"))


def test_executors_that_are_still_starting_are_waited_for() -> None:
    assert _enough(Context("spark://a:7077", [0, 2, 2, 4]), workers=4, timeout_s=60) == 4


def test_without_a_number_of_workers_there_are_as_many_as_slots() -> None:
    assert _enough(Context("local[3]", [3]), workers=0, timeout_s=60) == 3


def test_a_cluster_without_executors_is_given_up_after_the_timeout() -> None:
    with pytest.raises(LaunchError, match="Spark has 0 slots, 2 workers need 2"):
        _enough(Context("spark://a:7077", [0]), workers=2, timeout_s=0)


def test_a_session_whose_java_is_gone_is_said() -> None:
    with pytest.raises(LaunchError, match="Spark does not answer: pop from empty list"):
        _enough(Context("local[2]", []), workers=2, timeout_s=0)
