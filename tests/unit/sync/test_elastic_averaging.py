import pytest
import torch

from echelon.errors import ConfigError
from echelon.sync.families.mix import Average, MixPolicy
from echelon.sync.families.serve import Apply, Arrival, Release, ServePolicy, WeightedPush
from echelon.sync.policy import POLICIES, ClusterInfo


def test_the_two_forms_belong_to_two_families():
    together = POLICIES.build("elastic-averaging").resolved()
    one_by_one = POLICIES.build("elastic-averaging(asynchronous=true)").resolved()
    assert isinstance(together, MixPolicy)
    assert isinstance(one_by_one, ServePolicy)
    assert together.name == one_by_one.name == "elastic-averaging"
    assert POLICIES.get("elastic-averaging").__module__ == "echelon.sync.policies.elastic_averaging"


def test_all_average_after_every_four_steps_by_default():
    policy, cluster = POLICIES.build("elastic-averaging").resolved(), ClusterInfo(workers=3)
    averagings = {step: policy.averaging(step, 1, cluster) for step in range(9)}
    assert {step for step, averaging in averagings.items() if averaging} == {3, 7}
    assert averagings[3] == Average((0, 1, 2))


def test_worker_and_center_move_towards_each_others_old_values():
    policy, cluster = POLICIES.build("elastic-averaging(0.25)").resolved(), ClusterInfo(workers=2)
    own, memory = torch.zeros(1), {}
    policy.start(own, memory)
    own.fill_(8)
    policy.settle(own, torch.full((1,), 6.0), memory, Average((0, 1)), cluster)
    assert own.item() == 8 - 0.25 * 8
    assert memory["center"].item() == 2 * 0.25 * 6
    assert policy.shown == "center"


@pytest.mark.parametrize("workers", [1, 2, 25])
def test_without_alpha_the_center_moves_nine_tenths_of_the_way_to_the_mean(workers):
    policy, cluster = POLICIES.build("elastic-averaging").resolved(), ClusterInfo(workers=workers)
    policy.check(cluster)
    own, memory = torch.zeros(1), {}
    policy.start(own, memory)
    policy.settle(own, torch.ones(1), memory, Average(tuple(range(workers))), cluster)
    assert memory["center"].item() == pytest.approx(0.9)


def test_asynchronously_the_server_and_the_worker_move_by_the_same_amount():
    policy = POLICIES.build("elastic-averaging(0.25, period=3, asynchronous=true)").resolved()
    center, theirs = torch.zeros(2), torch.full((2,), 8.0)
    assert policy.meet(center, theirs).tolist() == [6, 6]
    assert center.tolist() == [2, 2]
    assert theirs.tolist() == [8, 8]
    assert (policy.pushes, policy.push_every, policy.pull_every) == ("weights", 3, 3)


def test_asynchronously_every_push_is_applied_on_arrival():
    policy = POLICIES.build("elastic-averaging(asynchronous=true)").resolved()
    rule = policy.rule(ClusterInfo(workers=2, servers=1))
    for worker, step in [(1, 0), (1, 1), (0, 0)]:
        arrival = Arrival(worker=worker, step=step, t=0.0, kind="weights")
        assert rule.arrive(arrival) == [Apply((WeightedPush(worker, step, 1.0),)), Release(worker)]


def test_only_the_asynchronous_form_needs_a_server():
    POLICIES.build("elastic-averaging").check(ClusterInfo(workers=4))
    policy = POLICIES.build("elastic-averaging(asynchronous=true)")
    policy.check(ClusterInfo(workers=4, servers=1))
    with pytest.raises(ConfigError, match="parameter server"):
        policy.check(ClusterInfo(workers=4))


def test_a_synchronous_alpha_that_overshoots_the_mean_is_refused():
    POLICIES.build("elastic-averaging(0.25)").check(ClusterInfo(workers=4))
    with pytest.raises(ConfigError, match="and 5 workers the center overshoots") as caught:
        POLICIES.build("elastic-averaging(0.25)").check(ClusterInfo(workers=5))
    assert "1 / 5" in caught.value.fix
    POLICIES.build("elastic-averaging(0.25, asynchronous=true)").check(ClusterInfo(workers=5, servers=1))


@pytest.mark.parametrize("options", ["0.0", "1.0", "-0.1", "nan", "0.1, period=0", "period=-1"])
def test_invalid_options_are_refused(options):
    with pytest.raises(ConfigError) as caught:
        POLICIES.build(f"elastic-averaging({options})")
    assert caught.value.fix
