"""Why no Spark session can be had is said in words, with what to install; nothing is left behind."""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path

import pytest

from echelon.errors import ConfigError, LaunchError
from echelon.start.engines.spark_session import is_local, open_session
from echelon.start.hosts import Host
from echelon.start.launcher import LAUNCHERS, Wanted


@pytest.fixture
def spark_installed() -> None:
    pytest.importorskip("pyspark", reason="pyspark is not installed", exc_type=ImportError)


def test_missing_pyspark_is_said_with_the_extra_and_java(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyspark", None)
    with pytest.raises(LaunchError, match="pyspark is not installed") as caught:
        open_session("", "", 2)
    assert 'pip install "echelon[spark]"' in caught.value.fix
    assert "Java 17" in caught.value.fix


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.usefixtures("spark_installed")
def test_missing_java_is_said_before_anything_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("JAVA_HOME", raising=False)
    with pytest.raises(LaunchError, match="there is no Java on this machine") as caught:
        open_session("", "", 2)
    assert "Java 17" in caught.value.fix


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.usefixtures("spark_installed")
def test_java_that_spark_does_not_work_with_is_quoted_with_its_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    java = tmp_path / "bin" / "java"
    java.parent.mkdir()
    java.write_text("#!/bin/sh\n[ $1 = -version ] && echo 'old 8' >&2 && exit\necho too old >&2\nexit 1\n")
    java.chmod(0o755)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    before = dict(os.environ)
    with pytest.raises(LaunchError, match="Java does not start Spark: too old\n") as caught:
        open_session("", "", 2)
    assert caught.value.message.endswith("\nold 8")
    del caught
    gc.collect()  # pyspark leaves the pipe to Java open
    assert dict(os.environ) == before


def test_hosts_are_refused_because_spark_has_its_own() -> None:
    wanted = Wanted(workers=2, hosts=[Host("a", 2)], timeout_s=1, env={})
    with pytest.raises(ConfigError, match="Spark knows its machines"):
        LAUNCHERS.build("spark").connect(wanted)


def test_only_sessions_whose_executors_are_threads_here_are_local() -> None:
    assert [is_local(text) for text in ("local", "local[4]", "local[*]", "local[4,4]")] == [True] * 4
    assert [is_local(text) for text in ("spark://a:7077", "yarn", "local-cluster[2,1,512]")] == [False] * 3
