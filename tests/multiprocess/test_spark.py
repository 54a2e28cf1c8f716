"""Workers that Spark starts, in real sessions: the user's session goes on, and no process is left behind.

What all launchers have in common is in tests/conformance/test_launchers.py.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import echelon
from echelon.observe.events import StepEnded, read_events
from echelon.observe.run_folder import RunFolder
from echelon.plan.plan import Plan
from echelon.start.agents.callback import Invitation, Reception
from engines.spark import QUICK_JAVA, SparkEngine
from spark_cluster import HOSTS, SparkCluster
from spark_cluster import missing as cluster_missing

MISSING = SparkEngine.missing()
pytestmark = pytest.mark.skipif(bool(MISSING), reason=MISSING)
ROOT = Path(__file__).parents[2]
SOON_S = 120.0


@pytest.fixture(scope="module")
def java(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Java's process, which all sessions of this file have in common; the temporary folder of tasks."""
    temporary = tmp_path_factory.mktemp("spark-temporary")
    before = dict(os.environ)
    handler = signal.getsignal(signal.SIGINT)
    os.environ["PYSPARK_PYTHON"] = sys.executable
    os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"
    os.environ["TMPDIR"] = str(temporary)
    os.environ["JDK_JAVA_OPTIONS"] = QUICK_JAVA
    os.environ["SPARK_AUTH_SOCKET_TIMEOUT"] = "15"  # as pyspark sets them when a session begins
    os.environ["SPARK_BUFFER_SIZE"] = "65536"
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        from pyspark import SparkContext
        from pyspark.java_gateway import launch_gateway
        from pyspark.sql import is_remote
    assert not is_remote()
    gateway = launch_gateway()
    SparkContext._ensure_initialized(gateway=gateway)
    yield temporary
    if SparkContext._active_spark_context is not None:
        SparkContext._active_spark_context.stop()
    SparkContext._gateway = SparkContext._jvm = None
    gateway.shutdown()
    gateway.proc.stdin.close()
    gateway.proc.wait(30)
    signal.signal(signal.SIGINT, handler)
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(scope="module")
def events(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("spark-events")


@pytest.fixture(scope="module")
def session(java: Path, events: Path) -> Any:
    """Four slots; a task may be tried four times, as on a cluster."""
    return _session("local[4,4]", events)


@pytest.fixture
def context(session: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)
    return session


def _session(master: str, events: Path) -> Any:
    from pyspark import SparkConf, SparkContext

    conf = SparkConf().setMaster(master).setAppName("tests")
    conf.set("spark.ui.enabled", "false").set("spark.ui.showConsoleProgress", "false")
    conf.set("spark.python.worker.reuse", "false")  # idle processes would look like forgotten ones
    conf.set("spark.eventLog.enabled", "true").set("spark.eventLog.dir", str(events))
    conf.set("spark.eventLog.compress", "false")
    context = SparkContext(conf=conf)
    context.setLogLevel("OFF")
    context.parallelize([1], 1).map(str).collect()  # starts the process that forks those of tasks
    return context


def train(steps: int) -> tuple[int, int]:
    """A training loop that takes as many steps as it is told."""
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    session = echelon.join()
    loader = DataLoader(TensorDataset(torch.ones(16, 2)), batch_size=16)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = session.prepare(model, optimizer, loader)
    for _ in session.epochs(steps):
        for (x,) in loader:
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return session.rank, session.world_size


def _agents() -> list[psutil.Process]:
    """The agents below this process."""
    below = psutil.Process().children(recursive=True)
    return [one for one in below if "echelon.start.agents.agent" in _words(one)]


def _words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def _when_training(act: Callable[[], Any]) -> threading.Thread:
    """Do something from another thread, once all four workers have made a step."""

    def watch() -> None:
        until = time.monotonic() + SOON_S
        while time.monotonic() < until:
            if any(map(_stepped, Path("runs").glob("*/events/rank-3.jsonl"))):
                act()
                return
            time.sleep(0.05)

    thread = threading.Thread(target=watch)
    thread.start()
    return thread


def _stepped(path: Path) -> bool:
    return any(isinstance(event, StepEnded) for event in read_events(path))


def test_a_function_returns_its_results_and_the_users_session_goes_on(
    context: Any, events: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[Invitation] = []
    invite = Reception.invitation

    def noted(self: Reception, **words: Any) -> Invitation:
        sent.append(invite(self, **words))
        return sent[-1]

    monkeypatch.setattr(Reception, "invitation", noted)
    results = echelon.launch(train, (3,), workers=4, on="spark", transport="shm")
    assert results == [(rank, 4) for rank in range(4)]
    assert context.parallelize(range(4), 2).sum() == 6
    assert [one.order for one in sent] == [0, 1, 2, 3]
    logged = b"".join(path.read_bytes() for path in events.rglob("events_*"))
    assert b"Echelon, 4 workers" in logged
    assert not [one for one in sent if one.encode().encode() in logged or one.token in logged]
    # Three of the four agents were dismissed before the first step, and their slots were held.
    ends = [
        one["Task Info"]["Finish Time"] / 1000
        for one in map(json.loads, logged.splitlines())
        if _is_end(one)
    ]
    (folder,) = Path("runs").iterdir()
    steps = [one.t for one in read_events(RunFolder(folder).events_of(0)) if isinstance(one, StepEnded)]
    assert len([t for t in ends if t > max(steps)]) >= 4


def _is_end(event: dict[str, Any]) -> bool:
    return event["Event"] == "SparkListenerTaskEnd"


@pytest.mark.parametrize("how", ["the user's group", "all jobs", "an agent dies"])
def test_workers_end_with_the_job_which_is_not_tried_again(java: Path, context: Any, how: str) -> None:
    killed: list[psutil.Process] = []

    def act() -> None:
        killed.extend(_agents())
        if how == "the user's group":
            context.cancelJobGroup("mine")
        elif how == "all jobs":
            context.cancelAllJobs()
        else:
            for one in killed:
                one.kill()

    if how == "the user's group":
        context.setJobGroup("mine", "what the user does")
    thread = _when_training(act)
    try:
        with pytest.raises(echelon.EchelonError, match=r"the agent on .* is gone") as caught:
            echelon.launch(train, (1_000_000,), workers=4, on="spark", quiet=True)
    finally:
        thread.join()
        context.setLocalProperty("spark.jobGroup.id", None)
    assert ("ended with exit code" if how == "an agent dies" else "cancelled") in str(caught.value)
    assert killed
    psutil.wait_procs(killed, timeout=30)
    assert not _agents()
    assert context.statusTracker().getActiveJobsIds() == []
    if how != "an agent dies":
        assert not list(java.glob("echelon-*"))
    assert context.parallelize(range(4), 4).sum() == 6


def test_too_few_slots_are_said_at_once_and_nothing_is_started(context: Any) -> None:
    with pytest.raises(echelon.LaunchError, match="Spark has 4 slots, 9 workers need 9"):
        echelon.launch(train, (1,), workers=9, on="spark")
    assert context.statusTracker().getActiveJobsIds() == []
    assert not Path("runs").exists()


def test_slots_that_other_jobs_have_are_said_when_time_is_up(context: Any, tmp_path: Path) -> None:
    begun, ended = tmp_path / "begun", tmp_path / "ended"

    def hold(_: Any) -> list[int]:
        begun.touch()
        while not ended.exists():
            time.sleep(0.05)
        return []

    other = threading.Thread(target=lambda: context.parallelize([1], 1).mapPartitions(hold).collect())
    other.start()
    try:
        _wait_for(begun.exists)
        with pytest.raises(
            echelon.LaunchError,
            match="Spark has 4 slots, of which 4 must be free at once; 1 other job runs",
        ):
            echelon.launch(train, (1,), workers=4, on="spark", join_timeout_s=3)
    finally:
        ended.touch()
        other.join()
    assert context.statusTracker().getActiveJobsIds() == []


def test_another_master_than_that_of_the_active_session_is_refused(context: Any) -> None:
    with pytest.raises(echelon.LaunchError, match="a Spark session with the master local"):
        echelon.launch(train, (1,), workers=2, on='spark(master="spark://elsewhere:7077")')


def test_workers_end_when_the_session_is_stopped(context: Any) -> None:
    there: list[psutil.Process] = []

    def stop() -> None:
        there.extend(_agents())
        context.stop()

    thread = _when_training(stop)
    with pytest.raises(echelon.EchelonError, match="SparkContext was shut down"):
        echelon.launch(train, (1_000_000,), workers=4, on="spark", quiet=True)
    thread.join()
    assert there
    assert psutil.wait_procs(there, timeout=30)[1] == []


def test_executor_without_echelon_is_named_with_the_remedy_and_the_new_session_ends(
    java: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pyspark import SparkContext

    monkeypatch.chdir(tmp_path)
    if SparkContext._active_spark_context is not None:
        SparkContext._active_spark_context.stop()
    bare = tmp_path / "bare-python"
    kept = "import os; print(':'.join(p for p in os.environ['PYTHONPATH'].split(':') if '/pyspark/' in p))"
    paths = f'$({sys.executable} -S -c "{kept}")'
    bare.write_text(f"#!/bin/sh\nPYTHONPATH={paths} exec {sys.executable} -S $@\n")
    bare.chmod(0o755)
    with pytest.raises(echelon.LaunchError, match=r"on \S+ has no module echelon: install Echelon there"):
        echelon.launch(train, (1,), workers=2, on=f'spark(python="{bare}")')
    assert SparkContext._active_spark_context is None


@pytest.mark.skipif(bool(cluster_missing()), reason=cluster_missing())
def test_on_a_cluster_ranks_of_a_host_are_neighbours_and_a_lost_executor_ends_the_run(
    java: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    cluster = SparkCluster(tmp_path)
    try:
        context = _session(cluster.master, tmp_path)
        results = echelon.launch(train, (2,), workers=4, on="spark", quiet=True)
        assert results == [(rank, 4) for rank in range(4)]
        (folder,) = Path("runs").iterdir()
        nodes = [worker.node for worker in Plan.read(RunFolder(folder).plan).workers]
        assert nodes[0] == nodes[1]
        assert nodes[2] == nodes[3]
        assert sorted(set(nodes)) == sorted(HOSTS)
        shutil.rmtree("runs")
        thread = _when_training(lambda: cluster.executors()[0].kill())
        with pytest.raises(echelon.EchelonError, match=r"the agent on spark-[ab] is gone"):
            echelon.launch(train, (1_000_000,), workers=4, on="spark", quiet=True)
        thread.join()
        _wait_for(lambda: not cluster.processes_of_runs())
        context.stop()
    finally:
        cluster.close()


def _wait_for(there: Callable[[], bool]) -> None:
    until = time.monotonic() + SOON_S
    while not there():
        assert time.monotonic() < until
        time.sleep(0.05)
