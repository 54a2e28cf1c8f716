import pytest
import torch

from echelon.sync.families.mix import MixPolicy
from echelon.sync.policy import POLICIES, ClusterInfo


def test_none_is_a_name_and_not_an_absent_value():
    policy = POLICIES.build("none")
    assert policy.name == "none"
    assert isinstance(policy.resolved(), MixPolicy)


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_workers_never_average(workers):
    policy, cluster = POLICIES.build("none"), ClusterInfo(workers=workers)
    policy.check(cluster)
    assert [policy.averaging(step, 0, cluster) for step in range(50)] == [None] * 50


def test_each_worker_shows_its_own_weights_and_keeps_nothing():
    policy, memory = POLICIES.build("none"), {}
    policy.start(torch.ones(3), memory)
    assert policy.shown == "own"
    assert memory == {}
