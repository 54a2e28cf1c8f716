"""What every test has: a check that it leaves nothing behind, and warm workers to run on."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# Test modules are imported by file, so their folder is not on the path; `warm` and `leaks` live there.
if str(Path(__file__).parent) not in sys.path:
    sys.path.append(str(Path(__file__).parent))

from leaks import Snapshot, left_behind
from warm import WarmPool

_pool = pytest.StashKey[WarmPool]()


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
