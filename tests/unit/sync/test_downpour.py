"""Downpour: how often workers push and pull."""

from __future__ import annotations

import pytest

from echelon.errors import ConfigError
from echelon.sync.families.serve import Apply, Arrival, Release, WeightedPush
from echelon.sync.policies.downpour import Downpour
from echelon.sync.policy import POLICIES, ClusterInfo


def test_workers_push_and_pull_with_the_given_periods():
    policy = POLICIES.build("downpour(3, 5)")
    assert (policy.push_every, policy.pull_every) == (3, 5)
    assert (Downpour().push_every, Downpour().pull_every) == (4, 4)


def test_a_push_is_applied_in_full_on_arrival_and_the_worker_continues():
    rule = Downpour().rule(ClusterInfo(workers=2, servers=1))
    arrival = Arrival(worker=1, step=2, t=0.0, samples=64)
    assert rule.arrive(arrival) == [Apply((WeightedPush(1, 2, 1.0),)), Release(1)]


@pytest.mark.parametrize("option", ["push", "pull"])
def test_a_period_below_one_step_is_refused(option):
    with pytest.raises(ConfigError, match=f"cannot {option} every 0 steps") as caught:
        POLICIES.build(f"downpour({option}=0)")
    assert caught.value.fix
