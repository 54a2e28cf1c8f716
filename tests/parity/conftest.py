"""Every parity test runs with several numbers of workers and compares with plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from plain import CLUSTERS, assert_identical, assert_same, in_session, plainly
from warm import WarmPool


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """One thread, as the workers have; two would slow each other down in models this small."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=["alone", "two-unequal", "four-unequal"])
def parity(request: pytest.FixtureRequest, warm_pool: WarmPool) -> Callable[..., None]:
    """Fails unless the script ends as in plain PyTorch: to the bit alone, to float tolerance otherwise.

    `work(name, options, *args)` runs a script of the test's module in a session.
    """
    return _check_on(request.param, warm_pool)


@pytest.fixture(params=["alone", *CLUSTERS])
def parity_of_all(request: pytest.FixtureRequest, warm_pool: WarmPool) -> Callable[..., None]:
    """The same with every number of workers, for the basic tests."""
    return _check_on(request.param, warm_pool)


def _check_on(cluster: str, pool: WarmPool) -> Callable[..., None]:
    def check(work: Callable[..., Any], script: Callable[..., Any], *args: Any, rtol: float = 1e-9) -> None:
        reference = plainly(script, *args)
        if cluster == "alone":
            assert_identical(in_session(script, {}, *args), reference)
            return
        workers, options = CLUSTERS[cluster]
        trained = pool.run(workers, work, script.__name__, options, *args)
        assert_same(reference, trained, rtol=rtol)

    return check
