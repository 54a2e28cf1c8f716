"""What every test has: a check that it leaves nothing behind, and warm workers to run on."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# Test modules are imported by file, so their folder is not on the path; `warm` and `leaks` live there.
if str(Path(__file__).parent) not in sys.path:
    sys.path.append(str(Path(__file__).parent))

from leaks import Snapshot, left_behind, left_on_machine
from warm import WarmPool

# Runs keep measurements for later runs: not in the user's folder, and not from one test to the next.
_cache = Path(tempfile.mkdtemp(prefix="echelon-tests-"))
os.environ["ECHELON_CACHE"] = str(_cache)

_pool = pytest.StashKey[WarmPool]()
_machine_before = pytest.StashKey[Snapshot]()

# A shell that starts pytest in the background has it ignore Ctrl-C, and all programs that tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# What hypothesis would complain about depends on the machine's load.
settings.register_profile("any load", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any load")


def pytest_collection_finish() -> None:
    """One thread, as workers have: on a busy machine more would spin while they wait for each other."""
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `-n`: files in parallel, then the tests that need the machine for themselves."""
    from scheduler import FilesThenAlone

    return FilesThenAlone(config, log)


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    """Before pytest-xdist starts its workers, if it does."""
    if not hasattr(session.config, "workerinput"):
        session.config.stash[_machine_before] = Snapshot.take()


@pytest.hookimpl(wrapper=True)
def pytest_sessionfinish(session: pytest.Session) -> Generator[None, None, None]:
    """After pytest-xdist's workers: none of them could say which of them left something on the machine."""
    yield
    before = session.config.stash.get(_machine_before, None)
    found = left_on_machine(before) if before is not None else []
    if found:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
        reporter = session.config.pluginmanager.get_plugin("terminalreporter")
        reporter.write_line("the test run left behind:\n  " + "\n  ".join(found), red=True)


def pytest_unconfigure() -> None:
    """The very last."""
    shutil.rmtree(_cache, ignore_errors=True)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Say which engines that start workers were not tested, and what to install."""
    skipped = terminalreporter.stats.get("skipped", ())
    reasons = {str(one.longrepr[2]).removeprefix("Skipped: ") for one in skipped if one.longrepr}
    for reason in sorted(one for one in reasons if one.startswith("engine ")):
        terminalreporter.write_line(f"not tested: {reason}")


def _exempt(config: pytest.Config) -> set[int]:
    pool = config.stash.get(_pool, None)
    return pool.pids() if pool is not None else set()


@pytest.fixture(scope="session", autouse=True)
def _session_leaves_nothing(pytestconfig: pytest.Config) -> Iterator[None]:
    """At the very end, after the warm workers, all must be as it was at the beginning."""
    before = Snapshot.take()
    yield
    found = left_behind(before, _exempt(pytestconfig))
    if found:
        pytest.fail("the test session left behind:\n  " + "\n  ".join(found), pytrace=False)


@pytest.fixture(autouse=True)
def _nothing_is_known_from_another_test() -> None:
    """What a machine sums fastest stays known: measuring it takes a while, and decides nothing else."""
    shutil.rmtree(_cache / "probe", ignore_errors=True)


@pytest.fixture(autouse=True)
def _test_leaves_nothing(pytestconfig: pytest.Config) -> Iterator[None]:
    """A test ends what it started, and puts back what it changed."""
    before = Snapshot.take(_exempt(pytestconfig))
    yield
    found = left_behind(before, _exempt(pytestconfig))
    if found:
        pytest.fail("this test left behind:\n  " + "\n  ".join(found), pytrace=False)


@pytest.fixture(scope="session")
def warm_pool(pytestconfig: pytest.Config, _session_leaves_nothing: None) -> Iterator[WarmPool]:
    """Up to four processes with torch imported; see tests/warm.py."""
    pool = WarmPool()
    pytestconfig.stash[_pool] = pool
    yield pool
    pool.close()
